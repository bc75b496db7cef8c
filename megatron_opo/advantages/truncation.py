"""What a response that was cut at the token limit counts for (algorithm.truncated).

- keep: its reward as it is.
- mask: it is left out like one that could not be scored: no loss, and no part in its group's
  baseline. Its siblings move as if it had never been sampled.
- penalise: soft overlong punishment (DAPO, arXiv 2503.14476). Past the last `overlong_buffer`
  tokens before the limit, and whether or not it was cut, each token takes
  overlong_factor / overlong_buffer from the reward. The baseline is that of these rewards.
"""

from dataclasses import replace

from megatron_opo.batch import Group, Sample
from megatron_opo.recipe import AlgorithmConfig

MASKED = "cut at rollout.max_response_tokens and masked (algorithm.truncated)"


def shape_rewards(
    groups: list[Group], algorithm: AlgorithmConfig, max_response_tokens: int
) -> list[Group]:
    """The groups with the rewards that train; None where a sample is left out. The greedy response
    of a group is shaped alike, since it is compared with the others."""

    def shape(sample: Sample) -> Sample:
        if sample.reward is None:
            return sample
        if algorithm.truncated == "mask" and sample.finish_reason == "length":
            return replace(sample, reward=None, reward_error=MASKED)
        if algorithm.truncated == "penalise":
            penalty = overlong_penalty(sample.length, algorithm, max_response_tokens)
            return replace(sample, reward=sample.reward + penalty)
        return sample

    return [
        replace(
            group,
            samples=tuple(map(shape, group.samples)),
            greedy=None if group.greedy is None else shape(group.greedy),
        )
        for group in groups
    ]


def overlong_penalty(length: int, algorithm: AlgorithmConfig, max_response_tokens: int) -> float:
    """min(-(length - (max_response_tokens - buffer)) / buffer * factor, 0)."""
    assert algorithm.overlong_buffer is not None, "the recipe checks it"
    excess = length - (max_response_tokens - algorithm.overlong_buffer)
    return min(-excess / algorithm.overlong_buffer * algorithm.overlong_factor, 0.0)
