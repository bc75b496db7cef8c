"""What is known of a mean over prompts: estimates with 95 % intervals, and an exact test of pairs.

Samples of one prompt are alike, so k of them say less than k prompts would. Everything here is of
one value a prompt; the prompts are what is taken as drawn by chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Of the normal distribution: 95 % lie within so many deviations.
Z = 1.959963984540054
QUANTILES = (0.025, 0.975)
RESAMPLES = 10_000
SEED = 0
# Of drawn prompts that are in memory at once.
DRAWN_AT_ONCE = 2**22


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95 % interval. `interval` says how that was found; None where the
    values do not tell: they are all the same, or there is one prompt only."""

    value: float
    low: float | None
    high: float | None
    interval: Literal["wilson", "bootstrap"] | None


def estimate_mean(values: Sequence[float], between: tuple[float, float] | None = None) -> Estimate:
    """The mean of one value a prompt.

    Args:
        values: [P].
        between: the bounds that no value can leave. Where all values are one of these, the interval
            is Wilson's, which is right for so many successes in P prompts, also when all or none
            succeed. Otherwise it is the percentile interval of a bootstrap over prompts with a
            fixed seed, so that the same values give the same interval.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("there is no prompt to take a mean over")
    value = math.fsum(values) / len(values)
    if between is not None and set(values) <= set(between):
        low, high = between
        successes = sum(each == high for each in values)
        ends = [low + (high - low) * end for end in wilson(successes, len(values))]
        return Estimate(value, ends[0], ends[1], "wilson")
    if len(set(values)) == 1:
        return Estimate(value, None, None, None)
    return Estimate(value, *bootstrap(values), "bootstrap")


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Wilson's score interval of a share: the shares that lie within Z deviations of what was
    found, the deviation being their own."""
    share, square = successes / total, Z * Z / total
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    low = 0.0 if successes == 0 else middle - half
    return low, 1.0 if successes == total else middle + half


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the means of resamples, each of P values drawn with replacement."""
    array, generator = np.asarray(values, dtype=np.float64), np.random.default_rng(SEED)
    rows = max(1, DRAWN_AT_ONCE // len(array))
    means = [
        array[generator.integers(len(array), size=(min(rows, RESAMPLES - done), len(array)))].mean(
            axis=1
        )
        for done in range(0, RESAMPLES, rows)
    ]
    low, high = np.quantile(np.concatenate(means), QUANTILES)
    return float(low), float(high)


def sign_test(wins: int, losses: int) -> float:
    """The two-sided chance of a split at least as uneven, were each of these pairs as likely a win
    as a loss; exact. Ties say nothing and are not counted. 1 without any pair."""
    total, tail, splits = wins + losses, 0, 1
    for losing in range(min(wins, losses) + 1):
        tail += splits
        splits = splits * (total - losing) // (losing + 1)
    return min(1.0, 2 * tail / 2**total)
