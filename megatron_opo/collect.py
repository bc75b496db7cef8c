"""Rank 0's part of a step, before and after the update: its batch is collected, given advantages,
logged and kept. Nothing in here needs Megatron."""

from pathlib import Path

import torch

from megatron_opo.advantages import baselines, group_advantages_
from megatron_opo.advantages.truncation import shape_rewards
from megatron_opo.batch import Group, PackedBatch, Sample, pack
from megatron_opo.desk import Desk
from megatron_opo.dynamic_sampling import draw_groups, has_signal
from megatron_opo.observe.metrics import rollout_metrics
from megatron_opo.observe.samples import TokenValues
from megatron_opo.replay import batch_path, write_batch


def collect(desk: Desk, version: int) -> PackedBatch:
    """Sample a group of responses to each of the next prompts, score and pack them.

    None when asked to stop meanwhile; the prompts are drawn again then, and after any error.

    Raises:
        ServersLostError: all of them.
        TrainingError: with dynamic sampling, no group gives a signal.
        RewardError: no sample could be scored.
    """
    desk.drawn_from, batch = desk.cursor.state(), None
    try:
        batch = desk.stop.unless_asked(lambda: _collect(desk, version))
    finally:
        if batch is None:
            desk.return_prompts()
    return batch  # pyright: ignore[reportReturnType]


def _collect(desk: Desk, version: int) -> PackedBatch:
    recipe = desk.recipe
    dynamic = recipe.rollout.dynamic_sampling

    def shape(groups: list[Group]) -> list[Group]:
        return shape_rewards(groups, recipe.algorithm, recipe.rollout.max_response_tokens)

    desk.start_step()
    desk.drawn = draw_groups(
        lambda count: desk.sample_and_score(count, version),
        wanted=recipe.rollout.prompts_per_step,
        max_rounds=dynamic.max_rounds if dynamic.enabled else 1,
        keep=lambda group: not dynamic.enabled or has_signal(*shape([group])),
    )
    with desk.log.phase("pack"):
        batch = pack(shape(desk.drawn.groups))
    desk.warn_of_unscorable(desk.drawn.groups, "are left out of their groups")
    return batch


def write_advantages(desk: Desk, batch: PackedBatch, energies: torch.Tensor | None) -> None:
    algorithm = desk.recipe.algorithm
    with desk.log.phase("advantage"):
        group_advantages_(batch, algorithm.estimator, algorithm.singleton, energies)


def log_step(
    desk: Desk,
    batch: PackedBatch,
    metrics: dict[str, float],
    version: int,
    of_tokens: dict[str, torch.Tensor] | None = None,
) -> None:
    """`of_tokens`, by name [T]: what the update says of each token, where there was one."""
    groups = desk.drawn.groups
    with desk.log.phase("log"):
        subtracted = baselines(batch, desk.recipe.algorithm.estimator)
        metrics = rollout_metrics(groups, batch, subtracted) | desk.rollout_metrics() | metrics
        per_sample = torch.full((2, sum(len(g.samples) for g in groups)), torch.nan).double()
        per_sample[:, batch.sample_ids] = torch.stack([batch.mean_advantages, subtracted])
        advantages, baseline = (_per_group(values, groups) for values in per_sample)
        of_responses = values_of_responses(batch, groups, of_tokens) if of_tokens else None
        desk.log.samples(
            version + 1, groups, advantages, baselines=baseline, token_values=of_responses
        )
        keep_if_due(desk, batch, version)
    desk.log.step(version + 1, metrics, batch.tokens.numel())


def _per_group(values: torch.Tensor, groups: list[Group]) -> list[list[float]]:
    return [part.tolist() for part in values.split([len(g.samples) for g in groups])]


def values_of_responses(
    batch: PackedBatch, groups: list[Group], of_tokens: dict[str, torch.Tensor]
) -> TokenValues:
    """What `of_tokens`, by name [T], says of the response of a sample; {} of one that is not in
    the batch."""
    samples = [sample for group in groups for sample in group.samples]
    ids = [(samples[place].group_id, samples[place].index) for place in batch.sample_ids.tolist()]
    ends = dict(zip(ids, batch.cu_seqlens[1:].tolist(), strict=True))

    def values(sample: Sample) -> dict[str, list[float]]:
        end = ends.get((sample.group_id, sample.index))
        if end is None:
            return {}
        response = slice(end - len(sample.response_ids), end)
        return {name: all_of_them[response].tolist() for name, all_of_them in of_tokens.items()}

    return values


def keep_if_due(desk: Desk, batch: PackedBatch, version: int) -> None:
    """With log.batches_every: the batch of the update that follows `version`."""
    every, step = desk.recipe.log.batches_every, version + 1
    if every and step % every == 0:
        keep_batch(desk, batch, version, batch_path(desk.recipe.run_path, step))


def keep_batch(desk: Desk, batch: PackedBatch, version: int, path: Path) -> None:
    with desk.log.phase("keep_batch"):
        recipe = desk.recipe.to_show()
        write_batch(path, batch, version=version, recipe=recipe, groups=desk.drawn.groups)
