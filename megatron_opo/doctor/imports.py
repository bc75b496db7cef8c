"""Import packages in a process of its own, so that one that crashes or hangs is only a finding."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import Any

LOOK_SECONDS = 0.1
COMMAND = [sys.executable, "-m", "megatron_opo.doctor.import_steps"]


def try_imports(steps: list[str], seconds: float, stop: Event) -> dict[str, dict[str, Any]]:
    """How each step of `import_steps` went: its facts, or {"error": one line}.

    The steps share a process, as importing torch for each would take long. After a crash or a hang
    another one goes on with the next step.

    Args:
        seconds: limit of each step.
        stop: set by another thread that no longer wants to know; the process is ended then.
    """
    results: dict[str, dict[str, Any]] = {}
    left = list(steps)
    while left and not stop.is_set():
        results |= _one_process(left, seconds, stop)
        if "error" in results.get("torch", {}):
            # All others import it, and would fail or hang in the same way.
            return {step: {"without_torch": True} for step in steps} | {"torch": results["torch"]}
        left = [step for step in left if step not in results]
    return results


def _one_process(steps: list[str], seconds: float, stop: Event) -> dict[str, dict[str, Any]]:
    """At least the first step's result."""
    process = subprocess.Popen(
        [*COMMAND, *steps],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    results: dict[str, dict[str, Any]] = {}
    current = steps[0]
    try:
        for line in _lines(process, seconds, stop):
            if "begins" in line:
                current = line["begins"]
            else:
                results[line.pop("step")] = line
        if len(results) < len(steps):
            results[current] = {"error": _ended(process)}
    except TimeoutError:
        results[current] = {"error": f"its import had not ended after {seconds:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return results


def _lines(
    process: subprocess.Popen[bytes], seconds: float, stop: Event
) -> Iterator[dict[str, Any]]:
    """The lines as they come.

    Raises:
        TimeoutError: none came for `seconds`, or none is wanted.
    """
    assert process.stdout is not None
    descriptor, buffer = process.stdout.fileno(), b""
    with process.stdout:
        deadline = time.monotonic() + seconds
        while True:
            if stop.is_set() or time.monotonic() > deadline:
                raise TimeoutError
            if not select.select([descriptor], [], [], LOOK_SECONDS)[0]:
                continue
            data = os.read(descriptor, 65536)
            if not data:
                return
            *whole, buffer = (buffer + data).split(b"\n")
            for line in whole:
                deadline = time.monotonic() + seconds
                yield json.loads(line)


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "Python hung at its end"
    if code < 0:
        return f"Python was ended by {signal.Signals(-code).name} while it imported it"
    return f"Python ended with code {code} while it imported it"
