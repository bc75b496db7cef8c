"""Rewards -> token-level advantages, in place."""

import torch

from megatron_opo.advantages import estimators
from megatron_opo.batch import PackedBatch


def group_advantages_(batch: PackedBatch, estimator: str = "opo") -> torch.Tensor:
    """Overwrite `batch.advantages` [T] with each sample's advantage on its loss tokens and 0
    elsewhere; return the sequence-level advantages [N] (float64).

    Raises:
        ValueError: a reward is NaN or infinite (named by its sample).
    """
    finite = torch.isfinite(batch.rewards)
    if not finite.all():
        bad = batch.sample_ids[~finite].tolist()
        raise ValueError(f"rewards of samples {bad} are not finite: {batch.rewards[~finite]}")
    compute = getattr(estimators, estimator)
    advantages = compute(batch.rewards, batch.response_lengths, batch.group_offsets)
    per_token = torch.repeat_interleave(advantages, batch.sequence_lengths)
    batch.advantages.copy_(torch.where(batch.loss_mask, per_token, 0))
    return advantages
