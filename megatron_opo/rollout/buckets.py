"""Weights on their way out: checked, cast, and grouped into messages."""

from collections.abc import Iterator
from dataclasses import dataclass

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
            if not torch.isfinite(tensor).all():
                raise WeightError(
                    f"{name}: holds values that are not finite; the last optimizer step broke it, "
                    "so nothing may be sampled from it. Lower optimizer.lr or resume earlier"
                )
            tensor = tensor.to(dtype)
        yield name, tensor.to(device).contiguous()
    if not seen:
        raise WeightError("no weights were exported, so there is nothing to send to the servers")


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
