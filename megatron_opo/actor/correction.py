"""Importance weights for tokens that the servers sampled with another probability than the
trainer's (`algorithm.correction`).

With d_t = log pi_trainer(y_t) - log pi_server(y_t) of each token that the policy sampled, the ratio
r_t is, by level,

- token: exp(d_t);
- sequence: exp(sum of d over the response), the same for each of its tokens;
- geometric: exp(mean of d over the response), the same for each of its tokens;

and the weight w_t, which is a constant in the gradient, by kind,

- truncate: min(r_t, upper), truncated importance sampling (Ionides, JCGS 2008; TIS of a token: Yao
  et al., https://fengyao.notion.site/off-policy-rl);
- mask: r_t where lower <= r_t <= upper, else 0 (of a token IcePop, arXiv 2510.18855; of a sequence,
  plain or geometric, MIS: Liu et al., https://richardli.xyz/rl-collapse).

The update is made from one forward pass, whose logprobs give the weights. Ratios are float64, so
that a layout's order of additions decides about no bound.
"""

import torch
import torch.distributed as dist

from megatron_opo.batch import PackedBatch
from megatron_opo.on_policy import effective_share
from megatron_opo.recipe import CorrectionConfig


def importance_weights(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    settings: CorrectionConfig,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """[L], in the dtype of `logprobs` and without a gradient.

    Args:
        logprobs, rollout_logprobs: [L] of the tokens that carry loss, the trainer's and the
            servers'.
        sequences: [L] which of the `num_sequences` each token belongs to.
        settings: with another kind than none.
        group: ranks that share the tokens of these sequences, or None. With a level other than
            token they all call this together, also those without a token.
    """
    ratios = _ratios(
        logprobs.detach(), rollout_logprobs, sequences, num_sequences, settings.level, group
    )
    return _bounded(ratios, settings).to(logprobs.dtype)


def whole_weights(
    batch: PackedBatch, logprobs: torch.Tensor, settings: CorrectionConfig
) -> torch.Tensor:
    """[T] float64 weights of a whole rollout, 0 outside the loss mask."""
    weights = torch.zeros(batch.tokens.numel(), dtype=torch.float64)
    weights[batch.loss_mask] = _bounded(_whole_ratios(batch, logprobs, settings), settings)
    return weights


def correction_metrics(
    batch: PackedBatch, logprobs: torch.Tensor, settings: CorrectionConfig
) -> dict[str, float]:
    """Of a whole rollout, over the tokens that carry loss; `logprobs` [T] are the trainer's.

    Mean and largest weight; the share of tokens whose weight was truncated or masked; the effective
    sample size, as a share, over tokens and over sequences, each of which counts as the mean of its
    tokens' weights.
    """
    ratios = _whole_ratios(batch, logprobs, settings)
    weights = _bounded(ratios, settings)
    changed = ratios > settings.upper
    name = "truncated"
    if settings.kind == "mask":
        changed = ~_inside(ratios, settings)
        name = "masked"
    lengths = batch.response_lengths
    per_sequence = _sums(weights, batch.loss_sequences, batch.num_sequences)[lengths > 0]
    return {
        "on_policy/is_weight_mean": weights.mean().item(),
        "on_policy/is_weight_max": weights.max().item(),
        f"on_policy/is_{name}_share": changed.double().mean().item(),
        "on_policy/is_ess_tokens": effective_share(weights),
        "on_policy/is_ess_sequences": effective_share(per_sequence / lengths[lengths > 0]),
    }


def _whole_ratios(
    batch: PackedBatch, logprobs: torch.Tensor, settings: CorrectionConfig
) -> torch.Tensor:
    mask = batch.loss_mask
    return _ratios(
        logprobs[mask],
        batch.rollout_logprobs[mask],
        batch.loss_sequences,
        batch.num_sequences,
        settings.level,
    )


def _ratios(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    level: str,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """[L] float64; infinity where it is past what float64 holds."""
    difference = logprobs.double() - rollout_logprobs.double()
    if level == "token":
        return difference.exp()
    sums = torch.stack(
        [
            _sums(values, sequences, num_sequences)
            for values in (difference, torch.ones_like(difference))
        ]
    )
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    total, tokens = sums
    if level == "geometric":
        total = total / tokens.clamp(min=1)
    return total.exp()[sequences]


def _sums(values: torch.Tensor, sequences: torch.Tensor, num_sequences: int) -> torch.Tensor:
    return values.new_zeros(num_sequences).index_add_(0, sequences, values)


def _inside(ratios: torch.Tensor, settings: CorrectionConfig) -> torch.Tensor:
    return (ratios >= settings.lowest) & (ratios <= settings.upper)


def _bounded(ratios: torch.Tensor, settings: CorrectionConfig) -> torch.Tensor:
    if settings.kind == "truncate":
        return ratios.clamp(max=settings.upper)
    return torch.where(_inside(ratios, settings), ratios, 0.0)
