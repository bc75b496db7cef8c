"""Sequences packed one after the other, and which of their tokens a context-parallel rank has."""

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_opo.batch import PackedBatch


@dataclass(frozen=True)
class Bounds:
    """Where packed sequences begin and end: `cu_seqlens` [N+1], from 0 to T. `longest` is the
    length of the longest one."""

    cu_seqlens: torch.Tensor
    longest: int


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one forward pass, of which a context-parallel rank computes a part.

    `tokens` [T / context_parallel] are this rank's; `cu_seqlens` [N+1] bounds the whole sequences,
    from 0 to T. The hidden states at `rows` [R] of its part predict the tokens `targets` [R], which
    it scores, and which stand at `places` [R] in the whole rollout and in `sequences` [R] of this
    micro-batch.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    sequences: torch.Tensor

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def packed_seq_params(self, device: torch.device) -> PackedSeqParams:
        cu_seqlens = self.cu_seqlens.to(device, torch.int32)
        longest = int(self.cu_seqlens.diff().max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


@dataclass(frozen=True)
class Sharing:
    """How ranks share the tokens of a micro-batch: this one is `rank` of `size` context-parallel
    ranks, each of whose parts `split` sequence-parallel ranks cut once more."""

    rank: int = 0
    size: int = 1
    split: int = 1

    @property
    def chunks(self) -> int:
        """Equal ones that each sequence is cut into."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def multiple(self) -> int:
        """What divides the tokens of a micro-batch."""
        return math.lcm(self.chunks, self.size * self.split)

    def padded(self, length: int) -> int:
        return -(-length // self.chunks) * self.chunks


def make_micro_batch(
    batch: PackedBatch, sequences: list[int], sharing: Sharing = Sharing()
) -> MicroBatch:
    """Pack the given sequences.

    Dummy tokens, never scored, stand at the end of each sequence that its ranks could not share
    evenly; and, as a sequence of their own, where a micro-batch is empty or its length not a
    multiple of what shares it.
    """
    bounds = batch.cu_seqlens.tolist()
    lengths = [bounds[i + 1] - bounds[i] for i in sequences]
    whole = [sharing.padded(length) for length in lengths]
    total = sum(whole)
    dummies = -total % sharing.multiple if whole else sharing.multiple
    if dummies:
        whole.append(dummies)
        total += dummies
    cu_seqlens = torch.tensor([0, *whole]).cumsum(0)
    # Of each row its place in the rollout; dummies have none.
    place = torch.full((total,), -1)
    for i, length, start in zip(sequences, lengths, cu_seqlens.tolist(), strict=False):
        place[start : start + length] = torch.arange(bounds[i], bounds[i + 1])
    is_real = place >= 0
    tokens = torch.where(is_real, batch.tokens[place].long(), 0)
    scored = (is_real & batch.loss_mask[place]).nonzero().squeeze(-1)
    part = rows_of(cu_seqlens, sharing)
    # Where each row stands in this rank's part.
    here = torch.full((total,), -1)
    here[part] = torch.arange(len(part))
    rows = here[scored - 1]
    is_here = rows >= 0
    return MicroBatch(
        tokens=tokens[part],
        cu_seqlens=cu_seqlens,
        rows=rows[is_here],
        targets=tokens[scored[is_here]],
        places=place[scored[is_here]],
        sequences=torch.searchsorted(cu_seqlens, scored[is_here], right=True) - 1,
    )


def rows_of(cu_seqlens: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """[T / size] rows of the packed sequences that a context-parallel rank has, in its order.

    Of the 2 * size chunks of each sequence rank r has the r-th and, as later tokens attend to more,
    the r-th from the end. This is Megatron's and Transformer Engine's order.
    """
    if sharing.size == 1:
        return torch.arange(int(cu_seqlens[-1]))
    chunk = cu_seqlens.diff() // sharing.chunks
    first = cu_seqlens[:-1] + sharing.rank * chunk
    second = cu_seqlens[1:] - (sharing.rank + 1) * chunk
    return ranges(torch.stack([first, second], 1).flatten(), chunk.repeat_interleave(2))


def ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """start, start + 1, ... of each length, one after the other."""
    before = lengths.cumsum(0) - lengths
    return (starts - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))
