"""Numbers that are not finite, injected into one rank: no rank applies anything."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megatron_opo.actor.finite import by_rank, nonfinite_logprobs, nonfinite_names
from tests.actor_cases import _step, exported, make_rollout, open_actor
from tests.models import tiny_qwen3
from tests.ranks import run_ranks

LAYOUTS = {
    "TP2": ["actor.tensor_parallel=2"],
    "DP2": ["actor.data_parallel=2"],
    "DP2, optimizer not sharded": ["actor.data_parallel=2", "optimizer.distributed=false"],
    "PP2": ["actor.pipeline_parallel=2"],
}
MATRIX = "decoder.layers.0.mlp.linear_fc2.weight"
# Of tensor-parallel ranks, only the first counts this in its norm of the gradient.
NORM = "decoder.layers.0.input_layernorm.weight"


def state_of(actor) -> list:
    """Everything that a step changes, on this rank, to the bit."""
    from megatron_opo.actor.offload import state_tensors

    parameters = [p for module in actor.modules for p in module.parameters()]
    tensors = [*parameters, *state_tensors(actor.model, actor.optimizer)]
    parts = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    steps = [float(state["step"]) for part in parts for state in part.optimizer.state.values()]
    assert steps, "Adam has taken a step"
    rates = [group["lr"] for group in actor.optimizer.param_groups]
    return [t.detach().numpy().tobytes() for t in tensors] + [steps, rates, actor.version]


def refused(actor, batch) -> tuple[str, bool]:
    """The error of an update, and whether all is as before."""
    from megatron_opo.errors import NonFiniteError

    before = state_of(actor)
    with pytest.raises(NonFiniteError) as error:
        actor.update(batch, version=1)
    return str(error.value), before == state_of(actor)


def another(actor):
    """One that starts anew, of the same ranks."""
    from megatron_opo.actor.step import Actor
    from megatron_opo.weights.load import load_hf

    new = Actor(actor.recipe, actor.hf_config, actor.parallel, actor.driver)
    load_hf(new.modules, Path(actor.recipe.model.path), actor.hf_config)
    new.weights_loaded()
    return new


def faults(model: str, run_dir: str, overrides: list[str]):
    """On each rank: what becomes of second steps with a fault on rank 1, or in the batch; and the
    weights after one without, in this and in an undisturbed run."""
    first = open_actor(model, run_dir, overrides)
    _step(first)
    _step(first)
    undisturbed = exported(first)

    actor = another(first)
    _step(actor)
    has_fault = actor.parallel.rank == 1
    named = dict(actor.modules[0].named_parameters())

    def batch():
        return make_rollout(actor.hf_config["vocab_size"], 1) if actor.driver.is_here else None

    answers = {}
    weights = named[MATRIX].data.clone()
    if has_fault:
        named[MATRIX].data[3, 5] = torch.nan
    answers["weight"] = refused(actor, batch())
    with pytest.raises(Exception, match="the logprobs of"):
        actor.score(batch())
    named[MATRIX].data.copy_(weights)

    spoiled = batch()
    if spoiled is not None:
        spoiled.advantages[spoiled.loss_mask.nonzero()[2]] = -torch.inf
    answers["advantage"] = refused(actor, spoiled)

    hook = named[NORM].register_hook(lambda grad: grad * torch.inf) if has_fault else None
    answers["gradient"] = refused(actor, batch())
    if hook is not None:
        hook.remove()
    _step(actor)
    return answers, exported(actor), undisturbed


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_qwen3(tmp_path_factory.mktemp("model") / "model"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_applied_on_any_rank_and_the_next_step_is_as_if_nothing_was(
    layout, model, tmp_path
):
    answers = run_ranks(2, faults, model, str(tmp_path), LAYOUTS[layout])
    expected = {
        "weight": "step 2: the logprobs of ",
        "advantage": "step 2: the loss is inf; nothing was applied",
        "gradient": "step 2: the gradient is not finite (",
    }
    for found, weights, undisturbed in answers:
        for fault, text in expected.items():
            message, unchanged = found[fault]
            assert message.startswith(text)
            assert message == answers[0][0][fault][0], "all ranks say the same"
            assert unchanged, fault
        assert f"rank 1: {NORM}" in found["gradient"][0]
        assert all((weights[name] == undisturbed[name]).all() for name in undisturbed)


def overflowing_step(model: str, run_dir: str):
    from megatron_opo.errors import TrainingError

    rates = ["optimizer.lr=1e37", "optimizer.weight_decay=1e3"]
    actor = open_actor(model, run_dir, ["actor.data_parallel=2", *rates])
    with pytest.raises(TrainingError) as error:
        _step(actor)
    return type(error.value).__name__, str(error.value), actor.version


def test_weights_that_a_step_made_infinite_end_the_run(model, tmp_path):
    """Such a step cannot be skipped: the weights before it are gone."""
    for kind, message, version in run_ranks(2, overflowing_step, model, str(tmp_path)):
        assert kind == "TrainingError"
        assert message.startswith("step 1 made weights that are not finite (rank 0: ")
        assert version == 0
        assert "neither sent nor saved" in message


VALUES = st.floats(width=32, allow_subnormal=False)


@given(st.lists(arrays("float32", st.integers(0, 4), elements=VALUES), max_size=6), st.data())
def test_tensors_with_a_value_that_is_not_finite_are_named(values, data):
    named = [(f"t{i}", torch.from_numpy(value)) for i, value in enumerate(values)]
    bad = [f"t{i}" for i, value in enumerate(values) if not all(map(math.isfinite, value))]
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    assert nonfinite_names(named) == ", ".join(bad[:3]) + more


def test_bfloat16_overflow_is_found():
    assert nonfinite_names([("a", torch.tensor([3e38, -4e38]).bfloat16())]) == "a"
    assert nonfinite_names([("a", torch.tensor([3e38, -3e38]).bfloat16())]) == ""


def test_the_first_token_is_named_and_others_than_the_trained_ones_do_not_count():
    batch = make_rollout(99)
    logprobs = torch.zeros(batch.tokens.numel())
    logprobs[~batch.loss_mask] = torch.nan
    assert nonfinite_logprobs(batch, logprobs) == ""
    start, end = batch.cu_seqlens[4:6].tolist()
    logprobs[end - 1], logprobs[-1] = -torch.inf, torch.nan
    count = int(batch.loss_mask.sum())
    assert nonfinite_logprobs(batch, logprobs) == (
        f"the logprobs of 2 of {count} tokens are not finite, in 2 of 9 samples (first: sample 4, "
        f"position {end - 1 - start}, token {int(batch.tokens[end - 1])}: -inf)"
    )


def test_ranks_are_named_the_first_ones():
    assert by_rank(["", "a", "", "b"]) == "rank 1: a; rank 3: b"
    assert by_rank(["a"] * 5) == "rank 0: a; rank 1: a; rank 2: a; and 2 more ranks"
