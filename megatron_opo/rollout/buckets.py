"""Weights on their way out: checked, cast, and grouped into messages."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from megatron_opo.errors import WeightError

Weights = Iterator[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]


@dataclass
class Progress:
    """What an update has sent so far."""

    bytes: int = 0
    tensors: int = 0

    def count(self, tensor: torch.Tensor) -> None:
        self.bytes += tensor.nbytes
        self.tensors += 1


def sendable(weights: Weights, dtype: torch.dtype, device: str) -> Weights:
    """Every tensor on `device`, contiguous, and if it is floating-point, in `dtype`, the one that
    the servers compute in.

    Raises:
        WeightError: a tensor that is not finite, a name that comes twice, or no tensor at all.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise WeightError(f"{name}: exported twice; each weight must be sent once")
        seen.add(name)
        tensor = tensor.detach()
        if tensor.is_floating_point():
            if not _is_finite(tensor):
                raise WeightError(
                    f"{name}: holds values that are not finite; the last optimizer step broke it, "
                    "so nothing may be sampled from it. Lower optimizer.lr or resume earlier"
                )
            tensor = tensor.to(dtype)
        yield name, tensor.to(device).contiguous()
    if not seen:
        raise WeightError("no weights were exported, so there is nothing to send to the servers")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Reads it once, and writes nothing: isfinite would write as many truth values."""
    # A sum is made faster than the ends are found; of finite values it may overflow.
    return not tensor.numel() or bool(
        tensor.sum().isfinite() or torch.stack(tensor.aminmax()).isfinite().all()
    )


def buckets(weights: Weights, limit_bytes: int) -> Iterator[Bucket]:
    """Group the weights into lists of up to `limit_bytes`, or of one larger tensor."""
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


@dataclass(frozen=True)
class Entry:
    """One weight in a buffer: bytes `start` to `end`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Message:
    """Weights that lie in one buffer; `data` [bytes] uint8 from its start to the last one's end."""

    entries: list[Entry]
    data: torch.Tensor


def messages(
    weights: Weights,
    buffers: Sequence[torch.Tensor],
    *,
    alignment: int,
    larger_alone: bool = False,
) -> Generator[Message, None, None]:
    """Copy weights into the buffers in turn, into each as many as fit.

    Whoever asks for a message has sent all that were given out but the last one: while that is
    sent, another buffer is filled. A message may be empty, where that is what has to be waited for.
    The same names, dtypes and shapes are split alike, whatever the device.

    Args:
        buffers: two, each [capacity] uint8, the largest one first.
        alignment: bytes; each weight begins at a multiple of it. With 1 they lie without gaps.
        larger_alone: a tensor larger than a buffer is a message of its own, where it lies.

    Raises:
        WeightError: without `larger_alone`, a tensor is larger than the buffers.
    """
    turns = cycle(buffers)
    buffer, largest = next(turns), buffers[0].numel()
    entries: list[Entry] = []
    end = 0
    for name, tensor in weights:
        start = -(-end // alignment) * alignment
        # What receives them views them where they lie, so a wider dtype may need a new beginning.
        if entries and (
            start + tensor.nbytes > buffer.numel() or start % tensor.element_size() != 0
        ):
            yield Message(entries, buffer[:end])
            entries, start, buffer = [], 0, next(turns)
        if tensor.nbytes > largest:
            if not larger_alone:
                raise WeightError(
                    f"{name}: has {tensor.nbytes} bytes, but the buffer for the servers only "
                    f"{largest}; raise sync.bucket_mb"
                )
            entry = Entry(name, tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes)
            yield Message([entry], tensor.contiguous().view(-1).view(torch.uint8))
            end = 0
            continue
        if tensor.nbytes > buffer.numel():
            yield Message([], buffer[:0])
            buffer = next(turns)
        end = start + tensor.nbytes
        buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), start, end))
    if entries:
        yield Message(entries, buffer[:end])
