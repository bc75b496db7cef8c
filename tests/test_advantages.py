from fractions import Fraction as F

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.advantages import group_advantages_
from megatron_opo.advantages.estimators import opo
from megatron_opo.batch import Group, Prompt, Sample, pack
from megatron_opo.errors import RewardError


def exact_opo(rewards, lengths):
    """The formula of arXiv 2505.23585 in rational numbers."""
    total = sum(lengths)
    if total == 0:
        return [F(0)] * len(rewards)
    baseline = sum((n * r for n, r in zip(lengths, rewards, strict=True)), F(0)) / total
    return [r - baseline for r in rewards]


@pytest.mark.parametrize(
    ("rewards", "lengths", "expected"),
    [
        ([1, 0, 0, 1], [10, 20, 30, 20], [F(5, 8), F(-3, 8), F(-3, 8), F(5, 8)]),
        ([1, 0, 0], [4, 0, 12], [F(3, 4), F(-1, 4), F(-1, 4)]),
        ([F(1, 2)] * 3, [3, 7, 1], [0, 0, 0]),
        ([-1, 1, -1], [2, 3, 5], [F(-3, 5), F(7, 5), F(-3, 5)]),
        ([1, 0], [0, 0], [0, 0]),
        ([F(7, 10)], [5], [0]),
    ],
)
def test_opo_gives_the_exact_fractions(rewards, lengths, expected):
    assert exact_opo([F(r) for r in rewards], lengths) == expected
    advantages = opo(
        torch.tensor([float(r) for r in rewards]),
        torch.tensor(lengths),
        torch.tensor([0, len(rewards)]),
    )
    assert advantages.tolist() == pytest.approx([float(a) for a in expected], abs=1e-15)


def test_integer_and_bool_rewards_are_not_truncated():
    lengths, offsets = torch.tensor([10, 20, 30, 20]), torch.tensor([0, 4])
    for rewards in (torch.tensor([1, 0, 0, 1]), torch.tensor([True, False, False, True])):
        assert opo(rewards, lengths, offsets).tolist() == [0.625, -0.375, -0.375, 0.625]


groups_strategy = st.lists(
    st.lists(
        st.tuples(
            st.fractions(min_value=-5, max_value=5, max_denominator=64),
            st.integers(min_value=0, max_value=5000),
        ),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=6,
)


@given(groups_strategy)
def test_ragged_groups_match_the_exact_formula_and_equal_rewards_give_exactly_zero(groups):
    flat = [pair for group in groups for pair in group]
    offsets = torch.tensor([0, *(len(g) for g in groups)]).cumsum(0)
    advantages = opo(
        torch.tensor([float(r) for r, _ in flat], dtype=torch.float64),
        torch.tensor([n for _, n in flat]),
        offsets,
    )
    start = 0
    for group in groups:
        rewards, lengths = [r for r, _ in group], [n for _, n in group]
        got = advantages[start : start + len(group)].tolist()
        exact = exact_opo(rewards, lengths)
        assert got == pytest.approx([float(a) for a in exact], abs=1e-12)
        assert sum(n * a for n, a in zip(lengths, exact, strict=True)) == 0
        if len(set(rewards)) == 1:
            assert got == [0.0] * len(group)
        start += len(group)


def make_group(group_id, prompt_length, rewards_and_lengths):
    prompt = Prompt(group_id, tuple(range(prompt_length)), "", "test", None)
    samples = tuple(
        Sample(
            group_id, i, (5,) * length, (-0.5,) * length, (0,) * length, "stop", "", reward=reward
        )
        for i, (reward, length) in enumerate(rewards_and_lengths)
    )
    return Group(prompt, samples)


def test_token_advantages_cover_the_response_only_and_skip_unscorable_members():
    groups = [
        make_group("a", 3, [(1.0, 1), (None, 50), (0.0, 3)]),
        make_group("b", 2, [(2.0, 2), (2.0, 4)]),
    ]
    batch = pack(groups)
    batch.advantages.fill_(99)
    group_advantages_(batch)
    # Group a: the unscorable member counts neither in numerator nor denominator, b = 1/4.
    a = [0, 0, 0, 0.75, 0, 0, 0, -0.25, -0.25, -0.25]
    b = [0] * (2 + 2 + 2 + 4)
    assert batch.advantages.tolist() == a + b
    assert batch.sample_ids.tolist() == [0, 2, 3, 4]
    assert batch.group_offsets.tolist() == [0, 2, 4]


def test_a_reward_that_is_not_finite_is_refused_with_its_sample():
    batch = pack([make_group("a", 1, [(1.0, 1), (float("nan"), 2)])])
    with pytest.raises(RewardError, match=r"samples \[1\]"):
        group_advantages_(batch)


def test_an_unscorable_rollout_is_refused():
    with pytest.raises(RewardError, match="none of the 2 samples"):
        pack([make_group("a", 1, [(None, 1), (None, 2)])])
