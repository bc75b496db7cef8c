"""The same in vectorised torch: any device, no compiler. Reads and writes more than it must."""

import torch

BLOCK = 1 << 18  # tokens


def unavailable(device: torch.device) -> str | None:
    """It runs everywhere."""
    return None


def ragged_(
    buffer: torch.Tensor,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_offsets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    singleton_raw: bool,
) -> None:
    count = rewards.numel()
    places = torch.arange(count, device=buffer.device)
    group = torch.searchsorted(group_offsets, places, right=True) - 1
    start, end = group_offsets[group], group_offsets[group + 1]
    advantages = _advantages(rewards, weights, places, start, end, singleton_raw)
    # What lies before and after all sequences forms two more, whose tokens keep their values.
    bounds = torch.cat([cu_seqlens.new_zeros(1), cu_seqlens, cu_seqlens.new_full((1,), -1)])
    bounds[-1] = buffer.numel()
    values = torch.nn.functional.pad(advantages.to(buffer.dtype), (1, 1))
    inside = torch.nn.functional.pad(torch.ones_like(places, dtype=torch.bool), (1, 1))
    sizes, total = bounds.diff(), buffer.numel()
    tokens = torch.repeat_interleave(values, sizes, output_size=total)
    if mask is not None:
        tokens *= mask != 0
    covered = torch.repeat_interleave(inside, sizes, output_size=total)
    torch.where(covered, tokens, buffer, out=buffer)


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
    # Bits times 0 or 1: what the mask leaves out goes even when it is NaN, and integers multiply
    # several times faster than masked_fill_ and where fill. Block by block, what is allocated for
    # it stays in the cache.
    as_integers = torch.int32 if token_rewards.element_size() == 4 else torch.int16
    rows, width = token_rewards.shape
    step = max(1, BLOCK // width)
    blocks = [slice(first, first + step) for first in range(0, rows, step)]

    def factors(block: slice) -> torch.Tensor:
        words = mask_words[block] if mask_keep == -1 else mask_words[block] & mask_keep
        return (words != 0).to(as_integers)

    bits = token_rewards.view(as_integers)
    for block in blocks:
        on = factors(block)
        bits[block].mul_(on)
        workspace[0, block] = token_rewards[block].sum(-1, dtype=torch.float32)
        workspace[1, block] = on.sum(-1, dtype=torch.int32)
    sums, lengths = workspace[0].clone(), workspace[1]
    workspace[0, order] = _advantages(sums, lengths, order, group_start, group_end, singleton_raw)
    advantages = workspace[0].to(token_rewards.dtype).view(as_integers)[:, None]
    for block in blocks:
        torch.mul(factors(block), advantages[block], out=bits[block])


def _advantages(
    rewards: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    singleton_raw: bool,
) -> torch.Tensor:
    """In `order`, where place p belongs to the group order[start[p]:end[p]]."""
    rewards, weights = rewards[order], weights[order]
    relative = rewards - rewards[start]
    zero = torch.zeros_like(rewards)
    total = zero.index_add(0, start, weights)[start]
    weighted = zero.index_add(0, start, weights * relative)[start]
    advantages = relative - weighted / total
    if singleton_raw:
        advantages = torch.where(end - start == 1, rewards, advantages)
    return torch.where(total > 0, advantages, 0)
