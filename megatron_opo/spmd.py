"""One program on many ranks: rank 0 drives (prompts, servers, rewards), all ranks train.

`Driver.run` is how a driver-only stage stands in the common program: when it fails on rank 0, every
rank learns it at that point instead of hanging in the next collective.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_opo.errors import OpoError
from megatron_opo.spans import Spans

T = TypeVar("T")

_DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bool)
_MAX_DIMS = 4


class DriverFailed(OpoError):
    """Raised on the other ranks when rank 0 failed; rank 0 raises the error itself."""


class Driver:
    """Runs stages on rank 0 of `group` (a gloo group over all ranks).

    `spans` is where the time of this rank goes.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup):
        self.rank = rank
        self.group = group
        self.spans = Spans()

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
            with self.spans.of("tell"):
                self._announce("")
            return result
        if meanwhile is not None:
            meanwhile()
        with self.spans.of("wait"):
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
        mine, sizes = self._padded(text)
        if not mine.numel():
            return [""] * len(sizes)
        texts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(texts, mine, group=self.group)
        return _decoded(texts, sizes)

    def hear(self, text: str) -> list[str]:
        """Each rank's text, by rank, on rank 0; nothing elsewhere."""
        mine, sizes = self._padded(text)
        texts = [torch.empty_like(mine) for _ in sizes] if self.is_here else []
        if mine.numel():
            dist.gather(mine, texts or None, dst=0, group=self.group)
        return _decoded(texts, sizes) if self.is_here else []

    def _padded(self, text: str) -> tuple[torch.Tensor, list[int]]:
        """This rank's bytes, as many as the longest text has, and how many are each rank's."""
        encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else None
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.group.size())]
        size = torch.tensor([0 if encoded is None else encoded.numel()])
        dist.all_gather(sizes, size, group=self.group)
        mine = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        if encoded is not None:
            mine[: encoded.numel()] = encoded
        return mine, [int(size) for size in sizes]

    def agree(self, fact: bool) -> bool:
        """What rank 0 says, on every rank."""
        return bool(self.share([torch.tensor(fact)])[0])

    def share(self, tensors: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Rank 0's CPU tensors, on every rank."""
        with self.spans.of("share"):
            return self._share(tensors)

    def _share(self, tensors: list[torch.Tensor] | None) -> list[torch.Tensor]:
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


def _decoded(texts: list[torch.Tensor], sizes: list[int]) -> list[str]:
    return [text[:size].numpy().tobytes().decode() for text, size in zip(texts, sizes, strict=True)]
