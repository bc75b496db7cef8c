"""Writes checkpoints while training goes on.

What a checkpoint holds is copied to the host at once, which training waits for. A thread of each
rank writes the copy; when all are done, that of rank 0 completes the directory
(`checkpoint_files`). How it went the ranks find out together between two steps.
"""

import inspect
import json
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata

from megatron_opo.actor.checkpoint import (
    METADATA,
    layout_of,
    optimizer_states,
    random_state_file,
    sharded_state,
    without_deprecations,
)
from megatron_opo.actor.parallel import Parallel
from megatron_opo.actor.random_state import random_state
from megatron_opo.actor.step import Actor
from megatron_opo.checkpoint_files import (
    digest,
    drop_old,
    make_partial,
    partial_directory,
    publish,
    write_durably,
)
from megatron_opo.errors import CheckpointError, OpoError
from megatron_opo.recipe import Recipe
from megatron_opo.runs import CHECKPOINTS, check_attempt
from megatron_opo.spmd import Driver
from megatron_opo.weights.streaming import flush_to_disk

# How much longer than the first rank the last one may write.
TIMEOUT = timedelta(hours=1)


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    All ranks construct it and call its methods together. A failure on any of them is a
    CheckpointError on all. Use it as a context manager: when the block ends by an error that a user
    may meet, what is being written is completed; otherwise given up.
    """

    def __init__(self, recipe: Recipe, driver: Driver, parallel: Parallel, version: int):
        """`version` is that of the checkpoint the run resumes from, or 0; later that of the newest
        one begun."""
        self.recipe = recipe
        self.driver = driver
        self.parallel = parallel
        self.version = version
        # Of the threads that write: they agree with each other while training does so, too.
        group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._group: dist.ProcessGroup = group
        self._writing: _Writing | None = None

    def start(self, actor: Actor, state: Callable[[], dict[str, Any]]) -> None:
        """Begin the checkpoint of the actor's version; waits for the one before.

        `state` is called on rank 0: what else the checkpoint's state file holds.
        """
        self.wait()
        partial = partial_directory(self.recipe.run_path, actor.version)
        self.driver.run(lambda: check_attempt(self.recipe.run_path))
        with _on_all_ranks(partial, self.parallel.control):
            if self.driver.is_here:
                make_partial(partial)
        try:
            plan = _plan(actor, partial)
        except OSError as error:
            raise _failed(partial, _reason(error, partial)) from error
        contents = {
            "version": actor.version,
            "layout": layout_of(actor),
            "recipe": self.recipe.to_show(),
        }
        if self.driver.is_here:
            contents |= state()
        self._writing = _Writing(self.recipe, partial, plan, contents, self._group)
        self._writing.start()
        self.version = actor.version

    def poll(self) -> dict[str, float]:
        """Whether what was begun is complete; never waits for that.

        Returns metrics on rank 0 if it is, once, else {}: checkpoint/write_seconds, the seconds
        from its start to the last rank's last byte, and checkpoint/bytes.
        """
        if self._writing is None:
            return {}
        done = torch.tensor([not self._writing.is_alive()])
        dist.all_reduce(done, dist.ReduceOp.MIN, group=self.parallel.control)
        return self.wait() if done.item() else {}

    def wait(self) -> dict[str, float]:
        """As `poll`, but when it is done."""
        if self._writing is None:
            return {}
        writing, self._writing = self._writing, None
        writing.join()
        if writing.error is not None:
            raise writing.error
        return writing.metrics

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._writing is not None:
            if not isinstance(error, OpoError):
                self._writing.give_up()
            self._writing.join()


@contextmanager
def _on_all_ranks(partial: Path, group: dist.ProcessGroup) -> Iterator[None]:
    """A block of all ranks that ends with a CheckpointError on all if it fails on any."""
    error, reason = None, None
    try:
        yield
    except Exception as caught:
        error, reason = caught, _reason(caught, partial)
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if not failed:
        return
    if group.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    if isinstance(error, OpoError):
        raise error
    raise _failed(partial, failed[0]) from error


def _failed(partial: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {partial}: cannot be written ({reason}); earlier checkpoints are untouched. "
        "Free space or change run_dir, and start again"
    )


def _reason(error: BaseException, partial: Path) -> str:
    """In one line. A full disk is seldom in the words of the error that it ends in."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    first = next((cause for cause in causes if isinstance(cause, OSError)), error)
    text = (str(first).strip() or repr(first)).splitlines()[-1]
    with suppress(OSError):
        text += f"; {shutil.disk_usage(partial.parents[1]).free / 1e6:,.0f} MB were free there"
    return text


@dataclass
class _Part:
    """What a rank has written: Megatron's account of it, and digests by file name."""

    results: list[Any] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Plan:
    """What this rank writes: `buckets` as Megatron has them, (path, file name, (bytes, tensors))
    for each file; `metadata`, on rank 0, says which tensor is where."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None
    buckets: list[Any] = field(default_factory=list)


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Keeps what Megatron's save has planned. Its own way to complete a save leaves the other ranks
    waiting when rank 0 meets an error."""

    planned: tuple[FileSystemWriterAsync, Metadata | None]

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, *strategy):
        self.planned = (writer, save_state_dict_ret[1])
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *strategy)


def _plan(actor: Actor, partial: Path) -> _Plan:
    """Everything that ranks must do together, and a copy of this rank's part on the host."""
    # Megatron would start a process only to hold this queue, which outlives a killed rank and which
    # a signal to all processes of the job ends. Nobody puts anything into it here.
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
    strategy = _PlanOnly("torch_dist", 1)
    options: dict[str, Any] = {}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    with without_deprecations():
        dist_checkpointing.save(
            sharded_state(actor, is_loading=False),
            str(partial),
            strategy,  # pyright: ignore[reportArgumentType]
            async_sharded_save=True,
            content_metadata=METADATA,
            **options,
        )
    writer, metadata = strategy.planned
    buckets = FileSystemWriterAsync.preload_tensors(writer.write_buckets or [])
    live = _live_storages(actor)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    return _Plan(
        writer,
        metadata,
        [
            (path, name, (objects, deque((item, own(tensor)) for item, tensor in tensors)))
            for path, name, (objects, tensors) in buckets
        ],
    )


def _live_storages(actor: Actor) -> set[int]:
    """Where what training changes lies. On a CPU, `Tensor.cpu` is no copy."""
    tensors = [t for module in actor.modules for t in [*module.parameters(), *module.buffers()]]
    for optimizer, parameter in optimizer_states(actor):
        values = optimizer.state[parameter].values()
        tensors += [parameter, *(value for value in values if isinstance(value, torch.Tensor))]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class _GivenUp(BaseException):
    """Ends the thread that writes."""


class _Writing(threading.Thread):
    """A checkpoint on its way to the disk: this rank's part, and on rank 0 what makes it whole.

    When it has ended, `error` or `metrics` (on rank 0) say how.
    """

    def __init__(
        self,
        recipe: Recipe,
        partial: Path,
        plan: "_Plan",
        contents: dict[str, Any],
        group: dist.ProcessGroup,
    ):
        super().__init__(name=f"writes {partial.name}")
        self.recipe = recipe
        self.partial = partial
        self.plan = plan
        self.contents = contents
        self.group = group
        self.error: BaseException | None = None
        self.metrics: dict[str, float] = {}
        self._random = json.dumps(random_state()).encode()
        self._part = _Part()
        self._given_up = threading.Event()

    def run(self) -> None:
        try:
            begun = time.monotonic()
            with _on_all_ranks(self.partial, self.group):
                self._write()
            self._part.seconds = time.monotonic() - begun
            is_first = self.group.rank() == 0
            parts: list[Any] = [None] * self.group.size()
            dist.gather_object(self._part, parts if is_first else None, group=self.group)
            with _on_all_ranks(self.partial, self.group):
                if is_first:
                    check_attempt(self.recipe.run_path)
                    self._publish(parts)
                    self.metrics = {
                        "checkpoint/write_seconds": max(part.seconds for part in parts),
                        "checkpoint/bytes": float(sum(part.bytes for part in parts)),
                    }
        except BaseException as error:
            self.error = error

    def give_up(self) -> None:
        """End soon, with what is written left as it is."""
        self._given_up.set()

    def _publish(self, parts: "list[_Part]") -> None:
        assert self.plan.metadata is not None, "Megatron makes it on rank 0"
        self.plan.writer.finish(self.plan.metadata, [part.results for part in parts])
        save_config(CheckpointingConfig("torch_dist", 1), str(self.partial))
        digests = {name: value for part in parts for name, value in part.digests.items()}
        final = self.recipe.run_path / CHECKPOINTS / f"step_{self.contents['version']}"
        publish(self.partial, final, digests, json.dumps(self.contents, indent=1).encode())
        config, best = self.recipe.checkpoint, self.contents.get("best_eval")
        drop_old(
            self.recipe.run_path,
            keep=config.keep,
            keep_every=config.keep_every,
            best=best["step"] if best and config.keep_best else None,
        )

    def _write(self) -> None:
        while self.plan.buckets:
            path, name, (objects, tensors) = self.plan.buckets.pop()
            self._part.results += self._write_bucket(path, name, objects, tensors)
            self._wrote(Path(path))
        path = self.partial / random_state_file(self.group.rank())
        write_durably(path, self._random)
        self._wrote(path)
        flush_to_disk([self.partial])

    def _write_bucket(self, path: str, name: str, objects: list, tensors: deque) -> list[Any]:
        """A file, by the function that Megatron's own processes run; where its tensors lie."""
        transforms = (
            [self.plan.writer.transforms] if hasattr(self.plan.writer, "transforms") else []
        )
        # Between its processes Megatron has other queues.
        answers: Any = queue.Queue()
        tasks: Any = queue.Queue()
        tasks.put(0)
        bucket: Any = (path, name, (objects, self._one_by_one(tensors)))
        FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, answers, tasks, True)
        _, results = answers.get_nowait()
        if isinstance(results, BaseException):
            raise results
        return results

    def _one_by_one(self, tensors: deque) -> Iterator[tuple[Any, torch.Tensor]]:
        """Each is freed when it is written."""
        while tensors:
            if self._given_up.is_set():
                raise _GivenUp
            yield tensors.popleft()

    def _wrote(self, path: Path) -> None:
        self._part.digests[path.name] = digest(path)
        self._part.bytes += path.stat().st_size
