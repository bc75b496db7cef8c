"""A Hugging Face model directory, written whole or not at all, tensor by tensor."""

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path

import torch

from megatron_opo.errors import CheckpointError, WeightError
from megatron_opo.weights.checkpoint import INDEX, SHOWN
from megatron_opo.weights.families import read_architecture
from megatron_opo.weights.safetensors_layout import Entry, lay_out
from megatron_opo.weights.streaming import FileStream, OnProgress, flush_to_disk

# What a model directory holds beside config and weights, by transformers' names.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)

Weights = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Shard:
    """A safetensors file to be: its header, and each tensor's place behind it."""

    file: str
    header: bytes
    entries: dict[str, Entry]

    @property
    def num_bytes(self) -> int:
        return max((entry.end for entry in self.entries.values()), default=len(self.header))


def save_hf(
    directory: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    source: Path,
    max_shard_bytes: int = 5 * 10**9,
    buffer_bytes: int = 2**26,
    threads: int = 2,
    on_progress: OnProgress | None = None,
) -> None:
    """Write `weights` as safetensors (with an index when sharded) beside the config, tokenizer and
    generation config of `source`.

    The directory appears under its name only when it is complete, and on the disk. `weights`, all
    of one dtype and in any order, are exhausted even when writing fails, so that ranks which take
    part in producing them are not left waiting. A tensor is written while the next one is made; the
    tensors which wait for that take up to `buffer_bytes`, or are a single one that is larger.

    Raises:
        CheckpointError: `directory` exists, `source` lacks a config.json, or the disk is full.
        WeightError: `weights` are not all tensors of the config, in their shapes.
    """
    directory, source = Path(directory), Path(source)
    remaining = iter(weights)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        if directory.exists():
            raise CheckpointError(f"{directory} exists already: remove it or choose another place")
        config = json.loads((source / "config.json").read_text())
        expected = read_architecture(config).hf_shapes()
        dtype, weights = _peek(remaining, len(expected))
        shards = plan_shards(expected, dtype, max_shard_bytes)
        remove_leftovers(directory)
        check_space(directory, sum(shard.num_bytes for shard in shards))
        partial.mkdir(parents=True)
        sizes = {partial / shard.file: shard.num_bytes for shard in shards}
        with FileStream(
            sizes, buffer_bytes=buffer_bytes, threads=threads, on_progress=on_progress
        ) as stream:
            _write_weights(stream, partial, shards, weights)
        _write_index(partial, shards)
        _write_companions(partial, source, config, dtype)
        flush_to_disk([*partial.iterdir(), partial])
        partial.rename(directory)
        flush_to_disk([directory.parent])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
    finally:
        deque(remaining, maxlen=0)
        shutil.rmtree(partial, ignore_errors=True)


def plan_shards(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> list[Shard]:
    """Files of up to `max_bytes` of tensors, or of one larger tensor, that keep the order."""
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = (dtype, shape)
        size += num_bytes
    if len(groups) == 1:
        return [Shard("model.safetensors", *lay_out(groups[0]))]
    return [
        Shard(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", *lay_out(group))
        for i, group in enumerate(groups)
    ]


def _peek(weights: Weights, count: int) -> tuple[torch.dtype, Weights]:
    """The first tensor's dtype, and all of `weights` again."""
    try:
        held = [next(weights)]
    except StopIteration:
        raise WeightError(f"no tensors were to be saved, but config.json implies {count}") from None

    def again() -> Weights:
        yield held.pop()  # not kept: it is often the largest
        yield from weights

    return held[0][1].dtype, again()


def _write_weights(
    stream: FileStream, partial: Path, shards: list[Shard], weights: Weights
) -> None:
    places = {}
    for shard in shards:
        header = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
        stream.write(partial / shard.file, 0, header)
        places |= {name: (partial / shard.file, entry) for name, entry in shard.entries.items()}
    count = len(places)
    for name, tensor in weights:
        if name not in places:
            raise WeightError(
                f"`{name}` was to be saved twice, or is none of config.json's tensors"
            )
        path, entry = places.pop(name)
        if (tensor.shape, tensor.dtype) != (entry.shape, entry.dtype):
            raise WeightError(
                f"`{name}` was to be saved as {tensor.dtype} {list(tensor.shape)}, must be "
                f"{entry.dtype} {list(entry.shape)}: nothing was written"
            )
        stream.write(path, entry.start, tensor)
    if places:
        missing = ", ".join(list(places)[:SHOWN]) + (", ..." if len(places) > SHOWN else "")
        raise WeightError(
            f"{count - len(places)} tensors were to be saved, but config.json implies {count}: "
            f"{missing} missing; nothing was written"
        )


def _write_index(partial: Path, shards: list[Shard]) -> None:
    if len(shards) == 1:
        return
    total = sum(shard.num_bytes - len(shard.header) for shard in shards)
    weight_map = {name: shard.file for shard in shards for name in shard.entries}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_companions(partial: Path, source: Path, config: dict, dtype: torch.dtype) -> None:
    # transformers before 5 reads torch_dtype, later ones dtype.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config = {**config, key: str(dtype).removeprefix("torch.")}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)


def remove_leftovers(directory: Path) -> None:
    """What a process that was killed has left of an earlier try."""
    for path in directory.parent.glob(f".{escape(directory.name)}.partial-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def check_space(directory: Path, needed: int) -> None:
    """Raises CheckpointError where `needed` bytes do not fit on the disk of a new directory."""
    place = next(parent for parent in directory.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"{directory} needs {needed / 1e9:.2f} GB of disk, but only {free / 1e9:.2f} GB are "
            f"free in {place}: make room or choose another place"
        )
