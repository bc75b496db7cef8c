"""A process that scores samples, one at a time: JSON lines in, JSON lines out, over one socket.

The function runs in the main thread, where alarm signals (math-verify's time limits) work. This
module imports nothing heavy: a worker that replaces a killed one must be there soon.
"""

import asyncio
import inspect
import io
import json
import math
import numbers
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from megatron_opo.user_code import LoadError, describe, load

REPLY_BYTES = 2**20
EXAMPLE_CALL = {
    "data_source": "",
    "solution_str": "1",
    "ground_truth": "1",
    "extra_info": {
        "task": "count_bits",
        "size": 1,
        "seed": 0,
        "config": {"min_n": 1, "max_n": 1},
        "index": 0,
    },
}


def load_function(function: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The verifier that `function` names, checked to take verl's arguments and `kwargs`.

    Raises:
        LoadError: it does not exist, cannot be imported or does not take the arguments.
    """
    _, colon, name = function.rpartition(":")
    if colon:
        target = load(function)
    else:
        from megatron_opo.rewards.verifiers import BUILTIN

        target = BUILTIN[name]
    _check_arguments(target, function, kwargs)
    if not colon:
        try:  # loads the libraries now, not in the first sample's time; tries the kwargs
            target(**EXAMPLE_CALL, **kwargs)
        except Exception as error:
            raise LoadError(
                f"`{function}` fails with reward.kwargs ({', '.join(kwargs) or 'none'}): "
                f"{describe(error)}"
            ) from None
    return target


def _check_arguments(target: Callable[..., Any], function: str, kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # compiled callables may have none
        return
    try:
        signature.bind(**EXAMPLE_CALL, **kwargs)
    except TypeError as error:
        extra = f" and reward.kwargs ({', '.join(kwargs)})" if kwargs else ""
        raise LoadError(
            f"`{function}` is defined as {signature} and cannot be called with the keyword "
            f"arguments {', '.join(EXAMPLE_CALL)}{extra}: {error}"
        ) from None


def _plain(value: Any) -> Any:
    """What JSON does not know: numpy and torch scalars as numbers, anything else as text."""
    return value.item() if getattr(value, "ndim", None) == 0 else repr(value)


def to_reward(result: Any) -> tuple[float, dict[str, Any]]:
    """A verifier's result -> reward and reward_info.

    Raises:
        TypeError: it is no number and no dict with one under "score".
        ValueError: it is not finite.
    """
    info: dict[str, Any] = {}
    if isinstance(result, dict):
        if "score" not in result:
            raise TypeError(
                f"the returned dict has no `score`, its keys: {sorted(map(str, result))}"
            )
        info = {str(key): value for key, value in result.items() if key != "score"}
        result = result["score"]
    if getattr(result, "ndim", None) == 0:
        result = result.item()
    if not isinstance(result, numbers.Real):
        raise TypeError(
            f"returned {type(result).__name__} {result!r:.80}, must be a number, or a dict with a "
            "number under `score`"
        )
    if not math.isfinite(result):
        raise ValueError(f"returned {float(result)}, must be finite")
    return float(result), info


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _answer(
    request: dict[str, Any], target: Callable[..., Any], kwargs: dict[str, Any], path: str, runner
) -> bytes:
    try:
        result = target(**request, **kwargs)
        if inspect.isawaitable(result):
            result = runner.run(_finish(result))
        reward, info = to_reward(result)
        reply = json.dumps({"reward": reward, "info": info}, default=_plain)
        if len(reply) > REPLY_BYTES:
            raise ValueError(f"returned {len(reply):,} bytes, allowed: {REPLY_BYTES:,}")
    except BaseException as error:  # sys.exit and math-verify's timeout are no Exceptions
        reply = json.dumps({"error": describe(error, path)})
    return reply.encode() + b"\n"


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the trainer is gone")


def _limit_memory(size: int) -> None:
    """What is beyond it fails with MemoryError, instead of taking the trainer's memory."""
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    if highest != resource.RLIM_INFINITY:
        size = min(size, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main(descriptor: int, parent: int) -> None:
    _die_with_parent(parent)
    # Slurm's warning before the time limit goes to every process of a job.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.dup2(2, 1)  # what a function prints is for the log, at once
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    connection = socket.socket(fileno=descriptor)
    requests = connection.makefile("rb")
    config = json.loads(requests.readline())
    _limit_memory(config["memory_bytes"])
    function, kwargs = config["function"], config["kwargs"]
    try:
        target = load_function(function, kwargs)
    except LoadError as error:
        connection.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    connection.sendall(b'{"ready": true}\n')
    path = function.rpartition(":")[0]
    with asyncio.Runner() as runner:  # one loop, so an async function may keep its connections
        for line in requests:
            connection.sendall(_answer(json.loads(line), target, kwargs, path, runner))


if __name__ == "__main__":
    main(descriptor=int(sys.argv[1]), parent=int(sys.argv[2]))
