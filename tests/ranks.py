"""Run a function on several ranks: real processes, real gloo, nothing simulated."""

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

# Importing Megatron takes seconds: ranks are forked from one process that has done it.
PRELOAD = ["torch", "transformers", "megatron_opo.actor.model"]


class RankError(AssertionError):
    """The first error of any rank, with that rank's traceback."""


def run_ranks(count: int, function: Callable, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(*args)` on `count` ranks in torchrun's environment; results by rank.

    `function` must stand at the top of a module. All processes are gone when this returns.

    Raises:
        RankError: a rank raised or died, or not all were done within `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], {}
    try:
        for rank in range(count):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(sender, rank, count, store.port, function, args)
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes[receiver] = rank
        return _collect(pipes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            # What the rank started, too: Megatron's checkpoint writer outlives it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def _run_rank(
    sender: Connection, rank: int, count: int, port: int, function: Callable, args: tuple
) -> None:
    os.setpgid(0, 0)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The parent holds the store, as torchrun's agent does.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        # These tests are about gloo and the CPU, also where there is a GPU.
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        answer = (function(*args), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    # Plain pickle copies tensors; the pipe's own would share memory that ends with this process.
    sender.send_bytes(pickle.dumps(answer))


def _collect(pipes: dict[Connection, int], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    waiting = dict(pipes)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} not done after {timeout_s} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                result, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without an answer") from None
            if error:
                raise RankError(f"rank {rank} of {len(pipes)}:\n{error}")
            results[rank] = result
    return [results[rank] for rank in sorted(results)]
