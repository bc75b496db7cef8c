"""Cases of the advantage kernel, and what is right in exact fractions; for every implementation.

`python -m tests.kernel_cases EXAMPLES` checks the implementation that MEGATRON_OPO_KERNEL names in
a process of its own: Triton's interpreter has to be chosen before Triton is imported. With a
library as second argument, that is the CUDA implementation, compiled for the CPU.
"""

import itertools
import math
import os
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.advantages import kernel, kernel_cuda
from megatron_opo.advantages.kernel import group_advantages_, group_advantages_padded_

TRITON = "megatron_opo.advantages.kernel_triton"
UNTOUCHED = 7.0  # no advantage: rewards below stay in -3..3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REWARD_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
MASK_DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def exact_advantages(rewards, weights, groups, singleton_raw):
    """A_i = r_i - sum w_j r_j / sum w_j as fractions; `groups` are lists of indices."""
    rewards, weights = [Fraction(r) for r in rewards], [Fraction(w) for w in weights]
    advantages = [Fraction(0)] * len(rewards)
    for group in groups:
        total = sum(weights[i] for i in group)
        if total == 0:
            continue
        baseline = sum(weights[i] * rewards[i] for i in group) / total
        for i in group:
            raw = singleton_raw and len(group) == 1
            advantages[i] = rewards[i] - (0 if raw else baseline)
    return advantages


def assert_close(got: torch.Tensor, exact: list[Fraction], error: float = 1e-15) -> None:
    """Rounded once to its dtype, after an absolute `error` on the way."""
    step = torch.finfo(got.dtype).eps
    smallest = torch.finfo(got.dtype).smallest_normal
    for value, right in zip(got.tolist(), exact, strict=True):
        assert value == right or abs(value - right) <= step * abs(right) + error + smallest, (
            value,
            float(right),
        )


numbers = st.floats(-3, 3, width=16) | st.sampled_from([0.0, 1.0, -1.0, 0.1])
flags = st.booleans()


@st.composite
def ragged_cases(draw):
    groups = draw(
        st.lists(
            st.lists(
                st.tuples(
                    numbers,
                    st.sampled_from([0, 0, 1, 2, 7, 16, 33, 50, 257, 5000]) | st.integers(0, 300),
                    st.none() | st.floats(0, 10, width=16),
                ),
                max_size=6,
            ),
            min_size=1,
            max_size=6,
        )
    )
    # Tokens before, after, and by how many buffer and mask miss an aligned address.
    return groups, *(draw(st.sampled_from([0, 0, 1, 3, 16, 20])) for _ in range(4))


def check_ragged(case, dtype, reward_dtype, masked, singleton_raw, seed):
    groups, before, after, buffer_shift, mask_shift = case
    members = [member for group in groups for member in group]
    rewards = torch.tensor([r for r, _, _ in members], dtype=torch.float64).to(reward_dtype)
    lengths = [n for _, n, _ in members]
    weights = [n if w is None else w for _, n, w in members]
    cu_seqlens = torch.tensor([before, *lengths]).cumsum(0)
    offsets = torch.tensor([0, *(len(g) for g in groups)]).cumsum(0)
    tokens = before + sum(lengths) + after
    whole = torch.full((buffer_shift + tokens + 64,), UNTOUCHED, dtype=dtype)
    buffer = whole[buffer_shift : buffer_shift + tokens]
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(mask_shift + tokens, generator=generator) < 0.7)[mask_shift:]
    group_advantages_(
        buffer,
        rewards,
        torch.tensor(weights, dtype=torch.float64),
        offsets,
        cu_seqlens,
        mask=mask if masked else None,
        singleton_raw=singleton_raw,
    )
    bounds = offsets.tolist()
    exact = exact_advantages(
        rewards.tolist(),
        weights,
        [range(*pair) for pair in itertools.pairwise(bounds)],
        singleton_raw,
    )
    assert (whole[: buffer_shift + before] == UNTOUCHED).all()
    assert (whole[buffer_shift + tokens - after :] == UNTOUCHED).all()
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        on = mask[start:end] if masked else torch.ones(end - start, dtype=torch.bool)
        values = buffer[start:end]
        assert (values[~on] == 0).all()
        if on.any():
            assert (values[on] == values[on][0]).all()
            assert_close(values[on][:1], [exact[i]])


@st.composite
def padded_cases(draw):
    ids = draw(st.lists(st.sampled_from(["7", "007", "b", "", "a"]), min_size=1, max_size=7))
    width = draw(st.sampled_from([0, 1, 5, 16, 48, 100, 4096, 4100]))
    return ids, width, [draw(st.sampled_from(["prefix", "holes", "none", "all"])) for _ in ids]


def check_padded(case, dtype, mask_dtype, singleton_raw, wide, seed):
    ids, width, kinds = case
    rows = len(ids)
    generator = torch.Generator().manual_seed(seed)
    # Sixteenths, few of them: any order of adding them up is exact in float32.
    values = torch.randint(-40, 40, (rows, width + wide), generator=generator) / 16
    values *= torch.rand(values.shape, generator=generator) < 0.2
    rewards = values.to(dtype)[:, :width]  # `wide`: rows do not lie one after the other
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, kind in enumerate(kinds):
        length = int(torch.randint(0, width + 1, (), generator=generator))
        if kind == "prefix":
            mask[row, :length] = True
        elif kind == "holes":
            mask[row] = torch.rand(width, generator=generator) < 0.5
        mask[row] |= kind == "all"
    rewards[~mask & (values[:, :width] > 1)] = math.nan  # what is left out counts nowhere
    sums = torch.where(mask, rewards, 0).double().sum(1).tolist()
    words = torch.where(mask, 1.0, -0.0).to(mask_dtype)
    if mask_dtype.is_floating_point or mask_dtype is torch.int64:
        words *= 3
    workspace = torch.full((3, rows), math.nan, dtype=torch.float64)
    group_advantages_padded_(rewards, words, ids, singleton_raw=singleton_raw, workspace=workspace)

    members = defaultdict(list)
    for row, name in enumerate(ids):
        members[name].append(row)
    lengths = mask.sum(1).tolist()
    exact = exact_advantages(sums, lengths, members.values(), singleton_raw)
    assert (rewards[~mask] == 0).all()
    if width:
        assert_close(workspace[0], exact, error=1e-12)
        assert workspace[1].tolist() == lengths
        if kernel.implementation(rewards.device) in (kernel_cuda, sys.modules.get(TRITON)):
            # A row whose length is where it ends is written without a look at its mask.
            ends = (mask * torch.arange(1, width + 1)).amax(1)
            assert workspace[2].tolist() == ends.tolist()
    for row in range(rows):
        tokens = rewards[row][mask[row]]
        if len(tokens):
            assert (tokens == tokens[0]).all()
            assert_close(tokens[:1], [exact[row]], error=1e-12)


def check_many_sequences() -> None:
    """More than any search looks at in one go; every token of the buffer belongs to one."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 5, (300,), generator=generator)
    lengths = torch.randint(0, 25, (int(sizes.sum()),), generator=generator)
    lengths[::50] = 1700
    rewards = torch.randint(-3, 4, lengths.shape, generator=generator)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    buffer = torch.full((int(cu_seqlens[-1]),), UNTOUCHED)
    # What lies behind offsets in memory is not theirs.
    behind = torch.zeros(2000, dtype=torch.int64)
    offsets = torch.cat([offsets, behind])[: len(offsets)]
    cu_seqlens = torch.cat([cu_seqlens, behind])[: len(cu_seqlens)]
    group_advantages_(buffer, rewards, lengths, offsets, cu_seqlens)
    groups = [range(*pair) for pair in itertools.pairwise(offsets.tolist())]
    exact = exact_advantages(rewards.tolist(), lengths.tolist(), groups, False)
    used = lengths > 0
    firsts = buffer[cu_seqlens[:-1][used]]
    assert_close(firsts, [a for a, n in zip(exact, lengths.tolist(), strict=True) if n])
    assert torch.equal(buffer, firsts.repeat_interleave(lengths[used]))


def check_rounding() -> None:
    """As torch rounds float64, halfway cases included."""
    # Steps of a quarter of what float32, bfloat16 and float16 tell apart.
    near_one = [torch.arange(-40, 40).double() / 2**bits + 1 for bits in (25, 9, 12)]
    values = torch.cat([*near_one, *(-x for x in near_one), torch.tensor([6e4, -1e5, 1e-6, 0])])
    offsets = torch.arange(len(values) + 1)
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for dtype in (torch.float32, torch.float16) if interpreted else DTYPES:
        buffer = torch.full((len(values),), UNTOUCHED, dtype=dtype)
        group_advantages_(
            buffer, values, torch.ones_like(values), offsets, offsets, singleton_raw=True
        )
        assert torch.equal(buffer, values.to(dtype))


def check(examples: int) -> None:
    """Check that many ragged cases drawn at random, and as many padded ones, and those that chance
    does not find."""
    quiet = settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    dtypes, seeds = st.sampled_from(DTYPES), st.integers(0, 2**32)
    reward_dtypes = st.sampled_from(REWARD_DTYPES)
    ragged = given(ragged_cases(), dtypes, reward_dtypes, flags, flags, seeds)
    padded = given(padded_cases(), dtypes, st.sampled_from(MASK_DTYPES), flags, flags, seeds)
    quiet(ragged(check_ragged))()
    quiet(padded(check_padded))()
    check_many_sequences()
    check_rounding()


def use_cuda_on_cpu(library: str) -> None:
    """Let the CUDA implementation run in a library made for the CPU."""
    loaded = kernel_cuda.load(Path(library))
    kernel_cuda.unavailable = lambda device: None
    kernel_cuda._here = lambda tokens: (loaded, 0, None)


if __name__ == "__main__":
    for path in sys.argv[2:]:
        use_cuda_on_cpu(path)
    check(int(sys.argv[1]))
