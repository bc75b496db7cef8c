"""Rewards -> token-level advantages, in place."""

import torch

from megatron_opo.advantages import estimators, kernel
from megatron_opo.advantages.estimators import Singleton, token_energies
from megatron_opo.batch import PackedBatch
from megatron_opo.errors import RewardError
from megatron_opo.recipe import Estimator

__all__ = ["NEEDS_SCORES", "baselines", "group_advantages_", "token_energies"]

# Their weights come from the policy's probabilities, so the actor scores the rollout first.
NEEDS_SCORES: frozenset[Estimator] = frozenset({"opo_energy", "otb"})

# The advantage before it is scaled; what these subtract is read off it.
UNSCALED = {
    "opo_whitened": estimators.opo,
    "grpo": estimators.dr_grpo,
    "reinforce_plus_plus": estimators.opo_batch,
    "reinforce_plus_plus_baseline": estimators.dr_grpo,
}


def group_advantages_(
    batch: PackedBatch,
    estimator: Estimator = "opo",
    singleton: Singleton = "zero",
    energies: torch.Tensor | None = None,
) -> None:
    """Overwrite `batch.advantages` [T] with the advantage of each loss token, and 0 elsewhere.

    Args:
        energies: [T] `token_energies`, for the estimators of NEEDS_SCORES; used on loss tokens.

    Raises:
        RewardError: a reward is NaN or infinite (named by its sample).
    """
    _refuse_not_finite(batch)
    lengths = batch.response_lengths
    if estimator == "opo":
        kernel.group_advantages_(
            batch.advantages,
            batch.rewards,
            lengths,
            batch.group_offsets,
            batch.cu_seqlens,
            mask=batch.loss_mask,
            singleton_raw=singleton == "raw",
        )
        return
    extra: dict[str, torch.Tensor] = {}
    if estimator in NEEDS_SCORES:
        assert energies is not None, f"{estimator} needs the energy of each token"
        extra["energies"] = energies[batch.loss_mask]
    if estimator == "remax":
        assert batch.greedy_rewards is not None, "remax needs a greedy response of each prompt"
        extra["greedy_rewards"] = batch.greedy_rewards
    compute = getattr(estimators, estimator)
    values = compute(batch.rewards, lengths, batch.group_offsets, singleton, **extra)
    per_token = values if estimator == "otb" else torch.repeat_interleave(values, lengths)
    batch.advantages.zero_()
    batch.advantages[batch.loss_mask] = per_token.to(batch.advantages.dtype)


def baselines(batch: PackedBatch, estimator: Estimator) -> torch.Tensor:
    """[N] float64: what was subtracted from each reward, `batch.advantages` being set; the mean
    over the response's tokens where they differ. NaN for a response without tokens."""
    lengths = batch.response_lengths
    rewards = batch.rewards.double()
    if estimator in UNSCALED:
        return rewards - UNSCALED[estimator](rewards, lengths, batch.group_offsets, "raw")
    return rewards - batch.mean_advantages


def _refuse_not_finite(batch: PackedBatch) -> None:
    finite = torch.isfinite(batch.rewards)
    if not finite.all():
        found = dict(
            zip(batch.sample_ids[~finite].tolist(), batch.rewards[~finite].tolist(), strict=True)
        )
        raise RewardError(
            f"rewards must be finite numbers, but of samples {list(found)} of the rollout they are "
            f"{list(found.values())}: return a number, or let the reward function raise, which "
            "leaves the sample out"
        )
