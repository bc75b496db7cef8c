"""The terminal: live progress on a TTY, plain lines without colour codes anywhere else."""

import math
import os
import sys
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

# (heading, metric, width): what one line about a step shows.
COLUMNS = (
    ("reward", "critic/rewards/mean", 8),
    ("length", "response_length/mean", 8),
    ("entropy", "actor/entropy", 8),
    ("logp gap", "on_policy/logprob_gap_max", 10),
    ("generate", "timing_s/generate", 9),
    ("score", "timing_s/reward", 7),
    ("update", "timing_s/update", 7),
    ("sync", "timing_s/sync", 7),
)
STEP_WIDTH = 5
LEFT_WIDTH = 9
HEADER_EVERY = 30


def duration(seconds: float) -> str:
    """Seconds as a person would say them: 4.2s, 3m20s, 2h05m, 1d03h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def number(value: float | None) -> str:
    """A metric in at most 8 characters; "-" when there is none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.1e}"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.3f}" if size < 10 else f"{value:.1f}"


def header_line() -> str:
    cells = "".join(f"{heading:>{width}}" for heading, _, width in COLUMNS)
    return f"{'step':>{STEP_WIDTH}}{cells}{'left':>{LEFT_WIDTH}}"


def step_line(step: int, metrics: dict[str, float], seconds_left: float | None) -> str:
    """One step under `header_line()`."""
    cells = ""
    for _, name, width in COLUMNS:
        value = metrics.get(name)
        if value is not None and name.startswith("timing_s/"):
            cells += f"{duration(value):>{width}}"
        else:
            cells += f"{number(value):>{width}}"
    left = "-" if seconds_left is None else duration(seconds_left)
    return f"{step:>{STEP_WIDTH}}{cells}{left:>{LEFT_WIDTH}}"


def summary(rows: list[tuple[str, str]], stream: TextIO | None = None) -> None:
    """Print what is about to run as two aligned columns: a label and its value."""
    stream = stream or sys.stdout
    print(summary_text(rows), file=stream, flush=True)


def summary_text(rows: list[tuple[str, str]]) -> str:
    width = max((len(label) for label, _ in rows), default=0)
    indent = "\n" + " " * (width + 4)
    return "\n".join(
        f"  {label:<{width}}  {indent.join(value.splitlines() or [''])}" for label, value in rows
    )


@dataclass(frozen=True)
class _Live:
    progress: Progress
    run: TaskID
    phase: TaskID


class Console:
    """Prints lines, and on a TTY keeps live progress below them until `close`: of the steps, unless
    there are to be 0, and of the phase that goes on."""

    def __init__(self, total_steps: int, *, quiet: bool = False, stream: TextIO | None = None):
        self.quiet = quiet
        self.stream = stream or sys.stdout
        self.total_steps = total_steps
        self.lines_since_header: int | None = None
        self.steps_done = 0
        self.live: _Live | None = None
        # rich would also take FORCE_COLOR for a terminal, and fill a CI log with control codes.
        terminal = self.stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self.rich = RichConsole(file=self.stream, highlight=False) if terminal else None

    def line(self, text: str, style: str = "") -> None:
        if self.quiet:
            return
        self._print(text, style)

    def warn(self, text: str) -> None:
        """Shown even when quiet: a warning nobody sees is none."""
        self._print(f"warning: {text}", "yellow")

    def step(self, step: int, metrics: dict[str, float], seconds_left: float | None) -> None:
        every = HEADER_EVERY if self.rich else math.inf
        if self.lines_since_header is None or self.lines_since_header >= every:
            self.line(header_line(), "bold")
            self.lines_since_header = 0
        self.line(step_line(step, metrics, seconds_left))
        self.lines_since_header += 1
        self.steps_done = step
        if self.live is not None:
            self.live.progress.update(self.live.run, completed=self.steps_done)

    def start_phase(self, name: str) -> None:
        if self.quiet or self.rich is None:
            return
        live = self.live = self.live or self._make_live(self.rich)
        shown = f"{self.steps_done} of {self.total_steps} steps"
        live.progress.update(live.run, description=shown)
        live.progress.reset(
            live.phase, description=name, total=None, completed=0, detail="", visible=True
        )
        live.progress.start()

    def advance(self, done: float, total: float | None, detail: str) -> None:
        if self.live is not None:
            self.live.progress.update(
                self.live.phase, completed=done, total=total, detail=escape(detail)
            )

    def end_phase(self) -> None:
        if self.live is not None:
            self.live.progress.update(self.live.phase, visible=False)

    def close(self) -> None:
        """Take the live progress away; lines printed so far stay."""
        if self.live is not None:
            self.live.progress.stop()
            self.live = None

    def _print(self, text: str, style: str) -> None:
        if self.rich is None:
            print(text, file=self.stream, flush=True)
        else:
            self.rich.print(text, style=style, markup=False, soft_wrap=True)

    def _make_live(self, console: RichConsole) -> _Live:
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        run = progress.add_task(
            "",
            total=self.total_steps,
            completed=self.steps_done,
            detail="",
            visible=self.total_steps > 0,
        )
        return _Live(progress, run, phase=progress.add_task("", total=None, detail=""))
