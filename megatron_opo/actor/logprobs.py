"""Token logprobs, entropy and sum of squared probabilities from hidden states.

The logits of all tokens never exist together: they are made chunk by chunk, in the forward pass and
again in the backward pass, each tensor-parallel rank holding its slice of the vocabulary.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist


class TokenLogprobs(NamedTuple):
    """Each [T], float32. Only `logprobs` carries a gradient."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    sum_squared_probs: torch.Tensor


class _ChunkedLinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_size, group, chunk_tokens, whole):
        tp_rank, parallel = _rank_of(group)
        first_id = tp_rank * weight.shape[0]
        num_tokens = hidden.shape[0]
        logprobs, entropy, squares, lse = (
            torch.empty(num_tokens, dtype=torch.float32, device=hidden.device) for _ in range(4)
        )
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _logits(hidden[chunk], weight, temperature, first_id, vocab_size)
            if whole:
                found = _of_whole_rows(logits, group if parallel else None, vocab_size)
                logprobs[chunk] = found.gather(-1, targets[chunk, None]).squeeze(-1)
                del found
            local, owned = _local_targets(targets[chunk], first_id, weight.shape[0])
            peak, sums = _reduce_logits(logits, local, owned, group if parallel else None)
            # Or it would live beside the next chunk's.
            del logits
            total, weighted, squared, target_logit = sums
            log_total = total.log()
            if not whole:
                logprobs[chunk] = target_logit - log_total
            entropy[chunk] = log_total - weighted / total
            squares[chunk] = squared / total.square()
            lse[chunk] = peak + log_total
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.settings = (temperature, vocab_size, group, chunk_tokens)
        ctx.mark_non_differentiable(entropy, squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx, grad_logprobs, _grad_entropy, _grad_squares):
        hidden, weight, targets, lse = ctx.saved_tensors
        temperature, vocab_size, group, chunk_tokens = ctx.settings
        tp_rank, parallel = _rank_of(group)
        first_id = tp_rank * weight.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _logits(hidden[chunk], weight, temperature, first_id, vocab_size)
            grad = logits.sub_(lse[chunk, None]).exp_()
            grad *= -grad_logprobs[chunk, None]
            local, owned = _local_targets(targets[chunk], first_id, weight.shape[0])
            grad.scatter_add_(-1, local[:, None], (grad_logprobs[chunk] * owned)[:, None])
            grad = grad.div_(temperature).to(weight.dtype)
            del logits
            grad_hidden[chunk] = grad @ weight
            grad_weight += grad.t() @ hidden[chunk]
            del grad
        if parallel:
            dist.all_reduce(grad_hidden, group=group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _rank_of(group) -> tuple[int, bool]:
    if group is None or group.size() == 1:
        return 0, False
    return group.rank(), True


def _of_whole_rows(logits, group, vocab_size):
    """log_softmax [chunk, V], computed as a server does: by torch, over all of the vocabulary."""
    if group is not None:
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits, group=group)
        logits = torch.cat(parts, -1)
    return torch.log_softmax(logits[:, :vocab_size], -1)


def _reduce_logits(logits, local, owned, group):
    """The largest logit [chunk] and, relative to it, four sums [4, chunk] over the vocabulary: of
    exp(l), l exp(l), exp(l)^2, and the target's l. Overwrites the logits."""
    peak = logits.max(dim=-1).values
    if group is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    logits -= peak[:, None]
    target_logit = logits.gather(-1, local[:, None]).squeeze(-1) * owned
    exp = logits.exp()
    total = exp.sum(-1)
    weighted = logits.mul_(exp).sum(-1)
    sums = torch.stack([total, weighted, exp.square_().sum(-1), target_logit])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return peak, sums


def _logits(hidden, weight, temperature, first_id, vocab_size):
    """[chunk, V/tp] in float32; rows that pad the vocabulary get no probability."""
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits /= temperature
    real = vocab_size - first_id
    if real < weight.shape[0]:
        logits[:, max(real, 0) :] = torch.finfo(torch.float32).min
    return logits


def _local_targets(targets, first_id, num_rows):
    local = targets - first_id
    owned = (local >= 0) & (local < num_rows)
    return local.clamp(0, num_rows - 1), owned


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
    whole: bool = False,
) -> TokenLogprobs:
    """log softmax(hidden @ weight^T / temperature) at `targets`, with the entropy
    -sum_v p_v log p_v and sum_v p_v^2 of the same distribution.

    Args:
        hidden: [T, H], equal on all ranks of `group`.
        weight: [V_padded / tp, H], this rank's rows of the output layer.
        targets: [T] token ids.
        temperature: the sampling temperature, > 0.
        vocab_size: V; rows at or past it are padding.
        chunk_tokens: tokens whose logits exist at once.
        group: the tensor-parallel group, or None.
        whole: each rank computes the softmax over the whole vocabulary, in the order in which a
            server does.

    The gradient of `hidden` is summed over `group`.
    """
    return TokenLogprobs(
        *_ChunkedLinearLogprobs.apply(
            hidden, weight, targets, temperature, vocab_size, group, chunk_tokens, whole
        )
    )
