"""Dynamic sampling (DAPO, arXiv 2503.14476): replace groups that give no signal."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_opo.batch import Group
from megatron_opo.errors import TrainingError


@dataclass(frozen=True)
class Drawn:
    """`groups` in the order they were drawn; `dropped` ones had equal rewards."""

    groups: list[Group]
    dropped: list[Group]
    rounds: int


def has_signal(group: Group) -> bool:
    """Do the rewards of its scorable samples differ?"""
    return len({sample.reward for sample in group.samples if sample.reward is not None}) > 1


def draw_groups(
    draw: Callable[[int], list[Group]],
    wanted: int,
    max_rounds: int,
    keep: Callable[[Group], bool] = has_signal,
) -> Drawn:
    """Draw until `wanted` groups are kept, or `max_rounds` are over; then fewer are enough.

    Args:
        draw: gives as many new scored groups as it is asked for.

    Raises:
        TrainingError: no group was kept.
    """
    groups: list[Group] = []
    dropped: list[Group] = []
    rounds = 0
    while len(groups) < wanted and rounds < max_rounds:
        for group in draw(wanted - len(groups)):
            (groups if keep(group) else dropped).append(group)
        rounds += 1
    if not groups:
        rewards = sorted({s.reward for g in dropped for s in g.samples if s.reward is not None})
        raise TrainingError(
            f"there is no signal to train on: {rounds} rounds of sampling "
            f"(rollout.dynamic_sampling.max_rounds {max_rounds}) gave {len(dropped)} groups, and "
            "in none of them did the rewards that count differ (rewards seen: "
            f"{_shorten(rewards)}). Use prompts that the policy neither always nor never "
            "answers, check reward.function and algorithm.truncated, raise "
            "rollout.samples_per_prompt, or set rollout.dynamic_sampling.enabled=false"
        )
    return Drawn(groups, dropped, rounds)


def draw_metrics(drawn: Drawn) -> dict[str, float]:
    """rollout/{rounds,groups_dropped}, and rollout/reward_mean_drawn: the mean reward of all that
    was sampled, where critic/rewards is that of the groups that train."""
    rewards = [
        sample.reward
        for group in (*drawn.groups, *drawn.dropped)
        for sample in group.samples
        if sample.reward is not None
    ]
    return {
        "rollout/rounds": float(drawn.rounds),
        "rollout/groups_dropped": float(len(drawn.dropped)),
        "rollout/reward_mean_drawn": sum(rewards) / len(rewards),
    }


def _shorten(rewards: list[float]) -> str:
    if not rewards:
        return "none"
    shown = ", ".join(f"{reward:g}" for reward in rewards[:4])
    return shown + (", ..." if len(rewards) > 4 else "")
