"""Sampling by seed and position: the right distribution, and nothing else has a say."""

import os
import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.sglang_plugin import (
    QUICK_VARIABLE,
    SHARED_NAME_VARIABLE,
    VARIABLE,
    sample,
    sample_truncated,
)

DRAWS = 20_000


def many(distribution: torch.Tensor):
    """The same row, seed and position counted up."""
    rows = distribution.expand(DRAWS, -1)
    return rows, torch.arange(DRAWS) // 10 + 2**62, torch.arange(DRAWS) % 10


def chi_square(tokens: torch.Tensor, distribution: torch.Tensor) -> float:
    expected = distribution.double() * len(tokens)
    observed = torch.bincount(tokens, minlength=len(distribution)).double()
    assert not observed[expected == 0].any()
    return float(((observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())


def test_tokens_follow_the_distribution():
    distribution = torch.tensor([0.4, 0.3, 0.0, 0.2, 0.05, 0.03, 0.015, 0.005])
    tokens = sample(*many(distribution))
    # 6 degrees of freedom; beyond 42 lies less than one in five million.
    assert chi_square(tokens, distribution) < 42
    # So does the next token, whatever the one before it.
    after = tokens.view(-1, 10)[:, 1:][tokens.view(-1, 10)[:, :-1] == 1]
    assert chi_square(after, distribution) < 42


def truncated(rows, seeds, positions, top_k=2**30, top_p=1.0, min_p=0.0):
    count = len(rows)
    return sample_truncated(
        rows,
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        min_p > 0,
        seeds,
        positions,
    )


def test_truncated_sampling_follows_what_is_left():
    distribution = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    for limits, kept in (
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.8}, [1, 3, 2]),
        ({"top_p": 0.69}, [1, 3]),
        ({"min_p": 0.3}, [1, 3, 2]),
        ({"top_k": 1}, [1]),
    ):
        left = torch.zeros(5).index_copy(0, torch.tensor(kept), distribution[kept])
        tokens = truncated(*many(distribution), **limits)
        assert chi_square(tokens, left / left.sum()) < 40


def test_the_likeliest_token_is_the_first_of_equals():
    rows = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.25] * 4])
    tokens = truncated(rows, torch.tensor([1, 2]), torch.tensor([0, 0]), top_k=1)
    assert tokens.tolist() == rows.argmax(-1).tolist() == [1, 0]


weights = st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3).filter(any)


@given(st.lists(weights, min_size=1, max_size=5), st.integers(0, 2**63 - 1), st.integers(0, 9999))
def test_a_row_is_drawn_the_same_among_any_others(rows, seed, position):
    """Also beside rows of truncated requests, where a server takes the other function."""
    probs = torch.tensor(rows)
    seeds, positions = torch.full((len(rows),), seed), torch.full((len(rows),), position)
    together = sample(probs, seeds, positions)
    assert torch.equal(truncated(probs, seeds, positions), together)
    greedy = torch.tensor([1] + [2**30] * len(rows))  # the first row is of another request
    beside = sample_truncated(
        torch.cat([probs[:1], probs]),
        greedy,
        torch.ones(len(greedy)),
        torch.zeros(len(greedy)),
        False,
        seeds[:1].repeat(len(greedy)),
        positions[:1].repeat(len(greedy)),
    )
    assert beside[0] == probs[0].argmax()
    assert torch.equal(beside[1:], together)
    for i, token in enumerate(together.tolist()):
        assert probs[i, token] > 0
        alone = slice(i, i + 1)
        assert sample(probs[alone], seeds[alone], positions[alone]).tolist() == [token]


def test_a_server_that_is_not_asked_is_left_alone():
    """In that case SGLang is not even imported."""
    script = (
        "import sys; from megatron_opo.sglang_plugin import register; register(); "
        "sys.exit(any(name.startswith('sglang.') for name in sys.modules))"
    )
    asked = (VARIABLE, QUICK_VARIABLE, SHARED_NAME_VARIABLE)
    environment = {name: text for name, text in os.environ.items() if name not in asked}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0
