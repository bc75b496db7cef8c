"""One update in every layout, against the same update written out with transformers in float64."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_opo.actor.loss import token_weights
from tests.actor_cases import (
    make_pairs,
    make_rollout,
    make_short_rollout,
    refused_update,
    token_baselines,
    train_in_turn,
    train_two_steps,
)
from tests.models import tiny_llama, tiny_qwen2, tiny_qwen3
from tests.ranks import run_ranks

HORIZON, TEMPERATURE = 64, 0.8
MODELS = {
    "qwen3_tied": lambda path: tiny_qwen3(path, tie=True),
    "llama_untied": lambda path: tiny_llama(path, tie=False),
}
BUCKETS = ["actor.grad_bucket_mb=0.02"]
LAYOUTS = {
    "TP1": (1, []),
    "small micro-batches": (1, ["actor.micro_batch_tokens=97"]),
    "one micro-batch": (1, ["actor.micro_batch_tokens=4096", "actor.logprob_chunk_tokens=1000"]),
    "recompute": (1, ["actor.recompute=full"]),
    "TP2": (2, ["actor.tensor_parallel=2"]),
    "TP2 sequence parallel": (2, ["actor.tensor_parallel=2", "actor.sequence_parallel=true"]),
    "PP2": (2, ["actor.pipeline_parallel=2"]),
    "PP2 in 2 chunks each": (2, ["actor.pipeline_parallel=2", "actor.virtual_pipeline=2"]),
    "DP2": (2, ["actor.data_parallel=2"]),
    "DP2 in buckets, optimizer not sharded": (
        2,
        ["actor.data_parallel=2", "optimizer.distributed=false", *BUCKETS],
    ),
    "TP2 PP2": (4, ["actor.tensor_parallel=2", "actor.pipeline_parallel=2"]),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return MODELS[request.param](tmp_path_factory.mktemp(request.param) / "model")


CONTEXT2 = ["actor.context_parallel=2"]
SHARED_SEQUENCES = {
    "CP2": (2, CONTEXT2),
    "CP2 DP2 in buckets, small micro-batches": (
        4,
        [*CONTEXT2, *BUCKETS, "actor.micro_batch_tokens=23"],
    ),
    "CP2 TP2 sequence parallel": (4, [*CONTEXT2, *LAYOUTS["TP2 sequence parallel"][1]]),
    "CP2 PP2, recompute": (4, [*CONTEXT2, *LAYOUTS["PP2"][1], *LAYOUTS["recompute"][1]]),
}
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def reference_training(
    model_path, aggregation: str, watch=lambda model: None, make=make_rollout, **how
):
    """Two steps of clipped AdamW in float64; one sequence at a time, nothing packed.

    `watch` gets the model, which transformers loads as `how` says, before the first step.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, **how)
    watch(model)
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
        batch = make(model.config.vocab_size, seed=step)
        weights = token_weights(batch, aggregation, HORIZON).double() * batch.advantages.double()
        logprobs = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
        entropy, squares = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        bounds = batch.cu_seqlens.tolist()
        parts = []
        for start, end in itertools.pairwise(bounds):
            tokens = batch.tokens[start:end]
            log_p = torch.log_softmax(model(tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
            parts.append(log_p.gather(-1, tokens[1:, None])[:, 0] @ -weights[start + 1 : end])
            logprobs[start + 1 : end] = log_p.gather(-1, tokens[1:, None])[:, 0].detach()
            entropy[start + 1 : end] = -(log_p.exp() * log_p).sum(-1).detach()
            squares[start + 1 : end] = log_p.exp().square().sum(-1).detach()
        optimizer.zero_grad()
        sum(parts).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(-weights.sum().item())
        optimizer.step()
    mask = batch.loss_mask
    return {
        "norms": norms,
        "losses": losses,
        "scores": [torch.where(mask, values, 0) for values in (logprobs, entropy, squares)],
        "weights": {name: p.detach() for name, p in model.named_parameters()},
    }


def assert_matches(result, reference):
    for metrics, norm, loss in zip(
        result["metrics"], reference["norms"], reference["losses"], strict=True
    ):
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=2e-5)
        assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["on_policy/logprob_gap_max"] == 0
    for values, exact in zip(result["scores"], reference["scores"], strict=True):
        torch.testing.assert_close(torch.from_numpy(values).double(), exact, rtol=0, atol=2e-5)
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
    ("make", "layouts"),
    [(tiny_qwen2, ["tensor_parallel=2", "tensor_parallel=4"]), (tiny_qwen3, ["tensor_parallel=4"])],
    ids=["biases", "norms of query and key"],
)
def test_biases_and_shared_key_value_heads_take_the_same_two_steps(make, layouts, tmp_path):
    """The models have 2 key-value heads, which 4 tensor-parallel ranks share."""
    model = make(tmp_path / "model")
    reference = reference_training(model, "token-mean")
    for layout in layouts:
        ranks = int(layout[-1])
        overrides = [f"actor.{layout}", "actor.sequence_parallel=true"]
        result = run_ranks(ranks, train_two_steps, str(model), str(tmp_path / layout), overrides)[0]
        assert_matches(result, reference)


def test_every_aggregation_where_ranks_share_sequences(tmp_path):
    """Also sequences with fewer tokens than there are chunks, and a rank without a scored token."""
    model = tiny_qwen3(tmp_path / "model")
    cases = [(aggregation, make_short_rollout) for aggregation in AGGREGATIONS]
    cases += [("token-mean", make_rollout), ("token-mean", make_pairs)]
    turns = [([f"algorithm.loss_aggregation={name}"], make) for name, make in cases]
    references = [reference_training(model, name, make=make) for name, make in cases]
    for layout, (ranks, overrides) in SHARED_SEQUENCES.items():
        run_dir = str(tmp_path / layout)
        results = run_ranks(ranks, train_in_turn, str(model), run_dir, overrides, turns)[0]
        for case, result, reference in zip(cases, results, references, strict=True):
            try:
                assert_matches(result, reference)
            except AssertionError as error:
                raise AssertionError(f"layout {layout}, {case}: {error}") from error


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


def test_token_baselines_weight_by_the_energy_of_each_tokens_gradient(tmp_path):
    path = tiny_qwen3(tmp_path / "model")
    overrides = ["actor.tensor_parallel=2", "actor.micro_batch_tokens=97"]
    batch = run_ranks(2, token_baselines, str(path), str(tmp_path / "run"), overrides)[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    so_far, got = [], []
    for (start, end), length in zip(
        itertools.pairwise(batch.cu_seqlens.tolist()), batch.response_lengths.tolist(), strict=True
    ):
        tokens = batch.tokens[start:end]
        logits = model(tokens[None]).logits[0, -length - 1 : -1].detach() / TEMPERATURE
        gradients = torch.nn.functional.one_hot(tokens[-length:], logits.shape[1]) - logits.softmax(
            -1
        )
        so_far.append(gradients.square().sum(-1).cumsum(0).tolist())
        got.append(batch.advantages[end - length : end].tolist())
    rewards = batch.rewards.tolist()
    for first, last in itertools.pairwise(batch.group_offsets.tolist()):
        members = range(first, last)
        for i, t in ((k, t) for k in members for t in range(len(so_far[k]))):
            alive = [j for j in members if len(so_far[j]) > t]
            total = sum(so_far[j][t] for j in alive)
            baseline = sum(so_far[j][t] * rewards[j] for j in alive) / total
            expected = rewards[i] - baseline if len(alive) > 1 else 0
            assert got[i][t] == pytest.approx(expected, abs=2e-5)


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
