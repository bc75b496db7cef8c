"""Advantage estimators: rewards of a group -> one advantage for each of its samples.

Every estimator takes rewards [N], lengths [N] (tokens that carry loss) and group_offsets [K+1]
(group k is sequences group_offsets[k]:group_offsets[k+1]) and returns advantages [N] in float64.
"""

import torch


def _group_sum(values: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """[N] -> [K]; groups may be empty."""
    sizes = group_offsets.diff()
    group_of = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    return torch.zeros(sizes.numel(), dtype=values.dtype).index_add_(0, group_of, values)


def opo(rewards: torch.Tensor, lengths: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """On-Policy RL with Optimal reward baseline (arXiv 2505.23585).

    A_i = r_i - b with b = sum_j l_j r_j / sum_j l_j over the group: the baseline of least gradient
    variance when token gradients are orthogonal and of like norm. No division by the standard
    deviation. Hence sum_i l_i A_i = 0 in every group; equal rewards give exactly 0, and so does a
    group whose lengths are all 0.

    Example: rewards (1, 0, 0, 1) with lengths (10, 20, 30, 20) have b = 3/8 and advantages
    (5/8, -3/8, -3/8, 5/8).
    """
    rewards, lengths = rewards.double(), lengths.double()
    sizes = group_offsets.diff()
    # Relative to the group's first reward, so that equal rewards cancel without rounding.
    first = rewards[torch.repeat_interleave(group_offsets[:-1], sizes)]
    relative = rewards - first
    total = _group_sum(lengths, group_offsets)
    weighted = _group_sum(lengths * relative, group_offsets)
    baseline = torch.where(total > 0, weighted / total.clamp(min=1), 0)
    advantages = relative - torch.repeat_interleave(baseline, sizes)
    return torch.where(torch.repeat_interleave(total > 0, sizes), advantages, 0)
