"""Baselines of groups whose members lie on several data-parallel ranks."""

import torch
import torch.distributed as dist

from megatron_opo.advantages.kernel import group_advantages_
from megatron_opo.errors import KernelError


def distributed_baselines(
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_ids: torch.Tensor,
    num_groups: int,
    process_group: dist.ProcessGroup | None = None,
    *,
    singleton_raw: bool = False,
) -> torch.Tensor:
    """[n] float64: what each of this rank's rewards is compared with, sum_j w_j r_j / sum_j w_j
    over its group on all ranks; the reward itself where the weights sum to 0.

    Costs two all-reduces of a few numbers a group: the least reward of each, then sums relative to
    it, so that equal rewards give exactly 0 whatever the order of addition.

    Args:
        rewards: [n] of this rank, finite; n may be 0.
        weights: [n] not negative.
        group_ids: [n] int64 in 0..num_groups-1, the same for a group on every rank.
        singleton_raw: a group of one, over all ranks, has the baseline 0.

    Raises:
        KernelError: shapes differ, or (on the CPU) an id is out of range.
    """
    if not rewards.shape == weights.shape == group_ids.shape or rewards.dim() != 1:
        raise KernelError(
            f"rewards {tuple(rewards.shape)}, weights {tuple(weights.shape)} and group_ids "
            f"{tuple(group_ids.shape)} must all be [n]"
        )
    if not group_ids.is_cuda and ((group_ids < 0) | (group_ids >= num_groups)).any():
        raise KernelError(
            f"group_ids has {group_ids.min()} to {group_ids.max()}, allowed is 0 to "
            f"{num_groups - 1}: they number the groups of all ranks together"
        )
    rewards, weights = rewards.double(), weights.double()
    reference = rewards.new_full((num_groups,), torch.inf)
    reference.scatter_reduce_(0, group_ids, rewards, "amin")
    dist.all_reduce(reference, dist.ReduceOp.MIN, group=process_group)
    least = reference[group_ids]
    values = torch.stack([weights * (rewards - least), weights, torch.ones_like(weights)])
    sums = values.new_zeros(3, num_groups).index_add_(1, group_ids, values)
    dist.all_reduce(sums, group=process_group)
    weighted, total, size = sums[:, group_ids]
    baselines = least + weighted / total
    if singleton_raw:
        baselines = torch.where(size == 1, 0, baselines)
    return torch.where(total > 0, baselines, rewards)


def distributed_group_advantages_(
    buffer: torch.Tensor,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_ids: torch.Tensor,
    num_groups: int,
    cu_seqlens: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
    *,
    mask: torch.Tensor | None = None,
    singleton_raw: bool = False,
) -> None:
    """`group_advantages_` for this rank's sequences, with baselines over all ranks; sequences of a
    group need not be neighbours here.

    Raises:
        KernelError: see `distributed_baselines` and `group_advantages_`.
    """
    baselines = distributed_baselines(
        rewards, weights, group_ids, num_groups, process_group, singleton_raw=singleton_raw
    )
    # What is left to do is to write them: each sequence is a group of its own, taken as it is.
    alone = torch.arange(rewards.numel() + 1, device=rewards.device)
    advantages = rewards.double() - baselines
    group_advantages_(
        buffer,
        advantages,
        torch.ones_like(advantages),
        alone,
        cu_seqlens,
        mask=mask,
        singleton_raw=True,
    )
