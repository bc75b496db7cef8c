"""A Hugging Face weight directory: which file holds which tensor, checked before it is read."""

import itertools
import json
import math
import operator
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_opo.errors import WeightError
from megatron_opo.weights.memory import allocate
from megatron_opo.weights.safetensors_layout import Entry, read_layout
from megatron_opo.weights.text import shown_name, shown_problems

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """Open safetensors files. `tensors` maps a name to (file, shape), `entries` to its place in
    the file, `descriptors` a file to its open descriptor."""

    directory: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    entries: dict[str, Entry]
    descriptors: dict[str, int]

    def read(self, name: str, dim: int | None, start: int, end: int) -> torch.Tensor:
        """Rows (or columns) `start` to `end` of a tensor along `dim`; None reads it whole.

        As in a slice, bounds may pass the tensor's end. Only these bytes are read, into memory that
        nothing else holds; threads may read at once.

        Raises:
            WeightError: the file has become shorter, or cannot be read.
        """
        file, _ = self.tensors[name]
        entry = self.entries[name]
        first, last = [0] * len(entry.shape), list(entry.shape)
        if dim is not None:
            first[dim], last[dim], _ = slice(start, end).indices(entry.shape[dim])
        sizes = [max(0, b - a) for a, b in zip(first, last, strict=True)]
        tensor = allocate(sizes, entry.dtype)
        try:
            read_box(self.descriptors[file], entry, first, tensor)
        except OSError as error:
            raise WeightError(
                f"{self.directory / file}: `{name}` cannot be read: {error}"
            ) from error
        return tensor


def read_box(descriptor: int, entry: Entry, offsets: Sequence[int], target: torch.Tensor) -> None:
    """Fill `target`, which is contiguous, from the box of its shape at `offsets` of a tensor.

    Raises:
        OSError: the file cannot be read, or ends before.
    """
    shape, sizes = entry.shape, tuple(target.shape)
    # From dimension `inner` on, the box is one piece of the file.
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    data = target.reshape(-1).view(torch.uint8).numpy().data
    piece = math.prod(sizes[inner:]) * entry.dtype.itemsize
    if not piece:
        return
    strides = [math.prod(shape[i + 1 :]) * entry.dtype.itemsize for i in range(len(shape))]
    begin = entry.start + sum(map(operator.mul, offsets, strides))
    for i, index in enumerate(itertools.product(*map(range, sizes[:inner]))):
        start = begin + sum(map(operator.mul, index, strides))
        _fill(descriptor, data[i * piece : (i + 1) * piece], start)


def _fill(descriptor: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise OSError(f"the file ends at byte {offset}, it was longer when it was opened")
        target, offset = target[count:], offset + count


def is_finite(tensor: torch.Tensor) -> bool:
    """Neither NaN nor infinity anywhere: like torch.isfinite(tensor).all(), in one pass that takes
    a fiftieth of its time on a CPU."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)  # a NaN anywhere makes both NaN
    return bool(torch.isfinite(low) & torch.isfinite(high))


def read_config(directory: Path) -> dict:
    """config.json of a Hugging Face directory.

    Raises:
        WeightError: there is none, or it is not a JSON object.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if directory.is_file():
        raise WeightError(
            f"{directory} is a file: give the Hugging Face model directory that it lies in"
        )
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise WeightError(f"{path} does not exist: give a Hugging Face model directory") from None
    except RecursionError:
        raise WeightError(f"{path} is nested too deeply: no model's config.json is") from None
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise WeightError(f"{path} must hold an object, got {config!r:.60}")
    return config


def open_checkpoint(directory: Path, stack: ExitStack) -> Checkpoint:
    """Read the index and the headers of the safetensors files in `directory`.

    The files stay open until `stack` is closed.

    Raises:
        WeightError: no weights, a broken index, or a file that is missing, truncated or holds
            something else than the index says.
    """
    index_path = directory / INDEX
    index = _read_index(index_path) if index_path.exists() else None
    if index is not None:
        names = sorted(set(index.values()))
    elif (directory / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise WeightError(
            f"{directory} holds no *.safetensors file: give a Hugging Face model directory "
            "(convert *.bin weights with save_pretrained of the transformers library first)"
        )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    entries: dict[str, Entry] = {}
    descriptors = {}
    for file in names:
        path = directory / file
        if not path.is_file():
            raise WeightError(
                f"{index_path} names {shown_name(file)}, which does not exist: fetch it again"
            )
        for name, entry in read_layout(path).items():
            if name in tensors:
                raise WeightError(
                    f"`{shown_name(name)}` stands in both {tensors[name][0]} and {file} of "
                    f"{directory}: keep the files of one model only"
                )
            tensors[name], entries[name] = (file, entry.shape), entry
        descriptors[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptors[file])
    for name, file in (index or {}).items():
        if tensors.get(name, (None,))[0] != file:
            raise WeightError(
                f"{index_path} says `{shown_name(name)}` is in {file}, which does not hold it"
            )
    return Checkpoint(directory, tensors, entries, descriptors)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map must be a mapping from tensor to file")
        if any(Path(str(file)).name != file for file in weight_map.values()):
            raise ValueError("weight_map must name files beside the index")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightError(f"{path} is not a valid index ({error!r}): fetch it again") from error
    return weight_map


def check_names(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], tied: bool) -> None:
    """Compare names and shapes with what the model's config implies.

    Raises:
        WeightError: tensors are missing, unexpected or misshapen; all are counted, some shown.
    """
    found = {name: shape for name, (_, shape) in checkpoint.tensors.items() if not _inert(name)}
    if tied and "lm_head.weight" in found:
        # Stored all the same; whether it is the embedding is compared when both are read.
        expected = expected | {"lm_head.weight": expected["model.embed_tokens.weight"]}
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {list(found[name])}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems := shown_problems(missing=missing, unexpected=unexpected, misshapen=misshapen):
        raise WeightError(
            f"the weights in {checkpoint.directory} do not fit its config.json: tensors{problems}"
        )


def _inert(name: str) -> bool:
    # Old Llama checkpoints carry the rotary frequencies, which follow from the config.
    return name.endswith(".rotary_emb.inv_freq")
