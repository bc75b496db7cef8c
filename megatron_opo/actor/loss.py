"""Loss aggregation: how much each token counts, with denominators over the whole rollout.

The weights are computed once, on the whole batch, before it is split over ranks and micro-batches;
so no split, order or packing can change the loss. The loss itself is
-sum_t weight_t * advantage_t * ratio_t, whose importance ratio is exactly 1 on-policy.
"""

import torch

from megatron_opo.batch import PackedBatch


def token_weights(batch: PackedBatch, aggregation: str, horizon: int) -> torch.Tensor:
    """[T] float32, 0 outside the loss mask.

    With N sequences and l_i loss tokens in sequence i:

    - token-mean: 1 / sum_i l_i (DAPO, arXiv 2503.14476)
    - seq-mean-token-sum: 1 / N
    - seq-mean-token-mean: 1 / (N l_i) (GRPO, arXiv 2402.03300)
    - seq-mean-token-sum-norm: 1 / (N horizon), a constant horizon (Dr. GRPO, arXiv 2503.20783)
    """
    lengths = batch.response_lengths.double()
    num_sequences = batch.num_sequences
    if aggregation == "token-mean":
        per_sequence = torch.full_like(lengths, 1 / max(lengths.sum().item(), 1))
    elif aggregation == "seq-mean-token-sum":
        per_sequence = torch.full_like(lengths, 1 / num_sequences)
    elif aggregation == "seq-mean-token-mean":
        per_sequence = 1 / (num_sequences * lengths.clamp(min=1))
    elif aggregation == "seq-mean-token-sum-norm":
        per_sequence = torch.full_like(lengths, 1 / (num_sequences * horizon))
    else:
        raise ValueError(f"unknown loss aggregation {aggregation!r}")
    per_token = torch.repeat_interleave(per_sequence, batch.sequence_lengths)
    return torch.where(batch.loss_mask, per_token, 0).float()


def policy_gradient_loss(
    logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """This micro-batch's share of the loss; all inputs [T]. Shares add up to the whole."""
    ratio = torch.exp(logprobs - logprobs.detach())
    return -(weights * advantages * ratio).sum()
