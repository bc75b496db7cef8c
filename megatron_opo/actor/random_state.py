"""All random number generators of a process, as JSON."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_state() -> dict[str, Any]:
    """Of Python, numpy, torch on the CPU and on this process's GPU, and Megatron's generators."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    numpy_state = numpy_state | {"state": numpy_state["state"] | {"key": key}}
    return {
        "python": [version, list(words), gauss],
        "numpy": numpy_state,
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "megatron": {
            name: _to_text(state.get_state() if isinstance(state, torch.Generator) else state)
            for name, state in _megatron_generators().get_states().items()
        },
    }


def restore_random_state(saved: dict[str, Any]) -> None:
    """Go on with what `random_state` returned on a process of the same layout."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    of_numpy = saved["numpy"]
    key = np.array(of_numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state(of_numpy | {"state": of_numpy["state"] | {"key": key}})
    torch.set_rng_state(_to_tensor(saved["torch"]))
    if saved["cuda"] is not None:
        torch.cuda.set_rng_state(_to_tensor(saved["cuda"]))
    tracker = _megatron_generators()
    states = tracker.get_states()
    for name, text in saved["megatron"].items():
        if isinstance(states.get(name), torch.Generator):
            states[name].set_state(_to_tensor(text))
        else:
            states[name] = _to_tensor(text)
    tracker.set_states(states)


def _megatron_generators() -> Any:
    """Its tracker, which type checkers take for None."""
    return get_cuda_rng_tracker()


def _to_text(state: torch.Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
