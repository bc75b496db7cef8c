"""The logprob of every sampled token, told by a real server while it samples, is to the bit the one
that the trainer finds: in any layout, for any model, alone and in batches."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from actor_cases import open_actor
from models import tiny_llama, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe
from ranks import run_ranks
from servers import START_TIMEOUT_S, Pool, launch_pool

from megatron_opo.batch import PackedBatch, Prompt, pack
from megatron_opo.rollout import close_servers, wait_healthy

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    make: Callable[[Path], Path]
    dtype: str
    tensor_parallel: int
    layouts: tuple[str, ...]


CASES = {
    "qwen3": Case(tiny_qwen3, "float32", 1, ("", "pp2", "cp2", "dp2", "recompute")),
    "qwen3 bfloat16": Case(tiny_qwen3, "bfloat16", 1, ("", "vpp2")),
    "llama3": Case(
        lambda path: tiny_llama(path, rope_parameters=LLAMA3), "float32", 2, ("tp2", "sp2 pp2")
    ),
    "qwen2": Case(tiny_qwen2, "bfloat16", 2, ("tp2", "sp2")),
    "experts": Case(
        lambda path: tiny_qwen3_moe(path, mlp_only_layers=[], num_experts_per_tok=3),
        "bfloat16",
        1,
        ("", "ep2"),
    ),
}
OVERRIDES = {
    "pp2": ["actor.pipeline_parallel=2"],
    "vpp2": ["actor.pipeline_parallel=2", "actor.virtual_pipeline=2"],
    "cp2": ["actor.context_parallel=2"],
    "dp2": ["actor.data_parallel=2"],
    "ep2": ["actor.data_parallel=2", "actor.expert_parallel=2"],
    "tp2": ["actor.tensor_parallel=2"],
    "sp2": ["actor.tensor_parallel=2", "actor.sequence_parallel=true"],
    "recompute": ["actor.recompute=full"],
}


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    launched = {}
    try:
        for name, case in CASES.items():
            scratch = tmp_path_factory.mktemp("exact")
            path = case.make(scratch / "model")
            launched[name] = launch_pool(
                path, scratch, dtype=case.dtype, tensor_parallel=case.tensor_parallel
            )
        for pool in launched.values():
            wait_healthy(pool.servers, START_TIMEOUT_S)
        yield launched
    finally:
        for pool in launched.values():
            close_servers(pool.servers)


def mixed_prompts(vocab: int) -> list[Prompt]:
    """Of 1 to 150 tokens; two begin with what another one is."""
    draw = random.Random(0)
    ids = [tuple(draw.choices(range(2, vocab), k=n)) for n in (1, 2, 7, 31, 64, 150)]
    ids += [ids[4] + (5, 6), ids[5] + (7,)]
    return [Prompt(str(i), each, "", "test", None) for i, each in enumerate(ids)]


def sample(pool: Pool, version: int, temperature: float) -> PackedBatch:
    groups = pool.rollout().generate(
        mixed_prompts(60),
        samples_per_prompt=3,
        version=version,
        temperature=temperature,
        max_response_tokens=60,
    )
    rewarded = [
        replace(group, samples=tuple(replace(each, reward=1.0) for each in group.samples))
        for group in groups
    ]
    assert len({len(each.response_ids) for group in groups for each in group.samples}) > 5
    return pack(rewarded)


def score(model: str, run_dir: str, overrides: list[str], batch: PackedBatch):
    """The actor's logprobs, [T]; on rank 0."""
    actor = open_actor(model, run_dir, overrides)
    scores = actor.score(batch if actor.driver.is_here else None)
    return scores.logprobs.numpy() if actor.driver.is_here else None


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, case in CASES.items() for layout in case.layouts]
)
def test_server_and_trainer_find_the_same_bits(name, layout, pools, tmp_path):
    pool = pools[name]
    overrides = [each for part in layout.split() for each in OVERRIDES[part]]
    batch = sample(pool, 0, 0.8)
    ranks = 2 ** sum(each.endswith("2") for each in layout.split())
    overrides.append(f"model.dtype={CASES[name].dtype}")
    found, *_ = run_ranks(ranks, score, pool.model.path, str(tmp_path / "run"), overrides, batch)
    mask = batch.loss_mask.numpy()
    assert mask.sum() > 300
    assert np.array_equal(found[mask], batch.rollout_logprobs.numpy()[mask])
