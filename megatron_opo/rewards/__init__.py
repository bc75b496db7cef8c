"""Rewards: verifiers (`verifiers`), run in worker processes (`worker`) by a pool (`pool`)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_opo.rewards.pool import RewardPool, Scoring

__all__ = ["REWARD_LOG", "RewardPool", "Scoring"]

# Among the logs of a run: what its reward function prints.
REWARD_LOG = "rewards.log"


def __getattr__(name: str) -> Any:
    # Workers import this package too, and only the trainer's side shall pay for torch.
    if name in __all__:
        from megatron_opo.rewards import pool

        return getattr(pool, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
