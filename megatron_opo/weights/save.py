"""A Hugging Face model directory, written whole or not at all."""

import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_opo.errors import CheckpointError, WeightError
from megatron_opo.weights.checkpoint import INDEX
from megatron_opo.weights.families import read_architecture

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


def save_hf(
    directory: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    source: Path,
    max_shard_bytes: int = 4 * 10**9,
) -> None:
    """Write `weights` as safetensors (with an index when sharded) beside the config, tokenizer and
    generation config of `source`.

    The directory appears under its name only when it is complete. `weights` is exhausted even when
    writing fails, so that ranks which take part in producing it are not left waiting.

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
        partial.mkdir(parents=True)
        config = json.loads((source / "config.json").read_text())
        dtype = _write_shards(partial, remaining, config, max_shard_bytes)
        _write_companions(partial, source, config, dtype)
        partial.rename(directory)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
    finally:
        deque(remaining, maxlen=0)
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(
    partial: Path, weights: Iterator[tuple[str, torch.Tensor]], config: dict, max_bytes: int
) -> torch.dtype:
    shards: list[list[str]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    shard: dict[str, torch.Tensor] = {}
    size = total = 0
    dtype = torch.float32

    def flush() -> None:
        save_file(shard, partial / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > max_bytes:
            flush()
            size = 0
        shard[name] = tensor.cpu()
        shapes[name] = tuple(tensor.shape)
        dtype = tensor.dtype
        size += num_bytes
        total += num_bytes
    if shapes != read_architecture(config).hf_shapes():
        raise WeightError(
            f"{len(shapes)} tensors were to be saved, but they are not the "
            f"{len(read_architecture(config).hf_shapes())} that config.json implies: nothing was "
            "written"
        )
    flush()
    _name_shards(partial, shards, total)
    return dtype


def _name_shards(partial: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        (partial / "shard-0").rename(partial / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (partial / f"shard-{i}").rename(partial / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
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
