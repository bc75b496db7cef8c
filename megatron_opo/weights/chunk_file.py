"""Tensors in the files of a distributed checkpoint, each as torch.save wrote it, read in part.

torch.load copies a tensor whole, and several times, before a part can be taken of it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_opo.weights.checkpoint import read_box
from megatron_opo.weights.memory import allocate, is_shortage
from megatron_opo.weights.safetensors_layout import Entry


def read_chunk(
    path: Path, place: tuple[int, int], offsets: Sequence[int], target: torch.Tensor
) -> None:
    """Fill `target` from the box of its shape at `offsets` of the tensor that was saved into a file
    at `place` (offset, length).

    Raises:
        OSError: the file cannot be read.
        ValueError: there is another tensor there, or none, or a damaged one.
    """
    with open(path, "rb") as file:
        entry = _find(file, *place)
        ends = [offset + size for offset, size in zip(offsets, target.shape, strict=True)]
        if entry.dtype != target.dtype or not _is_inside(ends, entry.shape):
            raise ValueError(f"it holds {entry.dtype} {list(entry.shape)}")
        # Between the rows of a part of the columns lies what belongs to others.
        straight = target.is_contiguous()
        box = target if straight else allocate(target.shape, target.dtype)
        read_box(file.fileno(), entry, offsets, box)
        if not straight:
            target.copy_(box)


def _is_inside(ends: list[int], shape: tuple[int, ...]) -> bool:
    return len(ends) == len(shape) and all(a <= b for a, b in zip(ends, shape, strict=True))


def _find(file: Any, offset: int, length: int) -> Entry:
    # Under this mode torch.load reads a tensor's description and not its bytes.
    try:
        with FakeTensorMode():
            view: Any = _create_file_view(file, offset, length)
            tensor: Any = torch.load(view, map_location="cpu", weights_only=True)
    # Damaged data may fail in any way; what torch says of it is advice to run what is in the file.
    except Exception as error:
        if isinstance(error, OSError) or is_shortage(error):
            raise
        raise ValueError("what describes the tensor there is damaged") from error
    if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
        raise ValueError("it does not hold a contiguous tensor")
    storage: Any = tensor.untyped_storage()
    first = int(tensor.storage_offset()) * tensor.element_size()
    start = offset + int(storage._checkpoint_offset) + first
    end = start + tensor.numel() * tensor.element_size()
    if end > offset + length:
        raise ValueError(f"it ends at byte {offset + length}, before its tensor does")
    return Entry(tensor.dtype, tuple(tensor.shape), start, end)
