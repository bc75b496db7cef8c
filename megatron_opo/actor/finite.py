"""Which numbers of an update are not finite, in words."""

from collections.abc import Iterable, Iterator

import torch

from megatron_opo.batch import PackedBatch

SHOWN = 3


def nonfinite_logprobs(batch: PackedBatch, logprobs: torch.Tensor) -> str:
    """Where the `logprobs` [T] of loss tokens are not finite; "" when none is."""
    found = (batch.loss_mask & ~torch.isfinite(logprobs)).nonzero().squeeze(-1)
    if not len(found):
        return ""
    sequences = torch.searchsorted(batch.cu_seqlens, found, right=True) - 1
    samples = batch.sample_ids[sequences.unique()]
    first, sequence = int(found[0]), int(sequences[0])
    return (
        f"the logprobs of {len(found)} of {int(batch.loss_mask.sum())} tokens are not finite, in "
        f"{len(samples)} of {batch.num_sequences} samples (first: sample {int(samples[0])}, "
        f"position {first - int(batch.cu_seqlens[sequence])}, token {int(batch.tokens[first])}: "
        f"{float(logprobs[first])})"
    )


def nonfinite_names(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Names of the tensors that hold a NaN or an infinity, the first ones; "" when none does. One
    pass over each, no copy."""
    pairs = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not pairs:
        return ""
    extremes = torch.stack([torch.stack(tensor.aminmax()).float() for _, tensor in pairs])
    is_bad = (~torch.isfinite(extremes)).any(dim=1).tolist()
    names = [name for (name, _), bad in zip(pairs, is_bad, strict=True) if bad]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def weights(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of the model's chunks on this rank."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield name, parameter.detach()


def gradients(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Their gradients as Megatron has summed them up. Where the optimizer is sharded, those parts
    that belong to another rank's shard are this rank's summand."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]


def by_rank(reports: list[str]) -> str:
    """What the ranks say, those that say something: "rank 1: a; rank 3: b"."""
    said = [f"rank {rank}: {text}" for rank, text in enumerate(reports) if text]
    more = f"; and {len(said) - SHOWN} more ranks" if len(said) > SHOWN else ""
    return "; ".join(said[:SHOWN]) + more
