"""The safetensors file format: 8 bytes with the header's length, a JSON header, the tensors' bytes.

The safetensors library writes a file from tensors that are all in memory. With the layout known, a
tensor can be written at its place when it comes, and any part of one read without mapping the file.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_opo.errors import WeightError
from megatron_opo.weights.text import shown_name

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
# The library reads no longer header, and wants the tensors' bytes aligned to 8.
MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; `start` and `end` are its first byte and the one after its last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, Entry]]:
    """What a file with these tensors begins with, and where in it each one belongs, in order."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        described[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    begin = LENGTH_BYTES + len(text)
    entries = {}
    for name, (dtype, shape) in tensors.items():
        start, end = described[name]["data_offsets"]
        entries[name] = Entry(dtype, tuple(shape), begin + start, begin + end)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, entries


def read_layout(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by their order in it.

    Raises:
        WeightError: the file cannot be read, is no safetensors file or a damaged one, or a tensor
            is not of a dtype in DTYPES.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise ValueError(f"its {size} bytes cannot hold a header of {length}")
            described = json.loads(file.read(length).decode(), object_pairs_hook=_unique)
        if not isinstance(described, dict):
            raise ValueError("the header is not a mapping")
        _check_metadata(described.pop("__metadata__", None))
        begin = LENGTH_BYTES + length
        entries = {name: _entry(name, value, begin) for name, value in described.items()}
        return _contiguous(entries, begin, size)
    except _UnsupportedDtype as error:
        raise WeightError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightError(
            f"{path} is truncated or not a safetensors file: {error}; fetch it again"
        ) from error


class _UnsupportedDtype(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key of the header stands twice")
    return mapping


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError("__metadata__ is not a mapping of texts")


def _entry(name: str, described: Any, begin: int) -> Entry:
    name = shown_name(name)
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"`{name}` is not described by dtype, shape and data_offsets")
    shape, offsets = described["shape"], described["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"`{name}` has the shape {shape} at {offsets}")
    if not isinstance(described["dtype"], str):
        raise ValueError(f"`{name}` has the dtype {described['dtype']}")
    if described["dtype"] not in DTYPES:
        raise _UnsupportedDtype(
            f"`{name}` has dtype {described['dtype']}; allowed: {', '.join(DTYPES)} "
            "(quantised weights must be dequantised first)"
        )
    dtype = DTYPES[described["dtype"]]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"`{name}` of {described['dtype']} {shape} cannot fill bytes {offsets}")
    return Entry(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _contiguous(entries: dict[str, Entry], begin: int, size: int) -> dict[str, Entry]:
    """By their places, when these leave no gap, share no byte and end with the file."""
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    position = begin
    for name, entry in ordered.items():
        if entry.start != position:
            raise ValueError(
                f"`{shown_name(name)}` begins at byte {entry.start}, must begin at {position}"
            )
        position = entry.end
    if position != size:
        raise ValueError(f"it has {size} bytes, its header says {position}")
    return ordered
