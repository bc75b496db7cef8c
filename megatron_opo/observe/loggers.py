"""Loggers beside metrics.jsonl: what they have in common, and how a run never waits for one.

A logger is a function `start(run: LoggedRun) -> Logger` of `observe.logger_backends`. Each runs in
a thread of its own: what fails or hangs in there costs its curve, never the run.
"""

import importlib.util
import io
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_opo.errors import UnfitEnvironmentError

# Modules that each needs, and what to install.
NEEDS = {
    "tensorboard": (("tensorboard",), "tensorboard"),
    "wandb": (("wandb",), "wandb"),
    "mlflow": (("mlflow",), "mlflow-skinny"),
    "trackio": (("trackio",), "trackio"),
}
# Of mlflow without a server.
MLFLOW_DATABASE = (("mlflow", "sqlalchemy", "alembic"), "mlflow-skinny sqlalchemy alembic")
START_SECONDS = 10.0
CLOSE_SECONDS = 30.0
# Records that may wait for a logger; at a step a second that is more than half an hour.
MOST_WAITING = 2048


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told of a run.

    `run_id` is the same in every start of the run, and new when it starts anew (`first_step` 0).
    `kept` are the records of metrics.jsonl up to `first_step`: what was logged past that is
    trained again.
    """

    path: Path
    project: str
    run_id: str
    recipe: dict[str, Any]
    first_step: int
    kept: Sequence[dict[str, Any]] = ()

    @property
    def name(self) -> str:
        return self.path.name


class Logger(Protocol):
    """Where one is written to is `place`, for people."""

    place: str

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Steps never decrease; an evaluation has that of the policy version."""
        ...

    def close(self, failed: bool) -> None: ...


def check_loggers(names: Sequence[str]) -> None:
    """Are the packages of these loggers installed?

    Raises:
        UnfitEnvironmentError: one is not; the text says what to install.
    """
    problems = []
    for name in names:
        modules, packages = NEEDS[name]
        if name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            modules, packages = MLFLOW_DATABASE
        missing = [module for module in modules if not is_installed(module)]
        if missing:
            problems.append(
                f"log.loggers names {name}, but {', '.join(missing)} cannot be imported: `pip "
                f"install {packages}`, or leave {name} out (metrics.jsonl is always written)"
            )
    if problems:
        raise UnfitEnvironmentError("\n".join(problems))


def is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # what a module without a spec gives
        return False
    # A directory of that name, as wandb itself leaves behind, is a module without an origin.
    return spec is not None and spec.origin is not None


class Background:
    """A logger in a thread of its own."""

    def __init__(self, name: str, start: Callable[[LoggedRun], Logger], run: LoggedRun):
        self.name = name
        self.place = ""
        self.started = threading.Event()
        self._error: str | None = None
        self._told = False
        self._failed = False
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(
            target=self._work, args=(start, run), name=f"log to {name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> str | None:
        """Returns at once. What is wrong with the logger, the first time."""
        if self._error is None:
            try:
                self._waiting.put_nowait((step, metrics))
            except queue.Full:
                self._error = f"it has not taken {MOST_WAITING} records: does its server answer?"
        return self.news()

    def close(self, failed: bool) -> str | None:
        """Have everything written, for up to CLOSE_SECONDS. As `log`."""
        self._failed = failed
        try:
            self._waiting.put_nowait(None)
            self._thread.join(CLOSE_SECONDS)
        except queue.Full:
            pass  # told already, by `log`
        if self._thread.is_alive() and self._error is None:
            self._error = (
                f"it did not finish in {CLOSE_SECONDS:.0f} s; its last steps may be missing"
            )
        return self.news()

    def news(self) -> str | None:
        """As `log`."""
        if self._error is None or self._told:
            return None
        self._told = True
        return (
            f"log.loggers: {self.name} failed, and the run goes on without it (metrics.jsonl has "
            f"everything): {self._error}"
        )

    def _work(self, start: Callable[[LoggedRun], Logger], run: LoggedRun) -> None:
        # Of any kind: libraries that find no terminal to ask for a login call sys.exit.
        try:
            logger = start(run)
            self.place = logger.place
            self.started.set()
            while (record := self._waiting.get()) is not None:
                logger.log(*record)
            logger.close(self._failed)
        except BaseException as error:
            self._error = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            self.started.set()


class Loggers:
    """Those of a run. What is wrong with one goes to `warn`, once."""

    def __init__(self, names: Sequence[str], run: LoggedRun, warn: Callable[[str], None]):
        """
        Raises:
            UnfitEnvironmentError: as of `check_loggers`.
        """
        check_loggers(names)
        self._warn = warn
        self._running: list[Background] = []
        if names:
            from megatron_opo.observe.logger_backends import BACKENDS

            # Some greet with a few lines, which would tear the progress bar apart.
            with redirect_stdout(io.StringIO()):
                self._running = [Background(name, BACKENDS[name], run) for name in names]
                until = time.monotonic() + START_SECONDS
                for each in self._running:
                    each.started.wait(max(0.0, until - time.monotonic()))
            for each in self._running:
                self._tell(each.news())

    @property
    def places(self) -> str:
        """For people: "wandb: runs/a/wandb (offline); ..."."""
        return "; ".join(f"{each.name}: {each.place}" for each in self._running if each.place)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for each in self._running:
            self._tell(each.log(step, metrics))

    def close(self, failed: bool = False) -> None:
        running, self._running = self._running, []
        with redirect_stdout(io.StringIO()):
            news = [each.close(failed) for each in running]
        for problem in news:
            self._tell(problem)

    def _tell(self, problem: str | None) -> None:
        if problem:
            self._warn(problem)
