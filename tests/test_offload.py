"""Gradients and optimizer state leave the device between updates, and nothing changes by a bit."""

import pytest
import torch

from tests.actor_cases import _step, open_actor, save
from tests.models import tiny_qwen3
from tests.ranks import run_ranks

LAYOUTS = {
    "DP2": ["actor.data_parallel=2", "model.dtype=bfloat16"],
    "DP2, optimizer not sharded": [
        "actor.data_parallel=2",
        "model.dtype=bfloat16",
        "optimizer.distributed=false",
    ],
    "TP2": ["actor.tensor_parallel=2"],
}


def weights_of(actor) -> dict[str, list]:
    return {
        name: parameter.detach().float().flatten().tolist()
        for module in actor.modules
        for name, parameter in module.named_parameters()
    }


def two_steps(model: str, run_dir: str, overrides: list[str]):
    actor = open_actor(model, run_dir, overrides)
    _step(actor)
    _step(actor)
    return weights_of(actor)


def two_steps_and_memory_away_between(model: str, run_dir: str, overrides: list[str]):
    """The weights after, what was where meanwhile, and what a checkpoint of then goes on to."""
    from megatron_opo.actor.offload import state_tensors

    actor = open_actor(model, run_dir, overrides)
    for _ in range(2):  # also before there are moments; and a second time is without effect
        actor.memory.give_away()
    actor.memory.take_back()
    _step(actor)
    weights, state = weights_of(actor), list(state_tensors(actor.model, actor.optimizer))
    before = [(t.data_ptr(), t.clone()) for t in state]
    buffers = [b.grad_data for c in actor.model for b in c.buffers + c.expert_parallel_buffers]
    sizes = [buffer.untyped_storage().size() for buffer in buffers]
    actor.memory.give_away()
    facts = {
        "gradient_bytes": [buffer.untyped_storage().size() for buffer in buffers],
        "moved": all(
            t.data_ptr() != place and torch.equal(t, value)
            for t, (place, value) in zip(state, before, strict=True)
        ),
        "state_bytes": sum(t.nbytes for t in state),
        "weights_stayed": weights_of(actor) == weights,
    }
    save(actor, {"row": 7})
    with pytest.raises(AssertionError, match="on the host"):
        _step(actor)
    actor.memory.take_back()
    facts["restored"] = [buffer.untyped_storage().size() for buffer in buffers] == sizes
    _step(actor)
    return weights_of(actor), facts


def resumed_step(model: str, run_dir: str, overrides: list[str]):
    from megatron_opo.actor.checkpoint import load_checkpoint
    from megatron_opo.runs import latest_checkpoint

    actor = open_actor(model, run_dir, overrides)
    checkpoint = latest_checkpoint(actor.recipe.run_path)
    assert checkpoint is not None
    load_checkpoint(actor, checkpoint)
    actor.memory.give_away()
    actor.memory.take_back()
    _step(actor)
    return weights_of(actor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_and_a_checkpoint_between_are_the_same_to_the_bit(layout, tmp_path):
    model, overrides = str(tiny_qwen3(tmp_path / "model")), LAYOUTS[layout]
    expected = run_ranks(2, two_steps, model, str(tmp_path / "plain"), overrides)
    run_dir = str(tmp_path / "away")
    results = run_ranks(2, two_steps_and_memory_away_between, model, run_dir, overrides)
    parameters = sum(map(len, expected[0].values()))
    for (weights, facts), plain in zip(results, expected, strict=True):
        assert weights == plain
        assert set(facts["gradient_bytes"]) == {0}
        assert facts["moved"]
        assert facts["weights_stayed"]
        assert facts["restored"]
        # Two moments of four bytes, beside weights of two bytes also a main parameter; shared out
        # over two data-parallel ranks unless said otherwise.
        each = 8 if layout == "TP2" else 12
        share = parameters / 2 if layout == "DP2" else parameters
        assert facts["state_bytes"] == pytest.approx(each * share, rel=0.02)
    if layout == "DP2":
        assert run_ranks(2, resumed_step, model, run_dir, overrides) == expected
