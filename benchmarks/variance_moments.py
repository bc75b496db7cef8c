"""The statistics of variance.py: moments of a group's gradient, from one sample of answers.

d different answers of M, E estimators, A aggregations, S group sizes, P questions.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_opo.advantages.estimators import (
    dr_grpo,
    opo,
    opo_leave_one_out,
    rloo,
    weighted_baseline,
)

ESTIMATORS = (
    "none",
    "mean",
    "rloo",
    "opo",
    "opo_leave_one_out",
    "opo_energy",
    "energy_leave_one_out",
    "optimum",
)
CONSTANTS = ("E r", "E l r / E l", "E W r / E W")  # with the optimum, known from another sample
COMPARED = ESTIMATORS + CONSTANTS
# The estimator that differs from it only by being unbiased. For all others it is the optimum.
PAIRED = {
    "mean": "rloo",
    "opo": "opo_leave_one_out",
    "opo_energy": "energy_leave_one_out",
}
COUNTERPARTS = [COMPARED.index(PAIRED.get(name, "optimum")) for name in COMPARED]
AGGREGATIONS = ("seq-mean-token-sum", "token-mean")
MAIN_SIZE = 8
# Rewards of the same answers, to see what depends on the task. The first is the quickstart's.
TASKS = ("the sum is right", "the work is shown", "the sum is even")


@dataclass(frozen=True)
class Effort:
    """`sample` answers to each question make groups, as many again the constant baselines."""

    questions: int
    sample: int
    shuffles: int
    sizes: tuple[int, ...]
    training_steps: tuple[int, ...]
    resamples: int


@dataclass(frozen=True)
class Answers:
    """M answers to one question, of which d are different. All but `index` in float64.

    Each answer j is number index[j] [M] among the different ones, which have rewards, lengths,
    energies [d] and the gram matrix [d, d] of their gradients. `constants` are baselines (and
    `mean_length` a length) from an independent sample.
    """

    index: torch.Tensor
    rewards: torch.Tensor
    lengths: torch.Tensor
    energies: torch.Tensor
    gram: torch.Tensor
    constants: dict[str, float]
    mean_length: float


@dataclass(frozen=True)
class Stage:
    """What was measured of one policy. P questions, S group sizes, A aggregations, E estimators.

    moments: [P, S, A, E, 5], the last axis being E|h|^2, |E h|^2, |E d|^2, <E d, E h*>, |E h*|^2,
        where h* is h of the optimum, and d is h less that of the estimator's counterpart.
    cross: [3, E, P, P] the last three between questions, at MAIN_SIZE and seq-mean-token-sum.
    tasks: [P, tasks, E, 5] moments of each of TASKS, at MAIN_SIZE and seq-mean-token-sum.
    answers: the sample of each question, with the rewards of the first task.
    """

    name: str
    sizes: tuple[int, ...]
    moments: np.ndarray
    cross: np.ndarray
    tasks: np.ndarray
    answers: list[Answers]


def advantages(
    answers: Answers,
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    energies: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """Of answers [N] in groups of `size`: [E, N], in the order of COMPARED."""
    offsets = torch.arange(0, rewards.numel() + 1, size)
    return torch.stack(
        [
            rewards,
            dr_grpo(rewards, lengths, offsets),
            rloo(rewards, lengths, offsets),
            opo(rewards, lengths, offsets),
            opo_leave_one_out(rewards, lengths, offsets),
            weighted_baseline(rewards, energies, offsets),
            opo_leave_one_out(rewards, energies, offsets),
            *(
                rewards - answers.constants[name]
                for name in COMPARED[ESTIMATORS.index("optimum") :]
            ),
        ]
    )


def group_moments(
    answers: Answers, size: int, shuffles: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments [A, E, 5] as in `Stage`, and mean coefficients [E, d] of seq-mean-token-sum."""
    different = answers.rewards.numel()
    groups = answers.index.numel() // size
    orders = [torch.randperm(answers.index.numel(), generator=generator) for _ in range(shuffles)]
    order = torch.stack(orders)[:, : groups * size]
    place = answers.index[order].view(shuffles, groups, size)
    rewards, lengths = answers.rewards[place], answers.lengths[place]
    found = advantages(
        answers, rewards.flatten(), lengths.flatten(), answers.energies[place].flatten(), size
    ).view(-1, *place.shape)
    within = answers.gram[place[..., :, None], place[..., None, :]]

    def spread(coefficients: torch.Tensor) -> torch.Tensor:
        """[E, shuffles, groups, size] -> [E, shuffles, d]"""
        flat = torch.zeros(coefficients.shape[0], shuffles, different, dtype=torch.float64)
        index = place.flatten(1).expand(coefficients.shape[0], -1, -1)
        return flat.scatter_add_(2, index, coefficients.flatten(2))

    def of_groups(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("esgi,sgij,esgj->e", x, within, y) / shuffles

    def of_pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = torch.einsum("esd,esd->e", spread(x) @ answers.gram, spread(y)) / shuffles
        return (whole - of_groups(x, y)) / (groups * (groups - 1))

    best = (found[COMPARED.index("optimum")] / size).expand_as(found)
    counterpart = found[COUNTERPARTS] / size
    moments = []
    for scale in (1 / size, answers.mean_length / lengths.sum(-1, keepdim=True)):
        h = found * scale
        d = h - counterpart
        pairs = [of_pairs(x, y) for x, y in ((h, h), (d, d), (d, best), (best, best))]
        moments.append(torch.stack([of_groups(h, h) / groups, *pairs], -1))
    coefficients = spread(found / size).sum(1) / (shuffles * groups)
    return torch.stack(moments), coefficients
