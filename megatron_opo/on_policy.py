"""Do the servers that sample and the actor that trains hold the same policy?

Both give a logprob to every sampled token. On-policy they differ by rounding only; a larger gap
means another temperature, stale weights, or a wrong weight map, and training on it would train on
noise.
"""

import torch

from megatron_opo.batch import PackedBatch
from megatron_opo.errors import OnPolicyError


def kl_estimate(difference: torch.Tensor) -> float:
    """The mean of exp(d) - 1 - d over sampled tokens, with d [N] = logp_other - logp_sampling: an
    unbiased estimate of KL(sampling || other) that is never negative (k3,
    http://joschu.net/blog/kl-approx.html)."""
    difference = difference.double()
    return (difference.expm1() - difference).mean().item()


def effective_share(weights: torch.Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of weights [n] that are not negative: the effective sample size of n
    samples that are weighed by them, as a share of n. 1 where all are equal, 0 where all are 0."""
    weights = weights.double()
    squares = weights.square().sum()
    if squares == 0:
        return 0.0
    return (weights.sum().square() / (weights.numel() * squares)).item()


def agreement_metrics(batch: PackedBatch, logprobs: torch.Tensor) -> dict[str, float]:
    """Gap between the actor's `logprobs` [T] and the servers' over the loss tokens.

    `on_policy/kl` estimates KL(server || actor), see `kl_estimate`. `on_policy/ess_tokens` and
    `ess_sequences` are `effective_share` of the ratios actor / server of tokens and of whole
    responses: what would be left of the samples if these weighed them.
    """
    difference = (logprobs - batch.rollout_logprobs)[batch.loss_mask].double()
    gap = difference.abs()
    lengths = batch.response_lengths
    of_sequences = torch.zeros(lengths.numel(), dtype=torch.float64)
    of_sequences.index_add_(0, batch.loss_sequences, difference)
    return {
        "on_policy/logprob_gap_mean": gap.mean().item(),
        "on_policy/logprob_gap_max": gap.max().item(),
        "on_policy/equal_tokens": (gap == 0).double().mean().item(),
        "on_policy/kl": kl_estimate(difference),
        "on_policy/ess_tokens": effective_share(_relative_ratios(difference)),
        "on_policy/ess_sequences": effective_share(_relative_ratios(of_sequences[lengths > 0])),
    }


def _relative_ratios(differences: torch.Tensor) -> torch.Tensor:
    """exp of them up to a common factor, so that none is too large."""
    return (differences - differences.max()).exp()


def check_agreement(
    batch: PackedBatch, logprobs: torch.Tensor, *, max_gap: float, mean_gap: float
) -> dict[str, float]:
    """Return `agreement_metrics`, or stop.

    Raises:
        OnPolicyError: a gap is past its bound or not a number; lists the tokens that differ most.
    """
    metrics = agreement_metrics(batch, logprobs)
    problem = disagreement(metrics, max_gap=max_gap, mean_gap=mean_gap)
    if not problem:
        return metrics
    lines = [_describe(batch, logprobs, place) for place in worst_tokens(batch, logprobs)]
    raise OnPolicyError(
        "\n".join([f"{problem} The worst tokens:", *lines])
        + "\nLikely causes: another temperature on one side, stale weights on a server, a weight "
        "map that does not fit the model, or a dtype that is too coarse"
    )


def disagreement(metrics: dict[str, float], *, max_gap: float, mean_gap: float) -> str:
    """What is past its bound in `agreement_metrics`; "" if nothing is."""
    largest, mean = metrics["on_policy/logprob_gap_max"], metrics["on_policy/logprob_gap_mean"]
    if largest <= max_gap and mean <= mean_gap:
        return ""
    return (
        f"the actor and the rollout servers disagree on the sampled tokens: gap mean {mean:.3g} "
        f"(allowed algorithm.mean_logprob_gap {mean_gap:g}), max {largest:.3g} (allowed "
        f"algorithm.max_logprob_gap {max_gap:g}) nats. No update was made."
    )


def worst_tokens(batch: PackedBatch, logprobs: torch.Tensor, count: int = 5) -> list[int]:
    """Places in the batch of the loss tokens that differ most; what is no number comes first."""
    gap = (logprobs - batch.rollout_logprobs).abs().nan_to_num(nan=torch.inf)
    gap = torch.where(batch.loss_mask, gap, -1.0)
    return gap.topk(min(count, int(batch.loss_mask.sum()))).indices.tolist()


def _describe(batch: PackedBatch, logprobs: torch.Tensor, place: int) -> str:
    sequence = int(torch.searchsorted(batch.cu_seqlens, place, right=True)) - 1
    return (
        f"  sample {int(batch.sample_ids[sequence])}, position "
        f"{place - int(batch.cu_seqlens[sequence])}, token {int(batch.tokens[place])}: actor "
        f"{logprobs[place]:.5f}, server {batch.rollout_logprobs[place]:.5f}"
    )
