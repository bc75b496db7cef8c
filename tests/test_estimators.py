"""Every estimator against its formula in rational numbers, its corner rules, and its bias."""

import itertools
import math
import random
from fractions import Fraction as F

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.advantages import estimators, kernel
from megatron_opo.advantages.estimators import opo_energy, otb, token_energies

OVER_GROUPS = ("opo", "opo_leave_one_out", "rloo", "dr_grpo", "grpo")
OVER_BATCH = ("opo_batch", "opo_whitened", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
SCALED = ("grpo", "opo_whitened", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
ALL = (*OVER_GROUPS, *OVER_BATCH)


def close(expected):
    return pytest.approx([float(a) for a in expected], rel=1e-9, abs=1e-9)


def tensors(groups):
    """[[(reward, length)]] -> rewards, lengths, group_offsets."""
    flat = [member for group in groups for member in group]
    return (
        torch.tensor([float(r) for r, _ in flat], dtype=torch.float64),
        torch.tensor([n for _, n in flat], dtype=torch.int64),
        torch.tensor([0, *(len(group) for group in groups)]).cumsum(0),
    )


def estimate(name, groups, singleton="zero"):
    return getattr(estimators, name)(*tensors(groups), singleton).tolist()


# --- the formulas, written out one sample at a time


def weighted_mean(pairs):
    total = sum(w for _, w in pairs)
    return sum(r * w for r, w in pairs) / F(total) if total else None


def exact_member(name, group, i, singleton):
    reward = group[i][0]
    others = group[:i] + group[i + 1 :]
    if not any(n for _, n in group):
        return F(0)
    if name == "opo_leave_one_out":
        baseline = weighted_mean(others)
    elif not others:
        baseline = None
    elif name == "opo":
        baseline = weighted_mean(group)
    elif name == "rloo":
        baseline = weighted_mean([(r, 1) for r, _ in others])
    else:
        baseline = weighted_mean([(r, 1) for r, _ in group])
    if baseline is None:
        return reward if singleton == "raw" else F(0)
    return reward - baseline


def exact_group(name, group, singleton):
    advantages = [exact_member(name, group, i, singleton) for i in range(len(group))]
    if name != "grpo" or len(group) == 1:
        return advantages
    variance = sum(a * a for a in advantages) / F(len(group) - 1)
    return [float(a) / (math.sqrt(variance) + 1e-6) for a in advantages]


def exact_whitened(values, lengths):
    """Minus the mean and over the deviation of tokens, of which there are some."""
    mean = weighted_mean(list(zip(values, lengths, strict=True)))
    squares = sum(n * (v - mean) ** 2 for v, n in zip(values, lengths, strict=True))
    deviation = math.sqrt(squares / F(max(sum(lengths) - 1, 1)) + F(1, 10**8))
    return [float(v - mean) / deviation for v in values]


def exact(name, groups, singleton="zero"):
    if name in OVER_GROUPS:
        return [a for group in groups for a in exact_group(name, group, singleton)]
    flat = [member for group in groups for member in group]
    lengths = [n for _, n in flat]
    if not any(lengths):
        return [F(0)] * len(flat)
    if name == "opo_batch":
        values = exact_group("opo", flat, singleton)
    elif name == "reinforce_plus_plus":
        values = exact_whitened([r for r, _ in flat], lengths)
    elif name == "reinforce_plus_plus_baseline":
        values = exact_whitened(exact("dr_grpo", groups, singleton), lengths)
    else:
        values = exact_whitened(exact("opo", groups, singleton), lengths)
    has_tokens = [any(n for _, n in group) for group in groups for _ in group]
    return [v if tokens else F(0) for v, tokens in zip(values, has_tokens, strict=True)]


members = st.tuples(st.integers(-320, 320).map(lambda n: F(n, 64)), st.integers(0, 5000))
ragged = st.lists(st.lists(members, min_size=1, max_size=6), min_size=1, max_size=5)
at_least_two = st.lists(st.lists(members, min_size=2, max_size=6), min_size=1, max_size=5)


# Drawing groups costs more than estimating, so one draw serves all estimators.
@settings(max_examples=60, deadline=None)
@given(groups=at_least_two)
def test_ragged_groups_match_the_formula_in_rational_numbers(groups):
    for name in ALL:
        assert estimate(name, groups) == close(exact(name, groups)), name


G1 = [(1, 10), (0, 20), (0, 30), (1, 20)]
G3 = [(1, 4), (0, 0), (0, 12)]
G5 = [(-1, 2), (1, 3), (-1, 5)]


@pytest.mark.parametrize(
    ("name", "group", "expected"),
    [
        ("opo", G1, [F(5, 8), F(-3, 8), F(-3, 8), F(5, 8)]),
        ("rloo", G1, [F(2, 3), F(-2, 3), F(-2, 3), F(2, 3)]),
        ("opo_leave_one_out", G1, [F(5, 7), F(-1, 2), F(-3, 5), F(5, 6)]),
        ("dr_grpo", G1, [F(1, 2), F(-1, 2), F(-1, 2), F(1, 2)]),
        ("grpo", G1, [0.8660239038, -0.8660239038, -0.8660239038, 0.8660239038]),
        ("opo", G3, [F(3, 4), F(-1, 4), F(-1, 4)]),
        ("rloo", G3, [1, F(-1, 2), F(-1, 2)]),
        ("opo_leave_one_out", G3, [1, F(-1, 4), -1]),
        ("dr_grpo", G3, [F(2, 3), F(-1, 3), F(-1, 3)]),
        ("grpo", G3, [1.1546985384, -0.5773492692, -0.5773492692]),
        ("opo", G5, [F(-3, 5), F(7, 5), F(-3, 5)]),
        ("rloo", G5, [-1, 2, -1]),
        ("opo_leave_one_out", G5, [F(-3, 4), 2, F(-6, 5)]),
        ("dr_grpo", G5, [F(-2, 3), F(4, 3), F(-2, 3)]),
        ("grpo", G5, [-0.5773497692, 1.1546995384, -0.5773497692]),
        ("opo", [(1, 4097), (0, 8191)], [F(8191, 12288), F(-4097, 12288)]),
        # Deviations over tokens: 1/4 * 2 + 1/4 * 2 over 3, and 9/64 * 50 + 25/64 * 30 over 79.
        ("reinforce_plus_plus", [(1, 2), (0, 2)], [math.sqrt(3) / 2, -math.sqrt(3) / 2]),
        ("opo_whitened", G1, [a / math.sqrt(75 / 4 / 79) for a in (5 / 8, -3 / 8, -3 / 8, 5 / 8)]),
    ],
)
def test_known_groups(name, group, expected):
    got = estimate(name, [group])
    assert got == pytest.approx([float(a) for a in expected], rel=1e-7)


# --- corners


@settings(max_examples=60, deadline=None)
@given(groups=ragged)
def test_groups_of_one_follow_the_rule_and_nothing_is_ever_nan(groups):
    for name, singleton in itertools.product(ALL, ["zero", "raw"]):
        got = estimate(name, groups, singleton)
        assert all(map(math.isfinite, got)), name
        if name in OVER_GROUPS:
            assert got == close(exact(name, groups, singleton)), (name, singleton)


@pytest.mark.parametrize("name", [*OVER_GROUPS, "opo_whitened"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3, 1e9 + 0.1])
def test_equal_rewards_give_exactly_zero_whatever_the_other_groups(name, reward):
    equal = [(reward, n) for n in (3, 7, 1, 0, 5, 11, 13)]
    got = estimate(name, [[(1.0, 3), (0.0, 4)], equal, equal[:2]])
    assert got[2:] == [0.0] * 9
    assert got[0] > 0 > got[1]


@pytest.mark.parametrize("name", ALL)
def test_a_batch_of_equal_rewards_gives_exactly_zero(name):
    assert estimate(name, [[(0.1, 3), (0.1, 7)], [(0.1, 1), (0.1, 2), (0.1, 5)]]) == [0.0] * 5


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_groups_without_tokens_get_zero(name, singleton):
    got = estimate(name, [[(1, 0), (0, 0)], [(1, 2), (0, 3)], [(1, 0)]], singleton)
    assert [got[i] for i in (0, 1, 4)] == [0, 0, 0]
    assert got[2] > 0 > got[3]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float32]
)
def test_rewards_and_lengths_of_any_dtype_are_computed_in_float64(name, dtype):
    compute, offsets = getattr(estimators, name), torch.tensor([0, 4])
    rewards, lengths = torch.tensor([1, 0, 0, 1]), torch.tensor([4097, 8191, 3, 300])
    got = compute(rewards.to(dtype), lengths, offsets)
    assert got.dtype == torch.float64
    assert torch.equal(got, compute(rewards.double(), lengths.to(torch.int32), offsets))


@pytest.mark.parametrize(
    "ids", [["7", "007", "7", "x"], [7, -1, 7, 10**12], torch.tensor([7, -1, 7, 10**12])]
)
def test_members_in_any_order_are_gathered_by_ids_of_any_kind(ids):
    rewards, lengths = torch.tensor([1.0, 0.5, 0.0, 2.0]), torch.tensor([1, 5, 3, 2])
    order, start, end = kernel.group_index(ids)
    offsets = torch.cat([start.unique(), end[-1:]])
    got = torch.empty(4, dtype=torch.float64)
    got[order] = estimators.opo(rewards[order], lengths[order], offsets)
    assert got.tolist() == [0.75, 0, -0.25, 0]


# --- properties


@settings(max_examples=40, deadline=None)
@given(groups=at_least_two, seed=st.integers(0, 2**32))
def test_the_order_of_members_and_groups_is_irrelevant(groups, seed):
    shuffle = random.Random(seed).sample
    members_of = [shuffle(range(len(group)), len(group)) for group in groups]
    order = shuffle(range(len(groups)), len(groups))
    for name in ALL:
        got = iter(estimate(name, [[groups[k][i] for i in members_of[k]] for k in order]))
        moved = {(k, i): next(got) for k in order for i in members_of[k]}
        flat = [moved[k, i] for k, group in enumerate(groups) for i in range(len(group))]
        assert flat == close(estimate(name, groups)), name


@settings(max_examples=40, deadline=None)
@given(groups=at_least_two, shift=st.integers(-100, 100), scale=st.sampled_from([0.5, -2.0, 3.0]))
def test_a_shift_of_all_rewards_changes_nothing_and_a_scale_scales(groups, shift, scale):
    shifted = [[(r + shift, n) for r, n in group] for group in groups]
    scaled = [[(r * F(scale), n) for r, n in group] for group in groups]
    for name in ALL:
        plain = estimate(name, groups)
        assert estimate(name, shifted) == pytest.approx(plain, rel=1e-8, abs=1e-8), name
        if name not in SCALED:
            assert estimate(name, scaled) == close([scale * a for a in plain]), name


@settings(max_examples=40, deadline=None)
@given(groups=at_least_two)
def test_advantages_of_opo_sum_to_zero_over_the_tokens_of_a_group(groups):
    got = iter(estimate("opo", groups))
    for group in groups:
        assert sum(n * next(got) for _, n in group) == pytest.approx(0, abs=1e-8)


# --- bias, by all outcomes of a policy with three responses

POLICY = (F(1, 2), F(1, 4), F(1, 4))
REWARDS = (F(1), F(0), F(1, 2))
LENGTHS = (1, 3, 6)
GRADIENT = [F(3, 16), F(-5, 32), F(-1, 32)]


def expected_update(name, samples):
    """E[mean_i A_i d log p(y_i) / d logits], over every group of so many responses."""
    update = torch.zeros(3, dtype=torch.float64)
    scores = torch.eye(3, dtype=torch.float64) - torch.tensor([float(p) for p in POLICY])
    for outcome in itertools.product(range(3), repeat=samples):
        advantages = estimate(name, [[(REWARDS[y], LENGTHS[y]) for y in outcome]])
        probability = float(math.prod(POLICY[y] for y in outcome))
        for y, advantage in zip(outcome, advantages, strict=True):
            update += probability * advantage * scores[y] / samples
    return update.tolist()


def test_the_gradient_of_the_enumerated_policy():
    for v in range(3):
        terms = [POLICY[y] * REWARDS[y] * ((y == v) - POLICY[v]) for y in range(3)]
        assert sum(terms) == GRADIENT[v]


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("name", ["rloo", "opo_leave_one_out"])
def test_leaving_one_out_is_unbiased(name, samples):
    got = expected_update(name, samples)
    assert got == pytest.approx([float(g) for g in GRADIENT], abs=1e-15)


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_the_mean_of_a_group_shrinks_the_gradient_and_keeps_its_direction(samples):
    got = expected_update("dr_grpo", samples)
    shrunk = [float(g * F(samples - 1, samples)) for g in GRADIENT]
    assert got == pytest.approx(shrunk, abs=1e-15)


def test_opo_is_biased_in_direction_too():
    got = expected_update("opo", 2)
    expected = [F(19, 192), F(-205, 2688), F(-61, 2688)]
    assert got == pytest.approx([float(g) for g in expected], abs=1e-15)


# --- energies


def test_energies_are_squared_norms_of_logit_gradients():
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(20, 7, generator=generator)).double()
    tokens = torch.randint(0, 7, (20,), generator=generator)
    chosen = []
    for row, token in zip(logits, tokens, strict=True):
        row = row.clone().requires_grad_()
        row.log_softmax(-1)[token].backward()
        chosen.append(row.grad.square().sum().item())
    log_p = logits.log_softmax(-1)
    got = token_energies(log_p[torch.arange(20), tokens], log_p.exp().square().sum(-1))
    assert got.tolist() == pytest.approx(chosen, rel=1e-10, abs=1e-14)


def test_the_energy_of_an_almost_certain_token_is_small_and_never_negative():
    # p = 1 - 1e-4, the rest spread over many: float32 rounds sum p^2 by more than the energy.
    got = token_energies(torch.tensor([-1e-4, 0.0]), torch.tensor([0.9998, 1.0]))
    assert 0 < got[0] < 1e-6
    assert got[1] == 0


def energies_of(*tokens):
    return torch.tensor([float(e) for e in tokens], dtype=torch.float64)


def test_the_energy_baseline_of_two_responses():
    # Two tokens of p = 1/2 over two, energy 1/2; three of p = 1/4 over four, energy 3/4.
    energies = energies_of(*[F(1, 2)] * 2, *[F(3, 4)] * 3)
    got = opo_energy(*tensors([[(1, 2), (0, 3)]]), energies=energies)
    assert got.tolist() == pytest.approx([1 - 4 / 13, -4 / 13], abs=1e-15)


@settings(max_examples=40, deadline=None)
@given(groups=ragged.filter(lambda groups: sum(n for g in groups for _, n in g) < 20_000))
def test_with_equal_energies_the_energy_baseline_is_that_of_opo(groups):
    arguments = tensors(groups)
    energies = torch.full((int(arguments[1].sum()),), 0.3)
    got = opo_energy(*arguments, "raw", energies=energies)
    assert got.tolist() == pytest.approx(estimators.opo(*arguments, "raw").tolist(), abs=1e-9)


def test_certain_responses_have_no_gradient_and_no_advantage():
    arguments = tensors([[(1, 2), (0, 1)], [(1, 1), (0, 2)]])
    energies = energies_of(0, 0, 0, 1, 0, 0)
    assert opo_energy(*arguments, energies=energies).tolist() == [0, 0, 0, -1]
    for singleton in ("zero", "raw"):
        got = otb(*arguments, singleton, energies=energies).tolist()
        assert got == [0, 0, 0, 0, -1, 0]


@pytest.mark.parametrize(
    ("group", "energies", "singleton", "expected"),
    [
        ([(1, 2), (0, 3)], [F(1, 2)] * 2 + [F(3, 4)] * 3, "zero", [0.6, 0.6, -0.4, -0.4, 0]),
        ([(1, 2), (0, 3)], [F(1, 2)] * 2 + [F(3, 4)] * 3, "raw", [0.6, 0.6, -0.4, -0.4, 0]),
        ([(0, 1), (1, 3)], [F(1, 2)] * 4, "zero", [-0.5, 0.5, 0, 0]),
        ([(0, 1), (1, 3)], [F(1, 2)] * 4, "raw", [-0.5, 0.5, 1, 1]),
        ([(1, 3)], [F(1, 2)] * 3, "zero", [0, 0, 0]),
        ([(1, 3)], [F(1, 2)] * 3, "raw", [1, 1, 1]),
        ([(1, 0), (0, 2)], [F(1, 2)] * 2, "zero", [0, 0]),
    ],
)
def test_known_token_baselines(group, energies, singleton, expected):
    got = otb(*tensors([group]), singleton, energies=energies_of(*energies))
    assert got.tolist() == pytest.approx(expected, abs=1e-15)


def exact_otb(groups, energies):
    advantages = []
    for group, of_group in zip(groups, energies, strict=True):
        so_far = [list(itertools.accumulate(of_member)) for of_member in of_group]
        for i, (reward, length) in enumerate(group):
            for t in range(length):
                alive = [j for j in range(len(group)) if group[j][1] > t]
                pairs = [(group[j][0], so_far[j][t]) for j in alive]
                baseline = weighted_mean(pairs)
                none = baseline is None or len(alive) == 1
                advantages.append(F(0) if none else reward - baseline)
                assert i in alive
    return advantages


token_groups = st.lists(
    st.lists(
        st.tuples(
            st.integers(-24, 24).map(lambda n: F(n, 8)),
            st.lists(st.integers(0, 4).map(lambda n: F(n, 8)), max_size=6),
        ),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(token_groups)
def test_token_baselines_match_the_formula_in_rational_numbers(members):
    groups = [[(r, len(tokens)) for r, tokens in group] for group in members]
    energies = [[tokens for _, tokens in group] for group in members]
    flat = energies_of(*(e for group in energies for tokens in group for e in tokens))
    got = otb(*tensors(groups), energies=flat).tolist()
    assert got == pytest.approx([float(a) for a in exact_otb(groups, energies)], abs=1e-12)


# --- remax


def test_remax_compares_with_the_greedy_response():
    arguments = tensors([[(1, 3), (0, 2)], [(2, 1)], [(1, 2), (3, 4)], [(1, 0), (0, 0)]])
    greedy = torch.tensor([0.25, 5.0, math.nan, 1.0])
    expected = {"zero": [0, 0], "raw": [1, 3]}
    for singleton, without in expected.items():
        got = estimators.remax(*arguments, singleton, greedy_rewards=greedy)
        assert got.tolist() == [0.75, -0.25, -3, *without, 0, 0]
