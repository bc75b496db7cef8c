"""Profiles of single steps, as the recipe's section `profile` asks for them.

What fails here is a warning: training goes on.
"""

import json
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from megatron_opo.desk import Desk, phase
from megatron_opo.errors import OpoError, RecipeError
from megatron_opo.observe.trace import write_trace
from megatron_opo.recipe import Recipe
from megatron_opo.spans import Span, Stretch
from megatron_opo.spmd import Driver

DIRECTORY = "profile"
# Of messages to rank 0 and back; the fastest tells most about the clocks.
ROUNDS = 8
# Of a history of GPU memory: the newest allocations, lest it fill the host's.
MOST_ENTRIES = 1_000_000


class Profiler:
    """Takes the profiles of a run; all ranks construct it and call its methods together.

    Use it as a context manager: a step that does not come to its end leaves no profile.
    """

    def __init__(self, recipe: Recipe, device: torch.device, driver: Driver):
        """Raises RecipeError: it asks for what there is on GPUs only."""
        self.config = recipe.profile
        if self.config.memory and device.type != "cuda":
            raise RecipeError(
                "profile.memory is true, but this run trains on CPUs, and its snapshots are of "
                "GPU memory: set it to false"
            )
        self.directory = (recipe.run_path / DIRECTORY).absolute()
        self.driver = driver
        self._step: int | None = None
        self._clock = (0.0, 0.0)
        self._torch: torch.profiler.profile | None = None

    def turn_to(self, step: int, desk: Desk) -> None:
        """The step before is logged: write its profile, if one was taken, and begin that of `step`,
        if one is wanted."""
        if not self.driver.is_here:
            self.driver.spans.take()  # as the log does on rank 0
        before, stretch = self._step, self.driver.spans.taken
        self._step = step if step in self.config.steps else None
        if before is None and self._step is None:
            return
        with phase(desk, self.driver, "profile"):
            if before is not None:
                assert stretch is not None
                self._end(before, stretch, desk)
            if self._step is not None:
                self._begin(self._step, desk)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._torch is not None:
            self._torch.stop()

    def _begin(self, step: int, desk: Desk) -> None:
        def begin_servers() -> None:
            if self.config.servers and desk:
                desk.rollout.start_profile(self.directory, f"step_{step}")

        def begin_memory() -> None:
            if self.config.memory:
                torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)

        def begin_torch() -> None:
            if self.config.torch:
                profiler = torch.profiler.profile()
                profiler.start()
                self._torch = profiler

        def make() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)

        self._try(step, desk, make, begin_servers, begin_memory, begin_torch)
        self._clock = ahead_of_rank_0(self.driver)

    def _end(self, step: int, stretch: Stretch, desk: Desk) -> None:
        name = f"step_{step}_rank_{self.driver.rank}"
        trace = self.directory / f"trace_step_{step}.json"
        heard = self.driver.hear(_encode(stretch, *self._clock))

        def end_torch() -> None:
            if self._torch is not None:
                profiler, self._torch = self._torch, None
                profiler.stop()
                profiler.export_chrome_trace(str(self.directory / f"torch_{name}.json.gz"))

        def end_memory() -> None:
            if self.config.memory:
                torch.cuda.memory._dump_snapshot(str(self.directory / f"memory_{name}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)

        def end_servers() -> None:
            if self.config.servers and desk:
                desk.rollout.stop_profile()

        def write() -> None:
            if heard:
                ranks, errors = zip(*map(_decode, heard), strict=True)
                write_trace(trace, step, ranks, errors)
                desk.log.note(f"profile of step {step}: {trace}, for ui.perfetto.dev")

        self._try(step, desk, end_torch, end_memory, end_servers, write)

    def _try(self, step: int, desk: Desk, *works: Callable[[], object]) -> None:
        """On each rank, whatever fails on others."""
        problems = []
        for work in works:
            try:
                work()
            except (OpoError, OSError, RuntimeError) as error:
                problems.append(str(error))
        heard = self.driver.hear("\n".join(problems))

        def warn() -> None:
            for rank, text in enumerate(heard):
                if text:
                    desk.log.warn(f"profile of step {step}, rank {rank}: {text}")

        self.driver.run(warn)


def ahead_of_rank_0(driver: Driver) -> tuple[float, float]:
    """How far this rank's clock is ahead of rank 0's, and how far off that may be, in seconds."""
    clock, group = driver.spans.clock, driver.group
    reading = torch.zeros(1, dtype=torch.float64)
    if driver.is_here:
        for rank in range(1, group.size()):
            for _ in range(ROUNDS):
                dist.recv(reading, rank, group=group)
                dist.send(reading.fill_(clock()), rank, group=group)
        return 0.0, 0.0
    found = []
    for _ in range(ROUNDS):
        asked = clock()
        dist.send(reading, 0, group=group)
        dist.recv(reading, 0, group=group)
        heard = clock()
        found.append(((heard - asked) / 2, (asked + heard) / 2 - reading.item()))
    error, ahead = min(found)
    return ahead, error


def _encode(stretch: Stretch, ahead: float, error: float) -> str:
    """With rank 0's clock."""
    spans: list[Any] = [
        (path, start - ahead, end - ahead, *rest)
        for path, start, end, *rest in map(astuple, stretch.spans)
    ]
    return json.dumps([stretch.start - ahead, stretch.end - ahead, spans, error])


def _decode(text: str) -> tuple[Stretch, float]:
    start, end, spans, error = json.loads(text)
    return Stretch(start, end, [Span(*each) for each in spans]), error
