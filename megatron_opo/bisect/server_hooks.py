"""Hooks that write what the modules of a server compute to files. SGLang imports this by its option
`--forward-hooks`, inside its server processes."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FACTORY = f"{__name__}:record"
_NUMBERS = itertools.count()


def specs(names: list[str], directory: Path) -> list[dict[str, Any]]:
    """For `--forward-hooks`: one for each module, or its hook would not know which one it is of."""
    return [
        {
            "name": name,
            "target_modules": [name],
            "hook_factory": FACTORY,
            "config": {"name": name, "directory": str(directory)},
        }
        for name in names
    ]


def record(config: dict[str, Any]) -> Callable:
    """A forward hook: the tensors of each call go to a file of their own, "in0", "out0" and so on
    in the order of the arguments.

    Args:
        config: `name` of the module, and the `directory` for the files, whose names begin with a
            number that grows with every call.
    """
    directory, name = Path(config["directory"]), config["name"]

    def hook(_module: torch.nn.Module, inputs: tuple, output: Any) -> None:
        tensors = {f"in{i}": each for i, each in enumerate(_tensors(inputs))}
        tensors |= {f"out{i}": each for i, each in enumerate(_tensors(output))}
        path = directory / f"{next(_NUMBERS):09d}_{os.getpid()}.safetensors"
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished, metadata={"module": name})
        unfinished.rename(path)

    return hook


def _tensors(values: Any) -> list[torch.Tensor]:
    """What is no tensor is left out. Copies: later operations may overwrite them in place."""
    if isinstance(values, torch.Tensor):
        return [values.detach().to("cpu", copy=True).contiguous()]
    if hasattr(values, "next_token_logits"):
        return _tensors(values.next_token_logits)
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
