from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.batch import Group, Prompt, Sample
from megatron_opo.dynamic_sampling import draw_groups, draw_metrics, has_signal
from megatron_opo.errors import TrainingError


def make_group(name, rewards):
    samples = tuple(
        Sample(name, i, (5,), (-1.0,), (0,), "stop", "", reward=reward)
        for i, reward in enumerate(rewards)
    )
    return Group(Prompt(name, (3,), "", "test", None), samples)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.1, 0.1 + 1e-12], True),
        ([1.0, None, 0.0], True),
        ([1.0, None, 1.0], False),
        ([1.0, None], False),
        ([None, None], False),
    ],
)
def test_a_group_gives_a_signal_where_the_rewards_that_count_differ(rewards, expected):
    assert has_signal(make_group("a", rewards)) == expected


class Source:
    """Deals groups out one after the other and remembers how many it was asked for."""

    def __init__(self, signals):
        self.signals, self.asked, self.names = signals, [], count()

    def __call__(self, number):
        self.asked.append(number)
        names = [next(self.names) for _ in range(number)]
        return [make_group(str(n), [1.0, 0.0 if self.signals(n) else 1.0]) for n in names]


def names(groups):
    return [int(group.prompt.id) for group in groups]


@settings(max_examples=100, deadline=None)
@given(
    signals=st.lists(st.booleans(), min_size=60, max_size=60),
    wanted=st.integers(1, 6),
    max_rounds=st.integers(1, 10),
)
def test_no_group_is_lost_and_none_is_drawn_for_nothing(signals, wanted, max_rounds):
    source = Source(signals.__getitem__)
    try:
        drawn = draw_groups(source, wanted, max_rounds)
    except TrainingError:
        assert len(source.asked) == max_rounds
        assert not any(signals[: wanted * max_rounds])
        return
    dealt = range(sum(source.asked))
    assert names(drawn.groups) == [n for n in dealt if signals[n]]
    assert names(drawn.dropped) == [n for n in dealt if not signals[n]]
    assert drawn.rounds == len(source.asked) <= max_rounds
    assert 1 <= len(drawn.groups) <= wanted
    assert len(drawn.groups) == wanted or drawn.rounds == max_rounds


def test_without_a_filter_one_round_keeps_everything():
    source = Source(lambda n: False)
    drawn = draw_groups(source, 4, max_rounds=1, keep=lambda group: True)
    assert names(drawn.groups) == [0, 1, 2, 3]
    assert drawn.dropped == []


def test_a_policy_that_always_earns_the_same_is_told_so():
    with pytest.raises(TrainingError) as caught:
        draw_groups(Source(lambda n: False), 4, max_rounds=3)
    assert "3 rounds" in str(caught.value)
    assert "12 groups" in str(caught.value)
    assert "rewards seen: 1)" in str(caught.value)


def test_metrics_count_what_was_dropped_and_average_over_all_that_was_drawn():
    drawn = draw_groups(Source(lambda n: n in (1, 4)), 2, max_rounds=9)
    # Asked for 2, then 1 at a time: 0 to 4, of which 1 and 4 have a mean reward of 1/2.
    assert draw_metrics(drawn) == {
        "rollout/rounds": 4.0,
        "rollout/groups_dropped": 3.0,
        "rollout/reward_mean_drawn": (3 * 1 + 2 * 0.5) / 5,
    }
