"""One program on many ranks: rank 0 drives (prompts, servers, rewards), all ranks train.

`Driver.run` is how a driver-only stage stands in the common program: when it fails on rank 0, every
rank learns it at that point instead of hanging in the next collective.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_opo.errors import OpoError

T = TypeVar("T")

_DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bool)
_MAX_DIMS = 4


class DriverFailed(OpoError):
    """Raised on the other ranks when rank 0 failed; rank 0 raises the error itself."""


class Driver:
    """Runs stages on rank 0 of `group` (a gloo group over all ranks)."""

    def __init__(self, rank: int, group: dist.ProcessGroup):
        self.rank = rank
        self.group = group

    @property
    def is_here(self) -> bool:
        return self.rank == 0

    def run(self, stage: Callable[[], T], meanwhile: Callable[[], object] | None = None) -> T:
        """The stage's result on rank 0. Other ranks run `meanwhile` (their part of a collective
        stage), wait, and get None.

        Raises:
            DriverFailed: on the other ranks, when the stage raised on rank 0.
        """
        if self.is_here:
            try:
                result = stage()
            except BaseException as error:
                self._announce(f"{type(error).__name__}: {error}")
                raise
            self._announce("")
            return result
        if meanwhile is not None:
            meanwhile()
        failure = self._announce(None)
        if failure:
            raise DriverFailed(f"rank 0 failed: {failure}")
        return None  # pyright: ignore[reportReturnType]

    def _announce(self, failure: str | None) -> str:
        encoded = list((failure or "").encode()[:4096])
        size = torch.tensor([len(encoded)])
        dist.broadcast(size, 0, group=self.group)
        if size.item() == 0:
            return ""
        text = torch.tensor(encoded if self.is_here else [0] * int(size), dtype=torch.uint8)
        dist.broadcast(text, 0, group=self.group)
        return bytes(text.tolist()).decode(errors="replace")

    def say(self, text: str) -> str:
        """Rank 0's text, on every rank; cut to 4096 bytes."""
        return self._announce(text if self.is_here else None)

    def gather(self, text: str) -> list[str]:
        """Each rank's text, by rank, on every rank."""
        encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.group.size())]
        dist.all_gather(sizes, torch.tensor([encoded.numel()]), group=self.group)
        longest = max(int(size) for size in sizes)
        if longest == 0:
            return [""] * len(sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: encoded.numel()] = encoded
        texts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(texts, mine, group=self.group)
        return [
            bytes(text[: int(size)].tolist()).decode()
            for text, size in zip(texts, sizes, strict=True)
        ]

    def agree(self, fact: bool) -> bool:
        """What rank 0 says, on every rank."""
        return bool(self.share([torch.tensor(fact)])[0])

    def share(self, tensors: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Rank 0's CPU tensors, on every rank."""
        tensors = tensors if self.is_here else []
        assert tensors is not None, "rank 0 has nothing to share"
        header = torch.tensor([len(tensors)])
        dist.broadcast(header, 0, group=self.group)
        shapes = torch.full((int(header), 1 + _MAX_DIMS), -1, dtype=torch.int64)
        if self.is_here:
            for row, tensor in zip(shapes, tensors, strict=True):
                row[0] = _DTYPES.index(tensor.dtype)
                row[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape)
        dist.broadcast(shapes, 0, group=self.group)
        if not self.is_here:
            tensors = [
                torch.empty([n for n in row[1:] if n >= 0], dtype=_DTYPES[row[0]])
                for row in shapes.tolist()
            ]
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(tensor, 0, group=self.group)
        return tensors
