"""The Triton implementation: NVIDIA and AMD GPUs (and, with TRITON_INTERPRET=1, the CPU).

Ragged: one launch over equal shares of the buffer, wherever sequences begin and end. A program
finds its first sequence by a search, walks on from there, and works out the baseline of each group
it meets. Nothing but the buffer is written, nothing outside of it, and each byte once.

Padded: three launches, since a baseline needs all rows of its group: measure the rows (reads
rewards and mask), subtract baselines ([N] values), write the rows. A row whose mask is true up to
some token and false from there on is written from its length alone, without its mask.
"""

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

TILE = 4096  # tokens: 16 a thread, so 128-bit accesses of the mask's bytes too
WIDTH = 256  # members of a group, or offsets, looked at together: one a thread
WARPS = 8
MAX_TILES = 4  # of one program; enough to make its search cheap


@triton.jit
def _count_up_to(offsets, count, position, WIDTH: tl.constexpr):
    """How many of `count` ascending int64 offsets are <= position."""
    found = count * 0
    left = count
    while left > 0:
        step = (left + WIDTH - 1) // WIDTH
        lasts = found + (tl.arange(0, WIDTH) + 1) * step - 1
        inside = lasts < found + left
        values = tl.load(offsets + lasts, mask=inside, other=0)
        whole = tl.sum((inside & (values <= position)).to(tl.int64))
        found += whole * step
        left = tl.minimum(step - 1, left - whole * step)
    return found


@triton.jit
def _relative_baseline(rewards, weights, begin, end, reference, WIDTH: tl.constexpr):
    """(b - reference, sum of weights) of the group begin..end."""
    total = tl.zeros([WIDTH], tl.float64)
    weighted = tl.zeros([WIDTH], tl.float64)
    for first in range(begin, end, WIDTH):
        member = first + tl.arange(0, WIDTH)
        inside = member < end
        weight = tl.load(weights + member, mask=inside, other=0.0)
        total += weight
        weighted += weight * (tl.load(rewards + member, mask=inside, other=0.0) - reference)
    weight_sum = tl.sum(total)
    return tl.sum(weighted) / tl.where(weight_sum > 0, weight_sum, 1.0), weight_sum


@triton.jit
def _fill_edge(buffer, mask, begin, end, value, HAS_MASK: tl.constexpr):
    """Up to 15 tokens, one by one."""
    place = begin + tl.arange(0, 16)
    inside = place < end
    if HAS_MASK:
        on = tl.load(mask + place, mask=inside, other=0) != 0
        value = tl.where(on, value, 0.0)
    tl.store(buffer + place, value, mask=inside)


@triton.jit
def _fill(buffer, mask, begin, end, value, HAS_MASK: tl.constexpr, TILE: tl.constexpr):
    """Tokens begin..end: whole blocks of 16 in vectors, and what is left at either edge."""
    body = (begin + 15) // 16 * 16
    body_end = end // 16 * 16
    local = tl.arange(0, TILE)
    for done in range(0, body_end - body, TILE):
        place = body + done + local
        inside = place < body_end
        values = value
        if HAS_MASK:
            on = tl.load(mask + place, mask=inside, other=0) != 0
            values = tl.where(on, value, 0.0)
        tl.store(buffer + place, values, mask=inside)
    _fill_edge(buffer, mask, begin, tl.minimum(body, end), value, HAS_MASK)
    _fill_edge(buffer, mask, tl.maximum(body_end, body), end, value, HAS_MASK)


@triton.jit(do_not_specialize=["tokens", "sequences", "groups", "tiles"])
def ragged_kernel(
    buffer,
    rewards,
    weights,
    group_offsets,
    cu_seqlens,
    mask,
    tokens,
    sequences,
    groups,
    tiles,
    HAS_MASK: tl.constexpr,
    SINGLETON_RAW: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tokens, sequences, groups = tokens.to(tl.int64), sequences.to(tl.int64), groups.to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * tiles * TILE
    stop = tl.minimum(start + tiles * TILE, tokens)
    token = tl.maximum(start, tl.load(cu_seqlens))
    stop = tl.minimum(stop, tl.load(cu_seqlens + sequences))
    if token >= stop:
        return

    sequence = tl.maximum(_count_up_to(cu_seqlens, sequences + 1, token, WIDTH) - 1, 0)
    # One before the first group: the loop steps into it.
    group = tl.maximum(_count_up_to(group_offsets, groups + 1, sequence, WIDTH) - 1, 0) - 1
    group_end = sequence
    reference = tl.load(rewards)
    baseline = reference * 0
    weight_sum = baseline
    raw = False
    while (token < stop) & (sequence < sequences):
        if sequence >= group_end:
            while (sequence >= group_end) & (group + 1 < groups):
                group += 1
                group_end = tl.minimum(tl.load(group_offsets + group + 1), sequences)
            group_begin = tl.maximum(tl.load(group_offsets + group), 0)
            reference = tl.load(rewards + group_begin)
            baseline, weight_sum = _relative_baseline(
                rewards, weights, group_begin, group_end, reference, WIDTH
            )
            raw = SINGLETON_RAW and group_end - group_begin == 1
        reward = tl.load(rewards + sequence)
        advantage = tl.where(raw, reward, (reward - reference) - baseline)
        advantage = tl.where(weight_sum > 0, advantage, 0.0)
        value = advantage.to(tl.float32).to(buffer.dtype.element_ty)
        sequence += 1
        end = tl.minimum(tl.load(cu_seqlens + sequence), stop)
        _fill(buffer, mask, token, end, value, HAS_MASK, TILE)
        token = tl.maximum(token, end)


@triton.jit
def _is_on(words, KEEP: tl.constexpr):
    return words != 0 if KEEP == -1 else (words & KEEP) != 0


@triton.jit
def measure_kernel(
    tokens,
    row_stride,
    mask,
    mask_stride,
    width,
    sums,
    lengths,
    ends,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of a row: the sum of what the mask keeps, how much that is, and where the last of it ends."""
    row = tl.program_id(0).to(tl.int64)
    tokens += row * row_stride
    mask += row * mask_stride
    local = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    count = tl.zeros([TILE], tl.int32)
    last = tl.zeros([TILE], tl.int32)
    for first in range(0, width, TILE):
        inside = first + local < width
        on = _is_on(tl.load(mask + first + local, mask=inside, other=0), KEEP)
        value = tl.load(tokens + first + local, mask=inside, other=0.0)
        total += tl.where(on, value.to(tl.float32), 0.0)
        count += on.to(tl.int32)
        last = tl.where(on, first + local + 1, last)
    tl.store(sums + row, tl.sum(total.to(tl.float64)))
    tl.store(lengths + row, tl.sum(count).to(tl.float64))
    tl.store(ends + row, tl.max(last, 0).to(tl.float64))


@triton.jit
def baseline_kernel(
    sums, lengths, order, group_start, group_end, SINGLETON_RAW: tl.constexpr, WIDTH: tl.constexpr
):
    """Program p replaces the sums of the group that begins at place p, if one does."""
    place = tl.program_id(0).to(tl.int64)
    if tl.load(group_start + place) != place:
        return
    end = tl.load(group_end + place)
    reference = tl.load(sums + tl.load(order + place))
    total = tl.zeros([WIDTH], tl.float64)
    weighted = tl.zeros([WIDTH], tl.float64)
    for first in range(place, end, WIDTH):
        member = first + tl.arange(0, WIDTH)
        inside = member < end
        row = tl.load(order + member, mask=inside, other=0)
        weight = tl.load(lengths + row, mask=inside, other=0.0)
        total += weight
        weighted += weight * (tl.load(sums + row, mask=inside, other=0.0) - reference)
    weight_sum = tl.sum(total)
    baseline = tl.sum(weighted) / tl.where(weight_sum > 0, weight_sum, 1.0)
    raw = SINGLETON_RAW and end - place == 1
    for first in range(place, end, WIDTH):
        member = first + tl.arange(0, WIDTH)
        inside = member < end
        row = tl.load(order + member, mask=inside, other=0)
        reward = tl.load(sums + row, mask=inside, other=0.0)
        advantage = tl.where(raw, reward, (reward - reference) - baseline)
        tl.store(sums + row, tl.where(weight_sum > 0, advantage, 0.0), mask=inside)


@triton.jit
def write_kernel(
    tokens,
    row_stride,
    mask,
    mask_stride,
    width,
    advantages,
    lengths,
    ends,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    advantage = tl.load(advantages + row).to(tl.float32).to(tokens.dtype.element_ty)
    length = tl.load(lengths + row)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < width
    if tl.load(ends + row) == length:
        values = tl.where(place < length.to(tl.int32), advantage, 0.0)
    else:
        words = tl.load(mask + row * mask_stride + place, mask=inside, other=0)
        values = tl.where(_is_on(words, KEEP), advantage, 0.0)
    tl.store(tokens + row * row_stride + place, values, mask=inside)


def unavailable(device: torch.device) -> str | None:
    """Why it cannot run on `device`, or None."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"it runs on GPUs, not on {device.type} (unless TRITON_INTERPRET=1 is set)"


def ragged_(
    buffer: torch.Tensor,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_offsets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    singleton_raw: bool,
    tile: int = TILE,
) -> None:
    tokens = buffer.numel()
    tiles = min(MAX_TILES, max(1, tokens // (tile * _resident_programs(buffer.device))))
    _launch(
        ragged_kernel,
        (_blocks(tokens, tiles * tile),),
        buffer,
        rewards,
        weights,
        group_offsets,
        cu_seqlens,
        buffer if mask is None else mask,
        tokens,
        rewards.numel(),
        group_offsets.numel() - 1,
        tiles,
        HAS_MASK=mask is not None,
        SINGLETON_RAW=singleton_raw,
        TILE=tile,
        WIDTH=WIDTH,
    )


def padded_(
    token_rewards: torch.Tensor,
    mask_words: torch.Tensor,
    mask_keep: int,
    order: torch.Tensor,
    group_start: torch.Tensor,
    group_end: torch.Tensor,
    workspace: torch.Tensor,
    singleton_raw: bool,
) -> None:
    rows, width = token_rewards.shape
    sums, lengths, ends = workspace.unbind()
    padded = (token_rewards, token_rewards.stride(0), mask_words, mask_words.stride(0), width)
    constants = {"KEEP": mask_keep, "TILE": TILE}
    groups = (order, group_start, group_end)
    _launch(measure_kernel, (rows,), *padded, sums, lengths, ends, **constants)
    _launch(
        baseline_kernel, (rows,), sums, lengths, *groups, SINGLETON_RAW=singleton_raw, WIDTH=WIDTH
    )
    grid = (rows, _blocks(width, TILE))
    _launch(write_kernel, grid, *padded, sums, lengths, ends, **constants)


def _launch(kernel: Any, grid: tuple[int, ...], tokens: torch.Tensor, *arguments, **constants):
    with torch.cuda.device_of(tokens):
        kernel[grid](tokens, *arguments, num_warps=WARPS, **constants)


def _blocks(count: int, each: int) -> int:
    return (count + each - 1) // each


@cache
def _resident_programs(device: torch.device) -> int:
    """About as many as run at the same time."""
    if device.type != "cuda":
        return 1
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
