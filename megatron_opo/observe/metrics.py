"""Numbers that describe a rollout or an evaluation, under the names that verl users chart."""

from itertools import pairwise
from math import comb

import torch

from megatron_opo.batch import Group, PackedBatch, Sample

CORRECT_REWARD = 1.0


def rollout_metrics(
    groups: list[Group], batch: PackedBatch, baselines: torch.Tensor
) -> dict[str, float]:
    """Describe one scored rollout, `batch` being `pack(groups)` with its advantages set and
    `baselines` [N] what was subtracted from its rewards.

    Rewards, advantages and baselines are those of the samples that train (the scorable ones);
    lengths count every sample, since an unscorable one was sampled too. Lengths are in tokens.
    A group's baseline is the mean over its tokens; a group without tokens has none.
    Advantages are over tokens that carry loss, as in verl, so that OPO's mean is 0 up to
    rounding: another value means that rewards and lengths got mixed up. The deviations
    divide by the number of values, so a single value has 0.

    Returns:
        critic/rewards/{mean,max,min,std}, critic/advantages/{mean,max,min},
        response_length/{mean,max,min,clip_ratio} (clip_ratio: share cut at the limit),
        prompt_length/{mean,max,min} (one value a prompt), advantages/baseline_{mean,std} (over
        groups), rollout/groups_all_equal (share of groups that give no signal), and the counts
        rollout/{samples,tokens,unscorable,truncated}, rollout/unscorable_share; with responses of
        several turns rollout/turns/{mean,max,min}, how often the policy spoke.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = torch.tensor([sample.length for sample in samples], dtype=torch.float64)
    prompt_lengths = torch.tensor(
        [len(group.prompt.token_ids) for group in groups], dtype=torch.float64
    )
    truncated = sum(sample.finish_reason == "length" for sample in samples)
    unscorable = sum(sample.reward is None for sample in samples)
    rewards = batch.rewards.double()
    trained = batch.advantages[batch.loss_mask].double()
    group_baselines = _group_baselines(batch, baselines)
    metrics = {
        **_spread("critic/rewards", rewards),
        "critic/rewards/std": rewards.std(correction=0).item(),
        **_spread("response_length", lengths),
        "response_length/clip_ratio": truncated / len(samples),
        **_spread("prompt_length", prompt_lengths),
        "rollout/groups_all_equal": _share_all_equal(batch),
        "rollout/samples": float(len(samples)),
        "rollout/tokens": lengths.sum().item(),
        "rollout/unscorable": float(unscorable),
        "rollout/unscorable_share": unscorable / len(samples),
        "rollout/truncated": float(truncated),
    }
    if any(sample.loss_mask is not None for sample in samples):
        turns = torch.tensor([sample.turns for sample in samples], dtype=torch.float64)
        metrics |= _spread("rollout/turns", turns)
    if trained.numel():
        metrics |= _spread("critic/advantages", trained)
    if group_baselines.numel():
        metrics["advantages/baseline_mean"] = group_baselines.mean().item()
        metrics["advantages/baseline_std"] = group_baselines.std(correction=0).item()
    return metrics


def eval_metrics(groups: list[Group]) -> dict[str, float]:
    """Describe one evaluation of k samples a prompt.

    A sample is correct when its reward is at least 1. An unscorable sample counts as wrong, with
    reward 0, and is counted in eval/unscorable. Should prompts differ in their number of samples,
    k is the smallest one. pass@j is the unbiased estimate 1 - C(n-c, j) / C(n, j) of the chance
    that one of j samples is correct, from the c correct ones of a prompt's n.

    Returns:
        eval/avg@k (mean reward), eval/pass@j for j = 1, 2, 4, ... and k,
        eval/response_length/{mean,max,min,clip_ratio} in tokens, and the counts
        eval/{prompts,samples,unscorable}.

    Raises:
        ValueError: there is no sample.
    """
    if not groups or not all(group.samples for group in groups):
        raise ValueError("an evaluation needs at least one sample of each of its prompts")
    samples = [sample for group in groups for sample in group.samples]
    k = min(len(group.samples) for group in groups)
    metrics = {f"eval/avg@{k}": _mean([mean_reward(group) for group in groups])}
    for j in tries_of(k):
        metrics[f"eval/pass@{j}"] = _mean([pass_at(group, j) for group in groups])
    lengths = torch.tensor([sample.length for sample in samples], dtype=torch.float64)
    truncated = sum(sample.finish_reason == "length" for sample in samples)
    return {
        **metrics,
        **_spread("eval/response_length", lengths),
        "eval/response_length/clip_ratio": truncated / len(samples),
        "eval/prompts": float(len(groups)),
        "eval/samples": float(len(samples)),
        "eval/unscorable": float(sum(sample.reward is None for sample in samples)),
    }


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _group_bounds(batch: PackedBatch) -> list[tuple[int, int]]:
    return list(pairwise(batch.group_offsets.tolist()))


def _group_baselines(batch: PackedBatch, baselines: torch.Tensor) -> torch.Tensor:
    """[<=K] of the groups that have a trained token."""
    lengths = batch.response_lengths
    # A response without tokens has no baseline; NaN times its weight of 0 would spread.
    weighted = torch.where(lengths > 0, lengths * baselines, 0)
    bounds = _group_bounds(batch)
    totals = torch.stack([lengths[start:end].sum() for start, end in bounds])
    sums = torch.stack([weighted[start:end].sum() for start, end in bounds])
    return (sums / totals)[totals > 0]


def _share_all_equal(batch: PackedBatch) -> float:
    rewards = batch.rewards.tolist()
    bounds = _group_bounds(batch)
    return sum(len(set(rewards[start:end])) < 2 for start, end in bounds) / len(bounds)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tries_of(k: int) -> list[int]:
    """The j of pass@j that k samples are described by: 1, 2, 4, ... and k."""
    return sorted({1 << i for i in range(k.bit_length())} | {k})


def mean_reward(group: Group) -> float:
    """Over all samples; one that could not be scored has 0."""
    return _mean([0.0 if s.reward is None else s.reward for s in group.samples])


def is_correct(sample: Sample) -> bool:
    return sample.reward is not None and sample.reward >= CORRECT_REWARD


def pass_at(group: Group, tries: int) -> float:
    """The unbiased estimate of the chance that one of so many samples is correct."""
    total = len(group.samples)
    wrong = total - sum(map(is_correct, group.samples))
    return 1 - comb(wrong, tries) / comb(total, tries)
