"""Advantage estimators: rewards of a group -> one advantage for each of its samples.

Each takes rewards [N] of any real dtype, lengths [N] (tokens that carry loss), group_offsets [K+1]
(group k is sequences group_offsets[k]:group_offsets[k+1]) and `singleton`, and returns advantages
[N] in float64. Those that need more say so. The rules for the corners are the same for all:

- Equal rewards in a group give exactly 0, without rounding. (Not so by definition where the
  baseline comes from outside of the group: remax, and those over the whole batch.)
- A sample that has nothing to be compared with (a group of one; for opo_leave_one_out also one
  whose siblings have no token; for otb also a token past the end of all siblings; for remax a
  group whose greedy response has no reward) gets 0 where `singleton` is "zero", and its reward,
  which is a baseline of 0, where it is "raw"; before what the batch scales is scaled.
- A zero-length response counts by the formula: it has no weight in a length-weighted mean, and one
  vote in a plain one. A group without any token gets 0.
- Samples that could not be scored, and truncated ones that the recipe masks, are not among the
  inputs: they move no sibling.
"""

from typing import Literal

import torch

Singleton = Literal["zero", "raw"]

GRPO_EPSILON = 1e-6
WHITENING_EPSILON = 1e-8


def group_sum(values: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """[N] -> [N]: the sum over its group, for each member."""
    sizes = group_offsets.diff()
    index = torch.arange(sizes.numel(), device=sizes.device)
    group_of = torch.repeat_interleave(index, sizes)
    sums = torch.zeros(sizes.numel(), dtype=values.dtype, device=values.device)
    return sums.index_add_(0, group_of, values)[group_of]


def group_sizes(group_offsets: torch.Tensor) -> torch.Tensor:
    """[K+1] -> [N] float64: the size of its group, for each member."""
    sizes = group_offsets.diff()
    # Integers divided by integers would be rounded to float32.
    return torch.repeat_interleave(sizes, sizes).double()


def weighted_baseline(
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """A_i = r_i - sum_j w_j r_j / sum_j w_j over the group, for weights [N] >= 0; 0 where they are
    all 0. Several estimators are this one with weights of their own."""
    rewards, weights = rewards.double(), weights.double()
    relative = _relative(rewards, group_offsets)
    total = group_sum(weights, group_offsets)
    baseline = group_sum(weights * relative, group_offsets) / total
    alone = group_sizes(group_offsets) == 1
    advantages = _settle_alone(relative - baseline, rewards, alone, singleton)
    return torch.where(total > 0, advantages, 0)


def opo(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """On-Policy RL with Optimal reward baseline (arXiv 2505.23585).

    A_i = r_i - b with b = sum_j l_j r_j / sum_j l_j over the group: the baseline of least gradient
    variance when token gradients are orthogonal and of like norm. No division by the standard
    deviation. Hence sum_i l_i A_i = 0 in every group. Since b contains r_i, the expected update
    differs from the gradient, also in direction; see `opo_leave_one_out`.

    Example: rewards (1, 0, 0, 1) with lengths (10, 20, 30, 20) have b = 3/8 and advantages
    (5/8, -3/8, -3/8, 5/8).
    """
    return weighted_baseline(rewards, lengths, group_offsets, singleton)


def opo_leave_one_out(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """OPO with the baseline of the others only; equally, RLOO with OPO's weights.

    A_i = r_i - sum_{j != i} l_j r_j / sum_{j != i} l_j. Its baseline does not depend on response
    i, so the expected update is the gradient itself; OPO's is A_i (1 - l_i / sum_j l_j).

    Example: rewards (1, 0, 0, 1) with lengths (10, 20, 30, 20) give (5/7, -1/2, -3/5, 5/6).
    """
    lengths = lengths.double()
    total = group_sum(lengths, group_offsets)
    others = total - lengths
    advantages = opo(rewards, lengths, group_offsets) * (total / others)
    advantages = _settle_alone(advantages, rewards.double(), others == 0, singleton)
    return torch.where(total > 0, advantages, 0)


def opo_batch(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """OPO's baseline over the whole batch instead of each group (in the code of arXiv 2505.23585):
    A_i = r_i - sum_j l_j r_j / sum_j l_j with j over all samples."""
    whole = torch.tensor([0, rewards.numel()], device=group_offsets.device)
    advantages = weighted_baseline(rewards, lengths, whole, singleton)
    return _zero_without_tokens(advantages, lengths, group_offsets)


def opo_whitened(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """REINFORCE++-baseline with OPO's length-weighted baseline instead of the group's mean.

    OPO's advantages, divided by their standard deviation over the batch's tokens. Whitening has no
    mean to subtract: over tokens that of OPO is 0 already.
    """
    return _over_token_std(opo(rewards, lengths, group_offsets, singleton), lengths)


def dr_grpo(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """Dr. GRPO (arXiv 2503.20783): A_i = r_i - mean_j r_j, GRPO without its division by the
    standard deviation. The paper's loss is seq-mean-token-sum-norm."""
    advantages = weighted_baseline(rewards, torch.ones_like(lengths), group_offsets, singleton)
    return _zero_without_tokens(advantages, lengths, group_offsets)


def grpo(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """GRPO (arXiv 2402.03300): A_i = (r_i - mean_j r_j) / (std_j r_j + 1e-6), where the standard
    deviation is that of a sample (divided by n - 1). A group of one is not scaled."""
    advantages = dr_grpo(rewards, lengths, group_offsets, singleton)
    sizes = group_sizes(group_offsets)
    variance = group_sum(advantages.square(), group_offsets) / (sizes - 1)
    return torch.where(sizes > 1, advantages / (variance.sqrt() + GRPO_EPSILON), advantages)


def rloo(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """REINFORCE leave-one-out (arXiv 2402.14740): A_i = r_i minus the mean reward of the others,
    which is n / (n - 1) times r_i - mean_j r_j in a group of n."""
    advantages = dr_grpo(rewards, lengths, group_offsets, singleton)
    sizes = group_sizes(group_offsets)
    return torch.where(sizes > 1, advantages * (sizes / (sizes - 1)), advantages)


def reinforce_plus_plus(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """REINFORCE++ (arXiv 2501.03262) without its KL term: rewards whitened over the batch's tokens.

    A_i = (r_i - m) / sqrt(v + 1e-8) with mean m and unbiased variance v of the reward over all
    tokens that carry loss. m is the length-weighted mean, so this is opo_batch over its standard
    deviation.
    """
    return _over_token_std(opo_batch(rewards, lengths, group_offsets, singleton), lengths)


def reinforce_plus_plus_baseline(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
) -> torch.Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262): r_i - mean_j r_j over the group, then whitened over
    the batch's tokens as in `reinforce_plus_plus`. The mean over tokens that whitening subtracts
    moves groups of equal rewards off 0 a little."""
    centred = dr_grpo(rewards, lengths, group_offsets, singleton)
    return reinforce_plus_plus(centred, lengths, group_offsets)


def remax(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
    *,
    greedy_rewards: torch.Tensor,
) -> torch.Tensor:
    """ReMax (arXiv 2310.10505): A_i = r_i minus the reward of the greedy response to the prompt.

    Args:
        greedy_rewards: [K], NaN where the greedy response has none.
    """
    rewards = rewards.double()
    baseline = torch.repeat_interleave(greedy_rewards.double(), group_offsets.diff())
    advantages = _settle_alone(rewards - baseline, rewards, baseline.isnan(), singleton)
    return _zero_without_tokens(advantages, lengths, group_offsets)


def token_energies(logprobs: torch.Tensor, sum_squared_probs: torch.Tensor) -> torch.Tensor:
    """|d log p(token) / d logits|^2 = 1 - 2 p + sum_v p_v^2 of each token, in float64.

    Args:
        logprobs, sum_squared_probs: of one distribution, that of the sampling temperature.
    """
    probs = logprobs.double().exp()
    # 1 - 2 p + p^2 from expm1, which keeps its digits where p is close to 1.
    others = (sum_squared_probs.double() - probs.square()).clamp(min=0)
    return logprobs.double().expm1().square() + others


def opo_energy(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
    *,
    energies: torch.Tensor,
) -> torch.Tensor:
    """OPO with the measured energy of a response's gradient instead of its length.

    A_i = r_i - sum_j W_j r_j / sum_j W_j, where W_j sums the `token_energies` of response j: the
    exact squared norm of its gradient by the logits. OPO assumes that it is the same for every
    token, and is this with W_j = l_j. The sequence-level form of `otb`.

    Args:
        energies: [T] of all loss tokens, sequence by sequence.
    """
    sums = torch.segment_reduce(energies.double(), "sum", lengths=lengths, unsafe=True)
    return weighted_baseline(rewards, sums, group_offsets, singleton)


def otb(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    group_offsets: torch.Tensor,
    singleton: Singleton = "zero",
    *,
    energies: torch.Tensor,
) -> torch.Tensor:
    """Optimal token baseline (arXiv 2602.07078): a baseline for each position in the response.

    A_i,t = r_i - sum_j W_j,t r_j / sum_j W_j,t with j over the responses of the group that have a
    token t, where W_j,t sums the `token_energies` of response j up to and with t. The paper's code
    gives the tail of the longest response a baseline of 0; here that is `singleton` "raw". Where
    all W_j,t are 0, so are the gradients, and the advantage.

    Args:
        energies: [T] of all loss tokens, sequence by sequence.

    Returns:
        [T] float64, of each loss token.
    """
    rewards, energies = rewards.double(), energies.double()
    starts = lengths.cumsum(0) - lengths
    sequence = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=lengths.device), lengths
    )
    position = torch.arange(energies.numel(), device=lengths.device) - starts[sequence]
    so_far = torch.cat([part.cumsum(0) for part in energies.split(lengths.tolist())])
    # A slot stands for one position in one group.
    group_of = torch.repeat_interleave(
        torch.arange(group_offsets.numel() - 1, device=lengths.device), group_offsets.diff()
    )
    longest = lengths.new_zeros(group_offsets.numel() - 1)
    longest.scatter_reduce_(0, group_of, lengths, "amax")
    slot = (longest.cumsum(0) - longest)[group_of[sequence]] + position

    def slot_sum(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(int(longest.sum())).index_add_(0, slot, values)[slot]

    relative = _relative(rewards, group_offsets)[sequence]
    total = slot_sum(so_far)
    baseline = slot_sum(so_far * relative) / total
    alone = slot_sum(torch.ones_like(slot)) == 1
    advantages = _settle_alone(relative - baseline, rewards[sequence], alone, singleton)
    return torch.where(total > 0, advantages, 0)


def _relative(rewards: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """To the group's first reward, so that equal rewards cancel without rounding."""
    first = torch.repeat_interleave(group_offsets[:-1], group_offsets.diff())
    return rewards - rewards[first]


def _settle_alone(
    advantages: torch.Tensor, rewards: torch.Tensor, alone: torch.Tensor, singleton: Singleton
) -> torch.Tensor:
    return torch.where(alone, rewards if singleton == "raw" else 0.0, advantages)


def _zero_without_tokens(
    advantages: torch.Tensor, lengths: torch.Tensor, group_offsets: torch.Tensor
) -> torch.Tensor:
    return torch.where(group_sum(lengths, group_offsets) > 0, advantages, 0)


def _over_token_std(advantages: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Divided by their standard deviation over tokens, for a mean over tokens of 0."""
    squares = (lengths * advantages.square()).sum()
    variance = squares / (lengths.sum() - 1).clamp(min=1)
    return advantages / (variance + WHITENING_EPSILON).sqrt()
