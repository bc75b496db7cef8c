"""A Hugging Face model directory, written whole or not at all, tensor by tensor."""

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_opo.errors import CheckpointError, RecipeError, WeightError
from megatron_opo.weights.checkpoint import INDEX, read_config
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.new_directory import check_space, check_target, new_directory
from megatron_opo.weights.safetensors_layout import Entry, lay_out
from megatron_opo.weights.streaming import FileStream, OnProgress
from megatron_opo.weights.text import SHOWN, shown_name

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
    of one dtype and in any order, are not touched before the target is known to be free. Where
    writing fails they are neither exhausted nor closed: when ranks take part in producing them, the
    caller runs them to their end. A tensor is written while the next one is made; the tensors which
    wait for that take up to `buffer_bytes`, or are a single one that is larger.

    Raises:
        CheckpointError: `directory` exists, `source` has no usable config.json, or the disk is
            full.
        WeightError: `weights` are not all tensors of the config, in their shapes.
    """
    directory, source = Path(directory), Path(source)
    check_target(directory)
    try:
        config = read_config(source)
        expected = read_architecture(config).hf_shapes()
    except (WeightError, RecipeError) as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
    dtype, weights = _peek(iter(weights), len(expected))
    shards = plan_shards(expected, dtype, max_shard_bytes)
    check_space(directory, sum(shard.num_bytes for shard in shards))
    with new_directory(directory) as partial:
        sizes = {partial / shard.file: shard.num_bytes for shard in shards}
        with FileStream(
            sizes, buffer_bytes=buffer_bytes, threads=threads, on_progress=on_progress
        ) as stream:
            _write_weights(stream, partial, shards, weights)
        _write_index(partial, shards)
        _write_companions(partial, source, config, dtype)


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
        # Not `yield from`: that would close `weights` too when this ends early.
        for pair in weights:
            yield pair
            del pair

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
                f"`{shown_name(name)}` was to be saved twice, or is none of config.json's tensors"
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
