import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.actor.optimizer import learning_rate
from megatron_opo.recipe import OptimizerConfig


def rates(total, **fields):
    config = OptimizerConfig(lr=1.0, **fields)
    return [learning_rate(step, config, total) for step in range(total)]


def test_warm_up_is_linear_and_reaches_the_rate_at_its_last_update():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_decay_ends_at_the_minimum():
    assert rates(5, schedule="linear", min_lr=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_after_warm_up():
    half = 0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2
    assert rates(5, schedule="cosine", warmup_steps=2, min_lr=0.1) == pytest.approx(
        [0.5, 1, 1, half, 0.1]
    )


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 30),
    total=st.integers(1, 60),
    minimum=st.floats(0, 1),
)
def test_rates_stay_within_bounds_and_never_rise_after_warm_up(schedule, warmup, total, minimum):
    values = rates(total, schedule=schedule, warmup_steps=warmup, min_lr=minimum)
    assert all(0 < rate <= 1 + 1e-12 or rate == 0 == minimum for rate in values)
    after = values[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if after:
        assert min(after) >= minimum - 1e-12
