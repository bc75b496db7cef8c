"""Keys and values for the queries of a context-parallel rank.

The ranks gather keys and values of all tokens, which with grouped queries are a fraction of the
rest. A rank's chunk of queries then attends to all of its sequence up to its own end: to the chunk
itself and what stands before it, causally.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_opo.actor.packing import Bounds, Sharing, ranges, rows_of


@dataclass(frozen=True)
class Chunks:
    """A rank's chunks of queries, two of each sequence, as sequences of their own, and their keys:
    each has all of its sequence up to its own end.

    `source` [K] are the rows of the gathered keys [T] that they are copied from. A key goes to at
    most two chunks: `copies` [2, T] are its places there, K where there is none.
    """

    queries: Bounds
    keys: Bounds
    source: torch.Tensor
    copies: torch.Tensor


def gather_keys(
    key: torch.Tensor, value: torch.Tensor, bounds: Bounds, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, Bounds, Bounds]:
    """Keys and values of this rank's chunks, and the bounds of their queries and of themselves.

    Args:
        key, value: [T / cp, kv_heads, D], this rank's.
        bounds: of the whole sequences, with the T tokens of all ranks.
        group: context-parallel; all of its ranks call this together, in the backward pass too.
    """
    lengths = tuple(bounds.cu_seqlens.diff().tolist())
    chunks = chunks_of(lengths, group.rank(), group.size(), key.device)
    both = torch.cat([key, value], dim=-1)
    both = gather_from_sequence_parallel_region(both, group=group)
    both = _Copy.apply(both, chunks.source, chunks.copies)
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    return key, value, chunks.queries, chunks.keys


@lru_cache(maxsize=16)
def chunks_of(lengths: tuple[int, ...], rank: int, size: int, device: torch.device) -> Chunks:
    """Cached because every layer of a micro-batch, forward and backward, asks for the same ones.

    Args:
        lengths: of the whole sequences, multiples of 2 * size.
    """
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    total = int(cu_seqlens[-1])
    parts = [rows_of(cu_seqlens, Sharing(each, size)) for each in range(size)]
    gathered = torch.empty(total, dtype=torch.int64)
    gathered[torch.cat(parts)] = torch.arange(total)
    chunk = cu_seqlens.diff() // (2 * size)
    # By sequence: the first chunk and the second one, as they stand in the rank's part.
    seen = torch.stack([(rank + 1) * chunk, (2 * size - rank) * chunk], 1).flatten()
    source = gathered[ranges(cu_seqlens[:-1].repeat_interleave(2), seen)]
    is_second = (torch.arange(len(seen)) % 2).repeat_interleave(seen)
    copies = torch.full((2, total), len(source))
    copies[is_second, source] = torch.arange(len(source))
    return Chunks(
        _bounds(chunk.repeat_interleave(2), device),
        _bounds(seen, device),
        source.to(device),
        copies.to(device),
    )


def _bounds(lengths: torch.Tensor, device: torch.device) -> Bounds:
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Bounds(cu_seqlens.to(device, torch.int32), int(lengths.max()))


class _Copy(torch.autograd.Function):
    """[T, ...] to [K, ...]. Gathers both ways, which, unlike autograd's scatter, always add up in
    the same order."""

    @staticmethod
    def forward(ctx, rows, source, copies):
        ctx.save_for_backward(copies)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        (copies,) = ctx.saved_tensors
        grad = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        return grad.index_select(0, copies[0]) + grad.index_select(0, copies[1]), None, None
