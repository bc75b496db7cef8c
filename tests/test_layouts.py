"""One update in every layout, against the same update written out with transformers in float64."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_opo.actor.loss import token_weights
from tests.actor_cases import make_rollout, refused_update, train_two_steps
from tests.models import tiny_llama, tiny_qwen3
from tests.ranks import run_ranks

HORIZON, TEMPERATURE = 64, 0.8
MODELS = {
    "qwen3_tied": lambda path: tiny_qwen3(path, tie=True),
    "llama_untied": lambda path: tiny_llama(path, tie=False),
}
LAYOUTS = {
    "TP1": (1, []),
    "small micro-batches": (1, ["actor.micro_batch_tokens=97"]),
    "one micro-batch": (1, ["actor.micro_batch_tokens=4096", "actor.logprob_chunk_tokens=1000"]),
    "recompute": (1, ["actor.recompute=full"]),
    "TP2": (2, ["actor.tensor_parallel=2"]),
    "TP2 sequence parallel": (2, ["actor.tensor_parallel=2", "actor.sequence_parallel=true"]),
    "PP2": (2, ["actor.pipeline_parallel=2"]),
    "DP2": (2, ["actor.data_parallel=2"]),
    "DP2, optimizer not sharded": (2, ["actor.data_parallel=2", "optimizer.distributed=false"]),
    "TP2 PP2": (4, ["actor.tensor_parallel=2", "actor.pipeline_parallel=2"]),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return MODELS[request.param](tmp_path_factory.mktemp(request.param) / "model")


def reference_training(model_path, aggregation: str):
    """Two steps of clipped AdamW in float64; one sequence at a time, nothing packed."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    norms, losses = [], []
    for step in range(2):
        batch = make_rollout(model.config.vocab_size, seed=step)
        weights = token_weights(batch, aggregation, HORIZON).double() * batch.advantages.double()
        logprobs = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
        entropy = torch.zeros_like(logprobs)
        bounds = batch.cu_seqlens.tolist()
        parts = []
        for start, end in itertools.pairwise(bounds):
            tokens = batch.tokens[start:end]
            log_p = torch.log_softmax(model(tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
            parts.append(log_p.gather(-1, tokens[1:, None])[:, 0] @ -weights[start + 1 : end])
            logprobs[start + 1 : end] = log_p.gather(-1, tokens[1:, None])[:, 0].detach()
            entropy[start + 1 : end] = -(log_p.exp() * log_p).sum(-1).detach()
        optimizer.zero_grad()
        sum(parts).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(-weights.sum().item())
        optimizer.step()
    mask = batch.loss_mask
    return {
        "norms": norms,
        "losses": losses,
        "logprobs": torch.where(mask, logprobs, 0),
        "entropy": torch.where(mask, entropy, 0),
        "weights": {name: p.detach() for name, p in model.named_parameters()},
    }


def assert_matches(result, reference):
    for metrics, norm, loss in zip(
        result["metrics"], reference["norms"], reference["losses"], strict=True
    ):
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=2e-5)
        assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["on_policy/logprob_gap_max"] == 0
    logprobs, entropy = map(torch.from_numpy, result["scores"])
    torch.testing.assert_close(logprobs.double(), reference["logprobs"], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), reference["entropy"], rtol=0, atol=2e-5)
    expected = reference["weights"]
    assert {*expected} <= {*result["weights"], "lm_head.weight"}
    for name, tensor in result["weights"].items():
        torch.testing.assert_close(
            torch.from_numpy(tensor).double(),
            expected[name],
            rtol=0,
            atol=2e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_every_layout_takes_the_same_two_steps(model, tmp_path):
    reference = reference_training(model, "token-mean")
    for layout, (ranks, overrides) in LAYOUTS.items():
        result = run_ranks(ranks, train_two_steps, str(model), str(tmp_path / layout), overrides)[0]
        try:
            assert_matches(result, reference)
        except AssertionError as error:
            raise AssertionError(f"layout {layout}: {error}") from error


@pytest.mark.parametrize(
    "aggregation", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_every_aggregation_over_data_parallel_ranks(aggregation, tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    reference = reference_training(model, aggregation)
    overrides = [f"algorithm.loss_aggregation={aggregation}", "actor.data_parallel=2"]
    result = run_ranks(2, train_two_steps, str(model), str(tmp_path / "run"), overrides)[0]
    assert_matches(result, reference)


def test_the_order_of_sequences_changes_nothing_but_rounding(tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    reference = reference_training(model, "token-mean")
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    count = make_rollout(vocab_size).num_sequences
    result = run_ranks(
        1, train_two_steps, str(model), str(tmp_path / "run"), [], list(range(count))[::-1]
    )[0]
    for metrics, norm in zip(result["metrics"], reference["norms"], strict=True):
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=2e-5)
    for name, tensor in result["weights"].items():
        exact = reference["weights"][name]
        torch.testing.assert_close(torch.from_numpy(tensor).double(), exact, rtol=0, atol=2e-6)


def test_a_second_step_on_a_rollout_is_refused_and_changes_nothing(tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    message, unchanged, version = run_ranks(
        1, refused_update, str(model), str(tmp_path / "run"), 1, []
    )[0]
    assert "one optimizer step per rollout" in message
    assert "sampled by policy version 0 but the policy is at version 1" in message
    assert unchanged
    assert version == 1


def test_a_rollout_of_another_policy_is_refused_and_changes_nothing(tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    bounds = ["algorithm.max_logprob_gap=0.01", "algorithm.mean_logprob_gap=0.01"]
    message, unchanged, version = run_ranks(
        1, refused_update, str(model), str(tmp_path / "run"), 0, bounds
    )[0]
    assert "disagree on the sampled tokens" in message
    assert "The worst tokens:" in message
    assert unchanged
    assert version == 0
