"""Families whose parameters servers hold in other forms: experts of a layer in two tensors, biases
of query, key and value in one. Real servers over two tensor-parallel ranks."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_qwen2, tiny_qwen3_moe
from safetensors.torch import save_file
from servers import (
    START_TIMEOUT_S,
    FaultyProxy,
    launch_pool,
    perturbed,
    prompts,
    reference_logprobs,
)
from transformers import AutoModelForCausalLM

from megatron_opo.errors import WeightError
from megatron_opo.rollout import close_servers, wait_healthy
from megatron_opo.rollout.checksum import ExpectedChecksums, hash_cpu, hash_cuda

MODELS = {
    # Per rank: 4 layers of 9 parameters, embedding, head and the last norm.
    "experts": (lambda path: tiny_qwen3_moe(path, mlp_only_layers=[]), 2 * (4 * 9 + 3)),
    # 4 layers of 7.
    "biases": (tiny_qwen2, 2 * (4 * 7 + 3)),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """All of them side by side: they take long to load."""
    pools = {}
    try:
        for name, (make, _) in MODELS.items():
            scratch = tmp_path_factory.mktemp(name)
            pools[name] = launch_pool(make(scratch / "model"), scratch, tensor_parallel=2)
        yield pools
    finally:
        for pool in pools.values():
            close_servers(pool.servers)


@pytest.fixture(scope="module")
def pools(launched):
    for pool in launched.values():
        wait_healthy(pool.servers, START_TIMEOUT_S)
    return launched


def largest_gap(pool, rollout, weights, version: int, directory) -> float:
    """Between the logprobs of sampled tokens and those of transformers with these weights."""
    shutil.copytree(pool.model.path, directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    groups = rollout.generate(
        prompts(6), samples_per_prompt=2, version=version, temperature=1.0, max_response_tokens=8
    )
    return max(
        (torch.tensor(sample.logprobs, dtype=torch.float64) - expected).abs().max().item()
        for group in groups
        for sample in group.samples
        for expected in [reference_logprobs(model, group.prompt.token_ids, sample.response_ids)]
    )


@pytest.mark.parametrize("name", MODELS)
def test_new_weights_arrive_and_are_verified(name, pools, tmp_path):
    pool = pools[name]
    rollout = pool.rollout()
    weights = perturbed(pool.weights(), 1)
    version = pool.next_version()
    assert rollout.sync(iter(weights.items()), version).checksums == MODELS[name][1]
    gap = largest_gap(pool, rollout, weights, version, tmp_path / "model")
    print(f"{name}: largest logprob gap {gap:.1e}")
    assert gap < 5e-5
    assert largest_gap(pool, rollout, pool.weights(), version, tmp_path / "other") > 0.05


EXCHANGED = {
    "experts": ("mlp.experts.1.down_proj.weight", "mlp.experts.2.down_proj.weight", "w2_weight"),
    "biases": ("self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.qkv_proj.bias"),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_that_change_places_on_the_way_are_found(name, pools):
    pool = pools[name]
    one, other, named = (f"model.layers.2.{part}" for part in EXCHANGED[name])
    named = named.removeprefix("model.layers.2.")

    def exchange(path, body):
        names = {one: other, other: one}
        if path == "/update_weights_from_distributed":
            body = body | {"names": [names.get(each, each) for each in body["names"]]}
        return body

    with FaultyProxy(pool.servers[0].url, rewrite=exchange) as proxy:
        rollout = pool.rollout([proxy.server])
        with pytest.raises(WeightError) as caught:
            rollout.sync(iter(perturbed(pool.weights(), 2).items()), pool.next_version())
    assert f": 1 of {MODELS[name][1] // 2} weights are not what the trainer sent" in str(
        caught.value
    )
    assert f"{named}: sent " in str(caught.value)


EXPERTS, CHANNELS, HIDDEN = 3, 8, 6
LAYER = "model.layers.0.mlp.experts."


def expert_tensors() -> dict[str, torch.Tensor]:
    shapes = {"gate_proj": (CHANNELS, HIDDEN), "up_proj": (CHANNELS, HIDDEN)}
    shapes["down_proj"] = (HIDDEN, CHANNELS)
    return {
        f"{LAYER}{expert}.{part}.weight": torch.randn(shape)
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    }


@given(st.permutations(range(3 * EXPERTS)), st.sampled_from([1, 2, 4]), st.booleans())
def test_experts_are_cut_and_stacked_as_servers_do_in_whatever_order_they_come(order, size, cuda):
    weights = expert_tensors()
    expected = ExpectedChecksums([size], cuda=cuda, kv_heads=2)
    for name in [list(weights)[i] for i in order]:
        expected.add(name, weights[name])
    gate, up, down = (
        torch.stack([weights[f"{LAYER}{i}.{part}_proj.weight"] for i in range(EXPERTS)])
        for part in ("gate", "up", "down")
    )
    rows = CHANNELS // size
    ranks = []
    for rank in range(size):
        mine = slice(rank * rows, (rank + 1) * rows)
        held = {
            "w13_weight": torch.cat([gate[:, mine], up[:, mine]], dim=1),
            "w2_weight": down[:, :, mine],
        }
        digest = hash_cuda if cuda else hash_cpu
        checksums = {LAYER + name: digest([tensor]) for name, tensor in held.items()}
        ranks.append({"parallelism_info": {"tp_rank": rank}, "checksums": checksums})
    assert expected.compare("s", ranks) == 2 * size


def test_an_expert_that_was_never_sent_is_named():
    expected = ExpectedChecksums([1], cuda=False, kv_heads=2)
    for name, tensor in expert_tensors().items():
        if name != f"{LAYER}1.up_proj.weight":
            expected.add(name, tensor)
    with pytest.raises(WeightError, match=r"w13_weight is .* expert 1's up_proj was never sent"):
        expected.compare("s", [])
