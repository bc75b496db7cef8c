"""A small rollout on a tiny model, trained by the actor in any layout; run inside the ranks."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_opo.batch import Group, PackedBatch, Prompt, Sample, pack

RECIPE = """
name: layouts
run_dir: {run_dir}
model: {{path: {model}, dtype: float32}}
rollout: {{max_response_tokens: 64, temperature: 0.8}}
actor: {{micro_batch_tokens: 128, logprob_chunk_tokens: 16}}
data: {{max_prompt_tokens: 32, train: {{files: [unused.jsonl]}}}}
optimizer: {{lr: 1e-3, eps: 1e-4, weight_decay: 0.1}}
algorithm: {{max_logprob_gap: 100, mean_logprob_gap: 100}}
train: {{steps: 3}}
"""


def make_rollout(vocab_size: int, seed: int = 0) -> PackedBatch:
    """Ragged groups; one response of a single token; advantages as OPO sets them."""
    return _rollout([(4, (1, 9, 30)), (7, (12, 12)), (10, (5, 40, 2, 17))], vocab_size, seed)


def make_short_rollout(vocab_size: int, seed: int = 0) -> PackedBatch:
    """Sequences of 1 to 5 tokens, and two longer ones; holes in the loss mask, and a sequence that
    is not scored at all."""
    groups = [(1, (0, 1, 2, 3)), (2, (1, 1)), (3, (2, 21, 1)), (1, (37, 2))]
    batch = _rollout(groups, vocab_size, seed)
    mask = batch.loss_mask.clone()
    mask[batch.cu_seqlens[5] : batch.cu_seqlens[6]] = False
    mask[::5] = False
    return replace(batch, loss_mask=mask)


def make_pairs(vocab_size: int, seed: int = 0) -> PackedBatch:
    """A prompt and a response of one token each: one of two context-parallel ranks has both."""
    return _rollout([(1, (1, 1, 1)), (1, (1, 1))], vocab_size, seed)


def _rollout(shape: list[tuple[int, tuple[int, ...]]], vocab_size: int, seed: int) -> PackedBatch:
    """Of each group the lengths of the prompt and of the responses."""
    from megatron_opo.advantages import group_advantages_

    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        # transformers gives the padding token (0) no gradient, and it stands in no real text.
        return tuple(torch.randint(1, vocab_size, (count,), generator=generator).tolist())

    groups = []
    for k, (prompt_length, lengths) in enumerate(shape):
        prompt = Prompt(str(k), ids(prompt_length), "", "test", None)
        samples = [
            Sample(str(k), i, ids(n), (-1.0,) * n, (0,) * n, "stop", "", reward=float(i % 2))
            for i, n in enumerate(lengths)
        ]
        groups.append(Group(prompt, tuple(samples)))
    batch = pack(groups)
    group_advantages_(batch)
    return batch


def open_actor(model: str, run_dir: str, overrides: list[str], parallel=None):
    """`parallel` is that of an actor that was here before, in the same layout."""
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.actor.step import Actor
    from megatron_opo.recipe_file import load_recipe
    from megatron_opo.spmd import Driver
    from megatron_opo.weights.load import load_hf

    directory = Path(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"recipe_{os.environ['RANK']}.yaml"  # ranks write it at the same time
    path.write_text(RECIPE.format(model=model, run_dir=run_dir))
    recipe = load_recipe(path, overrides)
    parallel = parallel or initialize(recipe.actor, seed=0)
    hf_config = json.loads((Path(model) / "config.json").read_text())
    actor = Actor(recipe, hf_config, parallel, Driver(parallel.rank, parallel.control))
    load_hf(actor.modules, Path(model), hf_config)
    actor.weights_loaded()
    return actor


def exported(actor) -> dict[str, np.ndarray]:
    from megatron_opo.weights.export import export_hf

    return {
        name: tensor.clone().numpy()
        for name, tensor in export_hf(actor.modules, actor.hf_config, actor.dtype)
    }


def train_two_steps(model: str, run_dir: str, overrides: list[str], order: list[int] | None = None):
    """Scores, metrics of two updates and the final weights; on rank 0."""
    return _two_steps(open_actor(model, run_dir, overrides), make_rollout, order)


def train_in_turn(model: str, run_dir: str, overrides: list[str], cases: list):
    """What `train_two_steps` returns, for each (more overrides, how to make rollouts)."""
    results, parallel = [], None
    for i, (more, make) in enumerate(cases):
        actor = open_actor(model, f"{run_dir}_{i}", [*overrides, *more], parallel)
        parallel = actor.parallel
        results.append(_two_steps(actor, make))
    return results


def _two_steps(actor, make: Callable, order: list[int] | None = None):
    here = actor.driver.is_here
    result = {"metrics": []}
    for step in range(2):
        batch = make(actor.hf_config["vocab_size"], seed=step) if here else None
        if here and order is not None:
            batch = batch.select(order)
        scores = actor.score(batch)
        if here:
            result["scores"] = [
                part.numpy() for part in (scores.logprobs, scores.entropy, scores.sum_squared_probs)
            ]
            batch = replace(batch, rollout_logprobs=scores.logprobs)
        metrics = actor.update(batch, version=step)
        if here:
            result["metrics"].append(metrics)
    weights = exported(actor)
    return result | {"weights": weights} if here else None


def token_baselines(model: str, run_dir: str, overrides: list[str]):
    """A rollout and its advantages by the token baseline, whose weights the actor gives."""
    from megatron_opo.advantages import group_advantages_, token_energies

    actor = open_actor(model, run_dir, overrides)
    batch = make_rollout(actor.hf_config["vocab_size"]) if actor.driver.is_here else None
    scores = actor.score(batch)
    if batch is None:
        return None
    energies = token_energies(scores.logprobs, scores.sum_squared_probs)
    group_advantages_(batch, "otb", energies=energies)
    return batch


def sampled(actor) -> PackedBatch:
    """A rollout whose logprobs are the actor's own; on rank 0."""
    here = actor.driver.is_here
    batch = make_rollout(actor.hf_config["vocab_size"], seed=actor.version) if here else None
    scores = actor.score(batch)
    return replace(batch, rollout_logprobs=scores.logprobs) if here else None


def _step(actor) -> dict[str, float]:
    return actor.update(sampled(actor), version=actor.version)


def open_writer(actor):
    from megatron_opo.actor.checkpoint_writer import CheckpointWriter

    return CheckpointWriter(actor.recipe, actor.driver, actor.parallel, 0)


def save(actor, cursor: dict) -> None:
    """A checkpoint, complete when this returns."""
    writer = open_writer(actor)
    writer.start(actor, lambda: {"cursor": cursor})
    writer.wait()


def train_and_save(model: str, run_dir: str, overrides: list[str]):
    """A step, a checkpoint, and the next step's metrics and weights."""
    actor = open_actor(model, run_dir, overrides)
    _step(actor)
    save(actor, {"row": 7})
    metrics = _step(actor)
    return {"metrics": metrics, "weights": exported(actor)}


def resume_and_train(model: str, run_dir: str, overrides: list[str]):
    """What `train_and_save` returns, from its checkpoint on."""
    from megatron_opo.actor.checkpoint import load_checkpoint
    from megatron_opo.runs import latest_checkpoint

    actor = open_actor(model, run_dir, overrides)
    checkpoint = latest_checkpoint(actor.recipe.run_path)
    assert checkpoint is not None
    load_checkpoint(actor, checkpoint)
    restored = actor.version, checkpoint.version, checkpoint.cursor
    metrics = _step(actor)
    return {"restored": restored, "metrics": metrics, "weights": exported(actor)}


def refused_update(model: str, run_dir: str, steps_before: int, overrides: list[str]):
    """Offer a rollout of version 0, after some steps: the error, whether the weights stayed as they
    were, and the version after."""
    from megatron_opo.errors import OnPolicyError

    actor = open_actor(model, run_dir, overrides)
    for _ in range(steps_before):
        _step(actor)
    before = exported(actor)
    message = ""
    try:
        actor.update(make_rollout(actor.hf_config["vocab_size"]), version=0)
    except OnPolicyError as error:
        message = str(error)
    after = exported(actor)
    return message, all((before[name] == after[name]).all() for name in before), actor.version
