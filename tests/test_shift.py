"""How far a policy moves, against transformers in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_opo.batch import PackedBatch
from tests.actor_cases import exported, make_rollout, open_actor
from tests.models import tiny_qwen3
from tests.ranks import run_ranks

TEMPERATURE = 0.8  # of the cases' recipe


def move(model: str, run_dir: str, overrides: list[str]):
    """On rank 0: metrics of two updates, and the weights before, between and after them."""
    from megatron_opo.actor.shift import PolicyShift

    actor = open_actor(model, run_dir, overrides)
    shift = PolicyShift(actor)
    weights, metrics = [exported(actor)], []
    for step in range(2):
        here = actor.driver.is_here
        batch = make_rollout(actor.hf_config["vocab_size"], seed=step) if here else None
        actor.update(batch, step)
        metrics.append(shift.measure(batch))
        weights.append(exported(actor))
    return metrics, weights


def logprobs(model, weights: dict[str, np.ndarray], batch: PackedBatch) -> torch.Tensor:
    """Of all tokens that carry loss."""
    state = {name: torch.from_numpy(value).double() for name, value in weights.items()}
    model.load_state_dict(state, strict=False)
    found = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        ids = batch.tokens[start:end]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1] / TEMPERATURE
        of_next = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found[start + 1 : end] = of_next
    return found[batch.loss_mask]


@pytest.mark.parametrize("layout", ["tensor_parallel", "pipeline_parallel"])
def test_the_shift_is_that_of_the_weights(tmp_path, layout):
    path = tiny_qwen3(tmp_path / "model")
    (metrics, weights), *_ = run_ranks(
        2, move, str(path), str(tmp_path / "run"), [f"actor.{layout}=2"]
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for step, found in enumerate(metrics):
        batch = make_rollout(model.config.vocab_size, seed=step)
        before, after, start = (
            logprobs(model, weights[version], batch) for version in (step, step + 1, 0)
        )
        for name, other in (("kl_step", after), ("kl_to_start", start)):
            ratio = (other - before).exp()
            exact = (ratio - 1 - ratio.log()).mean().item()
            assert found[f"on_policy/{name}"] == pytest.approx(exact, rel=1e-3, abs=1e-9)
    assert metrics[0]["on_policy/kl_to_start"] == 0
    assert all(each["on_policy/kl_step"] > 1e-5 for each in metrics)
    assert metrics[1]["on_policy/kl_to_start"] > 1e-5
