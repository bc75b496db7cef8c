"""Batches on disk: what one update was given, to be looked at or taken again (`train --replay`).

A batch is one safetensors file: the tensors of its `PackedBatch` under their names, and `samples`,
the bytes of a JSON list with the prompts and responses as text. Its metadata say which policy
version sampled it and under which recipe. Nothing in it is ever run.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_opo.batch import Group, PackedBatch
from megatron_opo.errors import DataError, LogError

BATCHES = "batches"
FORMAT = "megatron_opo batch"
FORMAT_VERSION = "1"
DTYPES = {
    "tokens": torch.int64,
    "loss_mask": torch.bool,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
    "cu_seqlens": torch.int64,
    "group_offsets": torch.int64,
    "rewards": torch.float64,
    "sample_ids": torch.int64,
}
OPTIONAL = {"greedy_rewards": torch.float64}
SAMPLES = "samples"


@dataclass(frozen=True)
class KeptBatch:
    """A batch file. `version` sampled it, so that its update makes step version + 1; `recipe` is
    what ran, as JSON-like data; `samples` what `describe_samples` says of each group."""

    path: Path
    batch: PackedBatch
    version: int
    recipe: dict[str, Any]
    samples: list[dict[str, Any]]

    @property
    def step(self) -> int:
        return self.version + 1


def batch_path(run_path: Path, step: int) -> Path:
    return run_path / BATCHES / f"step_{step}.safetensors"


def failed_batch_path(run_path: Path, step: int) -> Path:
    """A new one: what a step that is taken again does well must not replace what it did not."""
    path = run_path / BATCHES / f"step_{step}.failed.safetensors"
    number = 2
    while path.exists():
        path = path.with_name(f"step_{step}.failed_{number}.safetensors")
        number += 1
    return path


def replay_command(path: Path) -> str:
    """For a batch in its run, which has the resolved recipe."""
    return f"megatron-opo train {path.parents[1] / 'recipe.yaml'} --replay {path}"


def describe_samples(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """A record of each group with all of its samples, trained or not, in the batch's order."""
    return [
        {
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "data_source": group.prompt.data_source,
            "ground_truth": group.prompt.ground_truth,
            "samples": [
                {
                    "index": sample.index,
                    "response": sample.text,
                    "finish_reason": sample.finish_reason,
                    "server": sample.server,
                    "reward": sample.reward,
                    "reward_error": sample.reward_error,
                }
                for sample in group.samples
            ],
        }
        for group in groups
    ]


def digest(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """sha256 of names and contents of both, but for its own place in `metadata`."""
    said = {name: text for name, text in metadata.items() if name != "sha256"}
    found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(name.encode() + b"\0")
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def write_batch(
    path: Path,
    batch: PackedBatch,
    *,
    version: int,
    recipe: dict[str, Any],
    groups: Iterable[Group] = (),
) -> None:
    """Write a batch file, which takes its name when it is complete.

    Args:
        version: the policy that sampled the batch.
        recipe: what runs, without secrets.
        groups: what was packed.

    Raises:
        LogError: it cannot be written.
    """
    text = json.dumps(describe_samples(groups), default=str).encode()
    tensors = {SAMPLES: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    for name in (*DTYPES, *OPTIONAL):
        if (tensor := getattr(batch, name)) is not None:
            tensors[name] = tensor.contiguous()
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": str(version),
        "recipe": json.dumps(recipe, default=str),
    }
    metadata["sha256"] = digest(tensors, metadata)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise LogError(
            f"{path}: the batch cannot be kept: {error}; free space, or set log.batches_every to 0 "
            "to keep only those of failed updates"
        ) from None


def read_batch(path: Path) -> KeptBatch:
    """Raises DataError: it is no batch file, one of another format version, or damaged."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"batch {path}: no such file") from None
    # Which errors a damaged header can lead to is nowhere promised.
    except Exception as error:
        raise DataError(
            f"batch {path}: not a safetensors file, or damaged ({type(error).__name__}: {error})"
        ) from None
    problem = _problem(tensors)
    if not problem and digest(tensors, metadata) != metadata.get("sha256"):
        problem = "its contents are not those that were written (sha256)"
    if problem:
        raise DataError(f"batch {path}: {problem}; the file is damaged or was made by hand")
    text = bytes(tensors.pop(SAMPLES).tolist())
    try:
        version = int(metadata["version"])
        recipe, samples = json.loads(metadata["recipe"]), json.loads(text)
        if version < 0 or not isinstance(recipe, dict) or not isinstance(samples, list):
            raise ValueError(f"version {version}, a recipe or samples of another kind")
    except (KeyError, ValueError, RecursionError) as error:
        raise DataError(
            f"batch {path}: what it says of itself cannot be read ({type(error).__name__}: {error})"
        ) from None
    return KeptBatch(path, PackedBatch(**tensors), version, recipe, samples)


def _check_format(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise DataError(
            f"batch {path}: a safetensors file, but no batch (format {metadata.get('format')!r}, "
            f"wanted {FORMAT!r}): give a file of a run's directory {BATCHES}/"
        )
    found = metadata.get("format_version")
    if found != FORMAT_VERSION:
        raise DataError(
            f"batch {path}: format version {found!r}, but this program reads {FORMAT_VERSION!r}: "
            "use the version of megatron_opo that wrote it"
        )


def _problem(tensors: dict[str, torch.Tensor]) -> str | None:
    """In what way the tensors are not a batch."""
    wanted = DTYPES | {SAMPLES: torch.uint8}
    for name, dtype in (wanted | OPTIONAL).items():
        tensor = tensors.get(name)
        if tensor is None:
            if name in wanted:
                return f"there is no tensor `{name}`"
        elif tensor.dtype != dtype or tensor.dim() != 1:
            return f"`{name}` is {tensor.dtype} {tuple(tensor.shape)}, wanted {dtype} [n]"
    if unknown := tensors.keys() - wanted.keys() - OPTIONAL.keys():
        return f"there are unknown tensors: {', '.join(sorted(unknown))}"
    num_tokens, num_sequences = tensors["tokens"].numel(), tensors["rewards"].numel()
    if num_sequences == 0:
        return "it has no sequence"
    sizes = {"loss_mask": num_tokens, "rollout_logprobs": num_tokens, "advantages": num_tokens}
    sizes |= {"cu_seqlens": num_sequences + 1, "sample_ids": num_sequences}
    if "greedy_rewards" in tensors:
        sizes["greedy_rewards"] = tensors["group_offsets"].numel() - 1
    for name, size in sizes.items():
        if (found := tensors[name].numel()) != size:
            return (
                f"`{name}` has {found} elements, but {num_tokens} tokens in {num_sequences} "
                f"sequences want {size}"
            )
    return (
        _bounds_problem("cu_seqlens", tensors["cu_seqlens"], num_tokens, at_least=1)
        or _bounds_problem("group_offsets", tensors["group_offsets"], num_sequences, at_least=0)
        or _values_problem(tensors)
    )


def _bounds_problem(name: str, bounds: torch.Tensor, end: int, at_least: int) -> str | None:
    if not bounds.numel() or bounds[0] != 0 or bounds[-1] != end:
        return f"`{name}` does not go from 0 to {end}"
    if (bounds[1:] - bounds[:-1] < at_least).any() or (bounds[1:] < bounds[:-1]).any():
        return f"`{name}` does not rise by {at_least} or more from each to the next"
    return None


def _values_problem(tensors: dict[str, torch.Tensor]) -> str | None:
    if (tensors["tokens"] < 0).any():
        return "`tokens` has a negative id"
    if (tensors["sample_ids"].diff() < 1).any() or tensors["sample_ids"][0] < 0:
        return "`sample_ids` do not rise from 0 or more"
    if tensors["loss_mask"][tensors["cu_seqlens"][:-1]].any():
        return "`loss_mask` has the first token of a sequence, which nothing predicts"
    if not tensors["loss_mask"].any():
        return "`loss_mask` has no token to train on"
    return None
