"""Copies that differ by one bit on one rank are found, named, and nothing is saved of them."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_opo.actor.replicas import CHUNK_OF, checksum
from tests.actor_cases import _step, open_actor
from tests.models import tiny_qwen3, tiny_qwen3_moe
from tests.ranks import run_ranks

MATRIX = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.layers.0.input_layernorm.weight"


def flip_a_bit(tensor: torch.Tensor, place: int) -> None:
    words = tensor.detach().view(-1)
    words.view({2: torch.int16, 4: torch.int32}[words.itemsize])[place] ^= 1


def find(actor, name: str) -> torch.Tensor:
    """A parameter, or something else "of" one."""
    kind, _, name = name.rpartition(" of ")
    parameter = dict(actor.modules[0].named_parameters())[name]
    if not kind:
        return parameter
    main = getattr(parameter, "main_param", parameter)
    if kind == "main parameter":
        return main
    parts = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    return next(p.optimizer.state[main][kind] for p in parts if main in p.optimizer.state)


def corrupt_one_by_one(model: str, run_dir: str, overrides: list[str], names: list[str], rank: int):
    """What is said after two steps, and then with one bit of each tensor flipped on `rank`."""
    from megatron_opo.actor.replicas import check_replicas
    from megatron_opo.errors import TrainingError

    actor = open_actor(model, run_dir, overrides)
    check_replicas(actor)
    _step(actor)
    _step(actor)
    check_replicas(actor)
    said = {}
    for name in names:
        tensor = None
        if actor.parallel.rank == rank:
            tensor = find(actor, name)
            flip_a_bit(tensor, tensor.numel() // 2)
        try:
            check_replicas(actor)
            said[name] = ""
        except TrainingError as error:
            said[name] = str(error)
        if tensor is not None:
            flip_a_bit(tensor, tensor.numel() // 2)
    check_replicas(actor)
    if actor.parallel.rank == rank:
        actor.version += 1
    with pytest.raises(TrainingError, match="the policy's version: rank"):
        check_replicas(actor)
    return said


# Tensors of which one bit is flipped on rank 1, and whether another rank has the same.
CASES = {
    "TP2 DP2": (
        ["actor.tensor_parallel=2", "actor.data_parallel=2"],
        {MATRIX: "rank 1 has X, rank 3 has X", NORM: "ranks 0, 2, 3 have X, rank 1 has X"},
    ),
    "DP2, optimizer not sharded": (
        ["actor.data_parallel=2", "optimizer.distributed=false"],
        dict.fromkeys((MATRIX, f"exp_avg of {NORM}"), "rank 0 has X, rank 1 has X"),
    ),
    "TP2, bfloat16": (
        ["actor.tensor_parallel=2", "optimizer.distributed=false", "model.dtype=bfloat16"],
        {
            MATRIX: "",
            f"exp_avg of {MATRIX}": "",
            f"main parameter of {NORM}": "rank 0 has X, rank 1 has X",
            f"exp_avg of {NORM}": "rank 0 has X, rank 1 has X",
        },
    ),
    "PP2, tied": (
        ["actor.pipeline_parallel=2"],
        {MATRIX: "", "output_layer.weight": "rank 0 has X, rank 1 has X"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_qwen3(tmp_path_factory.mktemp("model") / "model"))


@pytest.mark.parametrize("layout", CASES)
def test_one_bit_on_one_rank_is_found_where_others_hold_the_same(layout, model, tmp_path):
    overrides, cases = CASES[layout]
    ranks = 2 ** layout.count("P2")
    answers = run_ranks(ranks, corrupt_one_by_one, model, str(tmp_path), overrides, [*cases], 1)
    for said in answers:
        assert said == answers[0], "all ranks say the same"
        for name, expected in cases.items():
            if not expected:
                assert said[name] == ""
                continue
            first, found, last = said[name].splitlines()
            assert first.startswith("version 2: ranks hold different values of what must be the")
            shown = f"{name}: {expected}"
            if name == "output_layer.weight":
                shown = f"embedding.word_embeddings.weight of pipeline stage 0 chunk 0: {expected}"
            assert re.sub("[0-9a-f]{16}", "X", found.strip()) == shown
            assert last.startswith("Nothing of this version was saved")


def test_ranks_with_different_experts_need_not_agree_on_them(tmp_path):
    model = tiny_qwen3_moe(tmp_path / "model")
    overrides = ["actor.expert_parallel=2", "actor.data_parallel=2"]
    expert, router = (
        f"decoder.layers.0.mlp.{name}.weight"
        for name in ("experts.local_experts.0.linear_fc1", "router")
    )
    names = [expert, router]
    said = run_ranks(2, corrupt_one_by_one, str(model), str(tmp_path), overrides, names, 1)[0]
    assert said[expert] == ""
    assert f"{router}: rank 0 has " in said[router]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    st.integers(1, 40),
    st.data(),
)
def test_any_changed_bit_and_any_swap_changes_the_checksum(monkeypatch, dtype, size, data):
    monkeypatch.setitem(CHUNK_OF, "cpu", data.draw(st.integers(1, 50)))
    width = torch.empty(0, dtype=dtype).element_size()
    raw = bytearray(data.draw(st.binary(min_size=size * width, max_size=size * width)))
    tensor = torch.frombuffer(bytes(raw), dtype=dtype).clone()
    before = checksum(tensor)
    assert checksum(tensor.view(1, -1).T) == before
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert checksum(torch.frombuffer(raw, dtype=dtype)) != before
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    is_same = swapped.view(torch.uint8).equal(tensor.view(torch.uint8))
    assert (checksum(swapped) == before) == is_same
