"""Import packages one after the other and say how each went, a JSON line each on standard output.

    python -m megatron_opo.doctor.import_steps torch transformers ...

A package may crash or hang: whoever started this process has seen the line that a step begins.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

PLUGIN_GROUP = "sglang.srt.plugins"
ERROR_CHARACTERS = 240
# Of packages whose top module imports next to nothing.
MODULES = {
    "megatron-core": "megatron.core",
    "sglang": "sglang.srt.server_args",
    "transformer-engine": "transformer_engine.pytorch",
}


def module_of(package: str) -> str:
    return MODULES.get(package, package.replace("-", "_"))


def main(steps: list[str]) -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is not for the reader of the lines
    for step in steps:
        _say(channel, {"begins": step})
        began = time.monotonic()
        try:
            facts = _facts(step)
            _say(channel, {"step": step, "seconds": time.monotonic() - began, **facts})
        except BaseException as error:  # an import may do anything, also end the program
            _say(channel, {"step": step, "error": _one_line(error)})


def _facts(step: str) -> dict[str, Any]:
    if step in FACTS:
        return FACTS[step]()
    importlib.import_module(module_of(step))
    return {}


def _say(channel: Any, line: dict[str, Any]) -> None:
    channel.write(json.dumps(line) + "\n")
    channel.flush()


def _one_line(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0][:ERROR_CHARACTERS] if not isinstance(error, SyntaxError) else lines[-1]


def _torch() -> dict[str, Any]:
    import torch

    nccl = None
    if torch.version.cuda and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore
    return {"version": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def _gpus() -> dict[str, Any]:
    import torch

    from megatron_opo.preflight import gpu_names, sick_gpus

    names = gpu_names()
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(len(names))]
    return {"gpus": names, "memory": memory, "sick": sick_gpus(len(names))}


def _plugins() -> dict[str, Any]:
    """SGLang would log what fails here, and go on without."""
    failed = {}
    points = list(entry_points(group=PLUGIN_GROUP))
    for point in points:
        try:
            point.load()
        except BaseException as error:
            failed[point.name] = _one_line(error)
    return {"plugins": {point.name: point.value for point in points}, "failed": failed}


FACTS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "gpus": _gpus,
    "plugins": _plugins,
}

if __name__ == "__main__":
    main(sys.argv[1:])
