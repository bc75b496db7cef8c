"""Scores samples in worker processes, each sample with a time limit.

One thread supervises one worker: it starts it, hands it a sample, waits for the answer, and kills
and replaces it when there is none. So a sample has exactly one outcome whatever its function does,
and outcomes cannot be swapped: a worker's socket carries one request at a time and dies with it.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_opo.batch import Group, Prompt, Sample
from megatron_opo.errors import RewardError
from megatron_opo.procedural import child_environment
from megatron_opo.recipe import RewardConfig
from megatron_opo.rewards.verifiers import resolve_function
from megatron_opo.rewards.worker import REPLY_BYTES

START_TIMEOUT_S = 300.0
# A worker that somebody else has killed must not cost a sample; one that its function kills does.
MOST_TRIES = 2
# Of what a function prints in the life of a pool.
OUTPUT_BYTES = 2**20
# What a terminal would act on.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
CLOSED = "the reward pool was closed before the sample was scored"


@dataclass(frozen=True)
class _Job:
    request: bytes
    sample: Sample
    future: "Future[Sample]"


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class _WorkerGone(Exception):
    """The worker died or stopped to answer; the text says how."""


class _Output:
    """The file for all that a function prints, up to a limit."""

    def __init__(self, path: Path):
        self._path = path
        self._room = OUTPUT_BYTES
        self._lock = threading.Lock()

    def write(self, chunk: bytes) -> None:
        with self._lock:
            text = chunk[: max(0, self._room)].decode(errors="replace")
            before, self._room = self._room, self._room - len(chunk)
            if self._room <= 0 < before:
                text += f"\n(dropped: reward.function printed over {OUTPUT_BYTES:,} bytes)\n"
            text = CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)
            with suppress(OSError):  # it must not cost a sample
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(text)


class _Worker:
    """A started process and this side of its socket."""

    def __init__(self, output: _Output) -> None:
        self._output = output
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # a math_verify.py where the command was given is not the library
                    "-m",
                    "megatron_opo.rewards.worker",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=child_environment(),
                start_new_session=True,  # the terminal's ctrl-c is the trainer's to handle
            )
        self._received = b""
        threading.Thread(target=self._show_output, daemon=True).start()

    def _show_output(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                self._output.write(chunk)

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Raises: TimeoutError, _WorkerGone."""
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(request)
            while not self._received.endswith(b"\n"):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError
                self._socket.settimeout(remaining_s)
                chunk = self._socket.recv(1 << 16)
                if not chunk:
                    raise ConnectionResetError
                self._received += chunk
                if len(self._received) > 2 * REPLY_BYTES:
                    raise _WorkerGone(f"the worker sent more than {2 * REPLY_BYTES:,} bytes")
            reply, self._received = self._received, b""
            return json.loads(reply)
        except (TimeoutError, _WorkerGone):
            raise
        except (OSError, ValueError):
            raise _WorkerGone(self._last_words()) from None

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its connection"
        if code < 0:
            return f"the worker was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"the worker exited with code {code}"

    def kill(self) -> None:
        """End the process and those that the function started in it."""
        with suppress(ProcessLookupError, PermissionError):  # the latter: dead already, on macOS
            os.killpg(self._process.pid, signal.SIGKILL)

    def release(self) -> None:
        self.kill()
        self._process.wait()
        self._socket.close()


class Scoring:
    """Groups that are being scored, until the end of the block; what is not scored by then is given
    up."""

    def __init__(self, pool: "RewardPool"):
        self._pool = pool
        # By identity, and so with the groups that must live as long.
        self._begun: dict[int, tuple[Group, list[Future[Sample]]]] = {}

    def add(self, group: Group) -> None:
        """Begin with its samples."""
        futures: list[Future[Sample]] = []
        self._begun[id(group)] = group, futures
        for sample in group.samples:
            futures.append(self._pool.score_one(group.prompt, sample))

    def results(
        self, groups: list[Group], on_sample: Callable[[Sample], None] | None = None
    ) -> list[Group]:
        """The same groups, all of which were added, with `reward`, `reward_info` and `reward_error`
        of each sample set.

        A sample that cannot be judged (its function hangs, dies, raises, returns no finite
        number) has reward None and the reason in `reward_error`. `on_sample` gets each sample
        when it is done, in that order.

        Raises:
            RewardError: a worker had to be replaced and the function no longer loads.
        """
        futures = [self._begun[id(group)][1] for group in groups]
        for future in as_completed([f for group in futures for f in group]):
            sample = future.result()
            if on_sample is not None:
                on_sample(sample)
        return [
            group.with_samples(f.result() for f in scored)
            for group, scored in zip(groups, futures, strict=True)
        ]

    def __enter__(self) -> "Scoring":
        return self

    def __exit__(self, *_) -> None:
        for _, futures in self._begun.values():
            for future in futures:
                future.cancel()


class RewardPool:
    """Worker processes that run one verifier. They load it while the caller does other things."""

    def __init__(self, config: RewardConfig, output: Path) -> None:
        """
        Args:
            output: a file, to which what the function prints is added.

        Raises:
            RewardError: the function is no built-in and no file.
        """
        self._config = config
        self._output = _Output(output)
        self._function = resolve_function(config.function)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers: dict[int, _Worker] = {}
        self._closed = False
        self._lock = threading.Lock()  # of _workers and _closed
        self._ready: list[Future[None]] = [Future() for _ in range(config.workers)]
        # A worker dies with the thread that started it, so its supervisor starts it.
        self._threads = [
            threading.Thread(target=self._supervise, args=(i,), name=f"reward-{i}", daemon=True)
            for i in range(config.workers)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Block until every worker has loaded the function.

        Raises:
            RewardError: it cannot be loaded, or does not take verl's arguments.
        """
        for future in self._ready:
            future.result()

    def score_one(self, prompt: Prompt, sample: Sample) -> "Future[Sample]":
        """Start to score one sample. The future gives it with its outcome set, or RewardError. One
        that has an outcome, as its rollout failed, keeps it."""
        if sample.reward_error is not None:
            future: Future[Sample] = Future()
            future.set_result(sample)
            return future
        request = {
            "data_source": prompt.data_source,
            "solution_str": sample.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        job = _Job(_line(request), sample, Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._jobs.put(job)
        return job.future

    def scoring(self) -> "Scoring":
        """Samples to be scored together, though they come one after the other."""
        return Scoring(self)

    def close(self) -> None:
        """Kill the workers. What is not scored yet ends with RewardError."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)
            for worker in self._workers.values():
                worker.kill()
        for thread in self._threads:
            thread.join()

    def _start(self, index: int) -> None:
        """Raises: RewardError."""
        with self._lock:
            if self._closed:
                raise RewardError(CLOSED)
            try:
                worker = self._workers[index] = _Worker(self._output)
            except OSError as error:
                raise RewardError(f"reward worker {index} cannot be started: {error}") from None
        request = {
            "function": self._function,
            "kwargs": self._config.kwargs,
            "memory_bytes": int(self._config.memory_gb * 1e9),
        }
        try:
            reply = worker.ask(_line(request), START_TIMEOUT_S)
        except TimeoutError:
            reply = {"error": f"loading it took longer than {START_TIMEOUT_S:g} s"}
        except _WorkerGone as gone:
            reply = {"error": f"while loading it {gone}"}
        if "error" in reply:
            self._stop(index)
            raise RewardError(f"reward.function {self._config.function}: {reply['error']}")

    def _stop(self, index: int) -> None:
        with self._lock:
            self._workers.pop(index).release()

    def _supervise(self, index: int) -> None:
        failure = None
        try:
            self._start(index)
            self._ready[index].set_result(None)
        except RewardError as error:
            failure = error
            self._ready[index].set_exception(error)
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            if failure is None:
                try:
                    job.future.set_result(self._outcome(index, job))
                except Exception as error:  # a bug here must end score(), not hang it
                    failure = error
            if failure is not None:
                job.future.set_exception(failure)
        if index in self._workers:
            self._stop(index)

    def _outcome(self, index: int, job: _Job) -> Sample:
        """Raises: RewardError: the worker died of the sample and no other could be started."""
        reply: dict[str, Any] = {}
        for _ in range(MOST_TRIES):
            try:
                reply = self._workers[index].ask(job.request, self._config.timeout_s)
                break
            except TimeoutError:
                reply = {"error": f"no result within {self._config.timeout_s:g} s"}
                self._replace(index)
                break
            except _WorkerGone as gone:
                reply = {"error": str(gone)}
                self._replace(index)
        return replace(
            job.sample,
            reward=reply.get("reward"),
            reward_info=reply.get("info", {}),
            reward_error=reply.get("error"),
        )

    def _replace(self, index: int) -> None:
        self._stop(index)
        self._start(index)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()
