"""Weights for a gap that is made on purpose: the formulas in exact arithmetic, their expectation
over all responses of a small policy, and whole updates against transformers in float64."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from statistics import fmean

import pytest
import torch
from actor_cases import exported, make_short_rollout, open_actor
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_qwen3
from ranks import run_ranks
from servers import perturbed, prompts
from test_loss import make_batch
from transformers import AutoModelForCausalLM

from megatron_opo.actor.correction import importance_weights, whole_weights
from megatron_opo.actor.loss import policy_gradient_loss, token_weights
from megatron_opo.advantages import group_advantages_
from megatron_opo.batch import PackedBatch, pack
from megatron_opo.observe.report import DEFAULT_GAP_LIMIT
from megatron_opo.recipe import AlgorithmConfig, CorrectionConfig

LEVELS = ("token", "sequence", "geometric")
KINDS = ("truncate", "mask")
TEMPERATURE = 0.8
# No product of ratios of small numbers is one of these.
UPPER = (Fraction(12371, 10000), Fraction(31013, 10000))
LOWER = (None, Fraction(7919, 10000), Fraction(1, 11))
RATIOS = st.builds(Fraction, st.integers(1, 9), st.integers(1, 9))


def settings(**fields) -> CorrectionConfig:
    return CorrectionConfig(**fields)


def exact_weight(ratios: list[Fraction], t: int, level: str, low: Fraction, high: Fraction, mask):
    """Of token t of a response, from bounds on a power of the ratio where that is a root."""
    power = len(ratios) if level == "geometric" else 1
    ratio = ratios[t] if level == "token" else math.prod(ratios)
    value = float(ratio) ** (1 / power)
    if mask:
        return value if low**power <= ratio <= high**power else 0.0
    return value if ratio <= high**power else float(high)


@given(
    responses=st.lists(st.lists(RATIOS, max_size=5), min_size=1, max_size=5),
    kind=st.sampled_from(KINDS),
    level=st.sampled_from(LEVELS),
    upper=st.sampled_from(UPPER),
    lower=st.sampled_from(LOWER),
    order=st.randoms(use_true_random=False),
)
def test_weights_are_those_of_exact_arithmetic(responses, kind, level, upper, lower, order):
    fields = {"kind": kind, "level": level, "upper": float(upper)}
    if kind == "mask" and lower is not None:
        fields["lower"] = float(lower)
    chosen = settings(**fields)
    low = 1 / upper if lower is None else lower
    expected = [
        exact_weight(ratios, t, level, low, upper, kind == "mask")
        for ratios in responses
        for t in range(len(ratios))
    ]
    batch = make_batch([(1, len(ratios)) for ratios in responses])
    mask = batch.loss_mask
    sampled = -torch.arange(mask.numel()).double() / 7
    logprobs = torch.full_like(sampled, 7.0)  # prompts carry no policy
    logs = [math.log(ratio) for ratios in responses for ratio in ratios]
    logprobs[mask] = sampled[mask] + torch.tensor(logs, dtype=torch.float64)
    weights = whole_weights(replace(batch, rollout_logprobs=sampled), logprobs, chosen)
    assert weights[mask].tolist() == pytest.approx(expected, rel=1e-9)
    assert not weights[~mask].any()

    places = list(range(len(expected)))
    order.shuffle(places)
    shuffled = importance_weights(
        logprobs[mask][places],
        sampled[mask][places],
        batch.loss_sequences[places],
        len(responses),
        chosen,
    )
    assert shuffled.tolist() == pytest.approx([expected[i] for i in places], rel=1e-9)


def test_weights_are_bounded_and_without_a_gradient_however_large_the_gap():
    logprobs = torch.tensor([-0.1, -0.2, -900.0], requires_grad=True)
    sampled, sequences = torch.tensor([-1000.0, -0.2, -0.1]), torch.tensor([0, 0, 1])
    for level in LEVELS:
        for kind, expected in (("truncate", [2.0, None, 0.0]), ("mask", [0.0, None, 0.0])):
            chosen = settings(kind=kind, level=level)
            weights = importance_weights(logprobs, sampled, sequences, 2, chosen)
            expected[1] = 1.0 if level == "token" else expected[0]
            assert weights.tolist() == expected
            assert weights.dtype == torch.float32 and not weights.requires_grad


# A policy of which all responses can be counted: two tokens of a vocabulary of three.
RESPONSES = list(itertools.product(range(3), repeat=2))
ROWS = [0 if t == 0 else 1 + response[0] for response in RESPONSES for t in range(2)]
TOKENS = [token for response in RESPONSES for token in response]
POLICY = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SERVER = (POLICY + 0.7 * NOISE).log_softmax(-1)
REWARDS = torch.rand(9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def corrected_gradient(chosen: CorrectionConfig | None) -> torch.Tensor:
    """[4, 3] by the program: the mean, over all responses that the server may give; of weights of
    1 with None."""
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)[ROWS, TOKENS]
    sampled = SERVER[ROWS, TOKENS]
    chances = sampled.view(9, 2).sum(1).exp().repeat_interleave(2)
    sequences = torch.arange(9).repeat_interleave(2)
    weights = torch.ones_like(sampled)
    if chosen is not None:
        weights = importance_weights(logprobs, sampled, sequences, 9, chosen)
    rewards = REWARDS.repeat_interleave(2)
    policy_gradient_loss(logprobs, rewards, chances * weights).backward()
    assert logits.grad is not None
    return -logits.grad


def gradient_of(expected_reward) -> torch.Tensor:
    logits = POLICY.clone().requires_grad_()
    expected_reward(logits.softmax(-1)).backward()
    assert logits.grad is not None
    return logits.grad


def true_gradient() -> torch.Tensor:
    """Of the expected reward under the policy itself."""
    return gradient_of(
        lambda p: sum(
            p[0, a] * p[1 + a, b] * reward
            for (a, b), reward in zip(RESPONSES, REWARDS, strict=True)
        )
    )


def test_untruncated_weights_of_sequences_are_unbiased():
    gradient = corrected_gradient(settings(kind="truncate", level="sequence", upper=1e6))
    torch.testing.assert_close(gradient, true_gradient(), rtol=0, atol=1e-14)
    everything = settings(kind="mask", level="sequence", upper=1e6, lower=1e-6)
    torch.testing.assert_close(corrected_gradient(everything), true_gradient(), rtol=0, atol=1e-14)


def test_untruncated_weights_of_tokens_leave_beginnings_and_ends_to_the_server():
    """Each token is the policy's choice after the server's beginning, rewarded with its ends."""
    q = SERVER.exp()
    expected = gradient_of(
        lambda p: sum(
            (p[0, a] * q[1 + a, b] + q[0, a] * p[1 + a, b]) * reward
            for (a, b), reward in zip(RESPONSES, REWARDS, strict=True)
        )
    )
    found = corrected_gradient(settings(kind="truncate", level="token", upper=1e6))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    error = (found - true_gradient()).norm()
    assert 0 < error < (corrected_gradient(None) - true_gradient()).norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_bounds_take_away_what_the_formula_says(kind, level):
    p, q = POLICY.softmax(-1).tolist(), SERVER.exp().tolist()
    low, high = (0.8, 1.2)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    bounded = 0
    for (a, b), reward in zip(RESPONSES, REWARDS.tolist(), strict=True):
        steps = ((0, a), (1 + a, b))
        ratios = [p[row][token] / q[row][token] for row, token in steps]
        chance = q[0][a] * q[1 + a][b]
        for t, (row, token) in enumerate(steps):
            whole = math.prod(ratios)
            ratio = {"token": ratios[t], "sequence": whole, "geometric": math.sqrt(whole)}[level]
            weight = min(ratio, high) if kind == "truncate" else ratio * (low <= ratio <= high)
            bounded += weight != ratio
            for other in range(3):
                slope = (other == token) - p[row][other]
                expected[row, other] += chance * weight * reward * slope
    fields = {"lower": low} if kind == "mask" else {}
    found = corrected_gradient(settings(kind=kind, level=level, upper=high, **fields))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert 0 < bounded < 18
    assert (found - true_gradient()).norm() > 1e-3


def logprobs_of(model, batch: PackedBatch) -> torch.Tensor:
    """[T] float64 with a gradient; one sequence at a time."""
    parts = []
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end]
        log_p = torch.log_softmax(model(tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
        parts += [log_p.new_zeros(1), log_p.gather(-1, tokens[1:, None])[:, 0]]
    return torch.cat(parts)


def effective(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def reference_weights(batch: PackedBatch, logprobs: torch.Tensor, chosen: CorrectionConfig):
    """Weights [T] and metrics, by plain arithmetic over lists."""
    weights = torch.zeros_like(logprobs)
    all_weights, per_sequence, changed = [], [], []
    gaps = (logprobs - batch.rollout_logprobs.double()).tolist()
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        own = [t for t in range(start, end) if batch.loss_mask[t]]
        if not own:
            continue
        gap = {
            "token": lambda t: gaps[t],
            "sequence": lambda _, own=own: sum(gaps[s] for s in own),
            "geometric": lambda _, own=own: fmean(gaps[s] for s in own),
        }[chosen.level]
        ratios = [math.exp(gap(t)) for t in own]
        if chosen.kind == "truncate":
            found = [min(ratio, chosen.upper) for ratio in ratios]
        else:
            found = [r if chosen.lowest <= r <= chosen.upper else 0.0 for r in ratios]
        weights[own] = torch.tensor(found, dtype=torch.float64)
        all_weights += found
        per_sequence.append(fmean(found))
        changed += [w != r for w, r in zip(found, ratios, strict=True)]
    share = "truncated" if chosen.kind == "truncate" else "masked"
    assert 0 < sum(changed) < len(changed), "bounds that do something, but not everything"
    return weights, {
        "is_weight_mean": fmean(all_weights),
        "is_weight_max": max(all_weights),
        f"is_{share}_share": fmean(changed),
        "is_ess_tokens": effective(all_weights),
        "is_ess_sequences": effective(per_sequence),
    }


def reference_update(path, batch: PackedBatch, chosen: CorrectionConfig):
    """Metrics and weights after a step of clipped AdamW in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    # Which a server samples like any other, and transformers would give no gradient.
    model.get_input_embeddings().padding_idx = None  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    logprobs = logprobs_of(model, batch)
    weights, metrics = reference_weights(batch, logprobs.detach(), chosen)
    factors = token_weights(batch, "token-mean", 64).double() * batch.advantages.double() * weights
    (-factors @ logprobs).backward()
    metrics = {f"on_policy/{name}": value for name, value in metrics.items()}
    metrics["actor/grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    metrics["actor/pg_loss"] = -factors.sum().item()
    optimizer.step()
    return metrics, {name: p.detach() for name, p in model.named_parameters()}


def corrected_updates(model: str, run_dir: str, layout: list[str], cases: list[str], batch):
    """Metrics and weights after an update, for each correction; on rank 0."""
    results, parallel = [], None
    for i, case in enumerate(cases):
        overrides = [*layout, f"algorithm.correction={case}"]
        actor = open_actor(model, f"{run_dir}_{i}", overrides, parallel)
        parallel = actor.parallel
        here = batch if actor.driver.is_here else None
        metrics = actor.update(here, version=0)  # pyright: ignore[reportArgumentType]
        results.append((metrics, exported(actor)))
    return results


def assert_updates_match(results, references):
    for (metrics, weights), (expected, exact) in zip(results, references, strict=True):
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=5e-5, abs=1e-6), name
        assert not {n for n in metrics if "/is_" in n} - {*expected}
        for name, tensor in weights.items():
            torch.testing.assert_close(
                torch.from_numpy(tensor).double(),
                exact[name],
                rtol=0,
                atol=2e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )


CASES = (
    settings(kind="truncate", level="token", upper=1.2),
    settings(kind="mask", level="token", lower=0.8, upper=1.3),
    settings(kind="truncate", level="sequence", upper=1.5),
    settings(kind="mask", level="geometric", upper=1.1),
)
LAYOUTS = {
    "TP2 PP2": (4, ["actor.tensor_parallel=2", "actor.pipeline_parallel=2"]),
    "CP2 DP2": (4, ["actor.context_parallel=2", "actor.micro_batch_tokens=23"]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def with_gap(model):
    """A rollout with holes in its loss mask and a response without loss, by servers whose logprobs
    are off by 0.3 nats; and what updates on it are."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    batch = make_short_rollout(policy.config.vocab_size)
    noise = torch.randn(batch.tokens.numel(), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logprobs = logprobs_of(policy, batch).float() + 0.3 * noise
    batch = replace(batch, rollout_logprobs=torch.where(batch.loss_mask, logprobs, 0))
    return batch, [reference_update(model, batch, case) for case in CASES]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_corrects_alike(layout, model, with_gap, tmp_path):
    batch, references = with_gap
    ranks, overrides = LAYOUTS[layout]
    cases = [case.model_dump_json() for case in CASES]
    found = run_ranks(
        ranks, corrected_updates, str(model), str(tmp_path / "run"), overrides, cases, batch
    )
    assert_updates_match(found[0], references)


def test_what_a_perturbed_server_sampled_is_corrected(qwen_pool, tmp_path):
    weights = qwen_pool.weights()
    version = qwen_pool.next_version()
    rollout = qwen_pool.rollout()
    moved = perturbed(weights, seed=5)
    nearby = {name: weights[name].lerp(moved[name], 0.1) for name in weights}
    rollout.sync(iter(nearby.items()), version)
    groups = rollout.generate(
        prompts(6),
        samples_per_prompt=3,
        version=version,
        temperature=TEMPERATURE,
        max_response_tokens=8,
    )
    rollout.sync(iter(weights.items()), qwen_pool.next_version())
    rewarded = [
        group.with_samples(
            replace(sample, reward=float(i % 2)) for i, sample in enumerate(group.samples)
        )
        for group in groups
    ]
    batch = pack(rewarded)
    group_advantages_(batch)
    cases = (CASES[0], settings(kind="mask", level="geometric", upper=1.2))
    path = qwen_pool.model.path
    references = [reference_update(path, batch, case) for case in cases]
    texts = [case.model_dump_json() for case in cases]
    run = str(tmp_path / "run")
    (found,) = run_ranks(1, corrected_updates, path, run, [], texts, batch)
    assert_updates_match(found, references)


def test_the_alarm_leaves_to_a_correction_what_that_bounds():
    assert AlgorithmConfig().gap_bounds == (DEFAULT_GAP_LIMIT, 0.03)
    corrects = {"kind": "truncate"}
    assert AlgorithmConfig.model_validate({"correction": corrects}).gap_bounds == (math.inf, 0.1)
    own = AlgorithmConfig.model_validate(
        {"correction": corrects, "max_logprob_gap": 5, "mean_logprob_gap": 0.3}
    )
    assert own.gap_bounds == (5, 0.3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"level": "sequence"}, "`level` is sequence but `kind` is none"),
        ({"kind": "truncate", "lower": 0.5}, "set kind to mask, or drop `lower`"),
        ({"kind": "mask", "upper": 0.9}, "greater than or equal to 1"),
        ({"kind": "mask", "lower": 1.1}, "less than or equal to 1"),
    ],
)
def test_settings_without_an_effect_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        settings(**fields)
