"""The data structures that cross modules: Prompt -> Sample, Group -> PackedBatch.

Shape legend: P prompts of a step, G samples of a prompt, K groups, N sequences, T tokens,
V vocabulary.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from megatron_opo.errors import RewardError

SHOWN_REASONS = 5


@dataclass(frozen=True)
class Prompt:
    """One tokenised question.

    Example: Prompt(id="e0-17", token_ids=(3, 9, 4), text="2+2=", data_source="arith",
    ground_truth="4"). `id` is unique over a whole run (epoch and row), so a group is found by it.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One response exactly as the server returned it; its ids are never re-tokenised.

    Example: Sample(group_id="e0-17", index=2, response_ids=(7, 1), logprobs=(-0.1, -0.7),
    versions=(4, 4), finish_reason="stop", text="4", server="http://127.0.0.1:30000").
    `reward` is None until scored and stays None when the sample could not be scored;
    `reward_error` then says why. `loss_mask` is None where the policy sampled the whole response;
    otherwise it says of which tokens it did (in a response of several turns what others said
    stands between them; their logprobs are 0). `added` are these others' parts of `text`: ranges
    of characters, from and up to. `cached_tokens` of the prompt were in the cache of its server.
    """

    group_id: str
    index: int
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    text: str
    server: str = ""
    reward: float | None = None
    reward_info: dict[str, Any] = field(default_factory=dict)
    reward_error: str | None = None
    loss_mask: tuple[bool, ...] | None = None
    added: tuple[tuple[int, int], ...] = ()
    cached_tokens: int = field(default=0, compare=False)  # where it was made, not what it is

    @property
    def length(self) -> int:
        """Tokens that the policy sampled: the length of which OPO's baseline speaks."""
        return len(self.response_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def turns(self) -> int:
        """How often the policy spoke."""
        if self.loss_mask is None:
            return 1
        return sum(own and not before for before, own in pairwise((False, *self.loss_mask)))


@dataclass(frozen=True)
class Group:
    """All samples of one prompt: the unit over which the baseline is computed.

    `greedy` is the most likely response where an estimator wants it as baseline; it is not trained.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    greedy: Sample | None = None

    def with_samples(self, samples) -> "Group":
        return replace(self, samples=tuple(samples))


@dataclass(frozen=True)
class PackedBatch:
    """A rollout, ragged and flat. Groups are contiguous; nothing is padded.

    Example, one group of two responses "4<e>" and "<e>" to the prompt "2+2=" (3 ids)::

        tokens            [3, 9, 4, 7, 1,  3, 9, 4, 1]      # [T]
        loss_mask         [0, 0, 0, 1, 1,  0, 0, 0, 1]      # [T] tokens the policy sampled
        rollout_logprobs  [0, 0, 0, a, b,  0, 0, 0, c]      # [T] of the token itself
        advantages        [0, 0, 0, A, A,  0, 0, 0, B]      # [T]
        cu_seqlens        [0, 5, 9]                         # [N+1]
        group_offsets     [0, 2]                            # [K+1] in sequences
        rewards           [1, 0]                            # [N]
        sample_ids        [0, 1]                            # [N] place in the whole rollout
        greedy_rewards    [1]                               # [K] NaN: none; or None for all
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor
    group_offsets: torch.Tensor
    rewards: torch.Tensor
    sample_ids: torch.Tensor
    greedy_rewards: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def sequence_lengths(self) -> torch.Tensor:
        return self.cu_seqlens.diff()

    @property
    def response_lengths(self) -> torch.Tensor:
        """[N] tokens that carry loss."""
        cumulative = torch.zeros(self.tokens.numel() + 1, dtype=torch.int64)
        torch.cumsum(self.loss_mask, 0, out=cumulative[1:])
        return cumulative[self.cu_seqlens].diff()

    @property
    def loss_sequences(self) -> torch.Tensor:
        """[L] of each token that carries loss, which sequence it stands in."""
        lengths = self.response_lengths
        return torch.repeat_interleave(torch.arange(lengths.numel()), lengths)

    @property
    def mean_advantages(self) -> torch.Tensor:
        """[N] float64, over the tokens that carry loss; NaN where there are none."""
        lengths = self.response_lengths
        sums = torch.zeros(lengths.numel(), dtype=torch.float64)
        advantages = self.advantages[self.loss_mask].double()
        return sums.index_add_(0, self.loss_sequences, advantages) / lengths

    def select(self, sequences: list[int]) -> "PackedBatch":
        """The given sequences, in that order. Group structure is dropped: advantages are set."""
        bounds = self.cu_seqlens.tolist()
        rows = [torch.arange(bounds[i], bounds[i + 1]) for i in sequences]
        index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
        chosen = torch.tensor(sequences, dtype=torch.int64)
        cu_seqlens = torch.zeros(len(sequences) + 1, dtype=torch.int64)
        torch.cumsum(self.sequence_lengths[chosen], 0, out=cu_seqlens[1:])
        return PackedBatch(
            tokens=self.tokens[index],
            loss_mask=self.loss_mask[index],
            rollout_logprobs=self.rollout_logprobs[index],
            advantages=self.advantages[index],
            cu_seqlens=cu_seqlens,
            group_offsets=torch.zeros(1, dtype=torch.int64),
            rewards=self.rewards[chosen],
            sample_ids=self.sample_ids[chosen],
        )


def pack(groups: list[Group]) -> PackedBatch:
    """Flatten scored groups. Unscorable samples (reward None) are left out of their group;
    `sample_ids` counts them, so it indexes the samples of `groups` in order.

    Raises:
        RewardError: no sample of the whole rollout could be scored.
    """
    tokens, mask, logprobs, rewards, sample_ids = [], [], [], [], []
    cu_seqlens, group_offsets = [0], [0]
    position = 0
    for group in groups:
        for sample in group.samples:
            if sample.reward is not None:
                prompt_length = len(group.prompt.token_ids)
                tokens += group.prompt.token_ids + sample.response_ids
                length = len(sample.response_ids)
                mask += [False] * prompt_length + list(sample.loss_mask or [True] * length)
                logprobs += [0.0] * prompt_length + list(sample.logprobs)
                cu_seqlens.append(cu_seqlens[-1] + prompt_length + length)
                rewards.append(sample.reward)
                sample_ids.append(position)
            position += 1
        group_offsets.append(len(rewards))
    if not rewards:
        reasons = sorted({str(s.reward_error) for g in groups for s in g.samples})
        raise RewardError(
            f"none of the {position} samples of the rollout has a reward, so there is nothing to "
            "train on:\n" + "\n".join(reasons[:SHOWN_REASONS])
        )
    greedy_rewards = None
    if any(group.greedy is not None for group in groups):
        found = [None if group.greedy is None else group.greedy.reward for group in groups]
        greedy_rewards = torch.tensor(
            [math.nan if reward is None else reward for reward in found], dtype=torch.float64
        )
    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.zeros(len(tokens), dtype=torch.float32),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int64),
        group_offsets=torch.tensor(group_offsets, dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
        greedy_rewards=greedy_rewards,
    )
