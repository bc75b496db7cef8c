"""A Hugging Face weight directory: which file holds which tensor, checked before it is read."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_opo.errors import WeightError

INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16", "F64")
SHOWN = 5


@dataclass(frozen=True)
class Checkpoint:
    """Open safetensors files; `tensors` maps a name to (file, shape)."""

    directory: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    files: dict[str, safe_open]

    def read(self, name: str, dim: int | None, start: int, end: int) -> torch.Tensor:
        """Rows (or columns) `start` to `end` of a tensor along `dim`; None reads it whole."""
        file, _ = self.tensors[name]
        view = self.files[file].get_slice(name)
        try:
            if dim is None:
                return view[:]
            return view[start:end] if dim == 0 else view[:, start:end]
        except (SafetensorError, OSError) as error:
            raise WeightError(
                f"{self.directory / file}: `{name}` cannot be read: {error}"
            ) from error


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
    tensors, files = {}, {}
    for file in names:
        path = directory / file
        if not path.is_file():
            raise WeightError(f"{index_path} names {file}, which does not exist: fetch it again")
        try:
            files[file] = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise WeightError(
                f"{path} is truncated or not a safetensors file: {error}; fetch it again"
            ) from error
        for name in files[file].keys():  # noqa: SIM118 - not a mapping
            if name in tensors:
                raise WeightError(
                    f"`{name}` stands in both {tensors[name][0]} and {file} of {directory}: keep "
                    "the files of one model only"
                )
            tensors[name] = (file, _shape(files[file], name, path))
    for name, file in (index or {}).items():
        if tensors.get(name, (None,))[0] != file:
            raise WeightError(f"{index_path} says `{name}` is in {file}, which does not hold it")
    return Checkpoint(directory, tensors, files)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map must be a mapping from tensor to file")
        if any(Path(str(file)).name != file for file in weight_map.values()):
            raise ValueError("weight_map must name files beside the index")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{path} is not a valid index ({error!r}): fetch it again") from error
    return weight_map


def _shape(file: safe_open, name: str, path: Path) -> tuple[int, ...]:
    view = file.get_slice(name)
    if view.get_dtype() not in FLOATS:
        raise WeightError(
            f"{path}: `{name}` has dtype {view.get_dtype()}; allowed: {', '.join(FLOATS)} "
            "(quantised weights must be dequantised first)"
        )
    return tuple(view.get_shape())


def check_names(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], tied: bool) -> None:
    """Compare names and shapes with what the model's config implies.

    Raises:
        WeightError: tensors are missing, unexpected or misshapen; all are counted, some shown.
    """
    found = {name: shape for name, (_, shape) in checkpoint.tensors.items() if not _inert(name)}
    if tied:
        found.pop("lm_head.weight", None)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {list(found[name])}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{len(names)} {what}: {'; '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if names
    ]
    if problems:
        raise WeightError(
            f"the weights in {checkpoint.directory} do not fit its config.json: tensors "
            + "\n  ".join(["", *problems])
        )


def _inert(name: str) -> bool:
    # Old Llama checkpoints carry the rotary frequencies, which follow from the config.
    return name.endswith(".rotary_emb.inv_freq")
