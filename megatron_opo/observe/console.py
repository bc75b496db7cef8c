"""What a command says while it works: lines, live progress on a terminal, or JSON for programs."""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from rich.console import Console as RichConsole

from megatron_opo.observe.live import Beats, Drawn, Ticker, is_terminal
from megatron_opo.observe.text import (
    STEP_WIDTH,
    duration,
    header_line,
    step_line,
    summary_text,
)

HEADER_EVERY = 30
BEAT_EVERY_S = 30.0
Mode = Literal["lines", "quiet", "json"]


def summary(rows: list[tuple[str, str]], stream: TextIO | None = None) -> None:
    """Print what is about to run, or what came of it, as two aligned columns."""
    stream = stream or sys.stdout
    print(summary_text(rows), file=stream, flush=True)


@contextmanager
def waiting(name: str) -> Iterator["Console"]:
    """Shows on standard error that `name` goes on, where what a command finds goes to standard
    output."""
    console = Console(0, stream=sys.stderr)
    try:
        console.start_phase(name)
        yield console
    finally:
        console.close()


class Console:
    """Says what happens, in one of three modes, until `close`:

    lines  text. A terminal also shows the phase that goes on, and how many of `total_steps` steps
           are done, below the lines; what is no terminal gets a line about a phase every half
           minute, and no control codes.
    quiet  warnings and the last line alone.
    json   an object a line: {"event", "time" (UTC), ...}, see docs/terminal.md.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        quiet: bool = False,
        mode: Mode | None = None,
        stream: TextIO | None = None,
    ):
        self.mode: Mode = mode or ("quiet" if quiet else "lines")
        self.stream = stream or sys.stdout
        self.total_steps = total_steps
        self.lines_since_header: int | None = None
        self.ticker = Ticker()
        self._beats: Beats | None = None
        self._last_beat = 0.0
        self._drawn: Drawn | None = None
        self._writing = threading.Lock()
        # rich would also take FORCE_COLOR for a terminal, and fill a CI log with control codes.
        terminal = self.mode != "json" and is_terminal(self.stream, os.environ.get("TERM"))
        self.rich = RichConsole(file=self.stream, highlight=False) if terminal else None

    @property
    def is_json(self) -> bool:
        return self.mode == "json"

    def line(self, text: str, style: str = "") -> None:
        """Text for people; programs are told by events."""
        if self.mode == "lines":
            self._print(text, style)

    def event(self, event: str, **facts: Any) -> None:
        """For programs; `facts` hold what JSON can, and no NaN."""
        if self.is_json:
            stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._write(json.dumps({"event": event, "time": stamp, **facts}, allow_nan=False))

    def note(self, text: str) -> None:
        self.line(text)
        self.event("note", text=text)

    def warn(self, text: str) -> None:
        """Shown even when quiet: a warning nobody sees is none."""
        if self.is_json:
            self.event("warning", text=text)
        else:
            first, *more = text.splitlines() or [""]
            self._print("\n".join([f"warning: {first}", *(f"  {line}" for line in more)]), "yellow")

    def notice(self, text: str) -> None:
        """Until the end, where something is drawn; else once, to standard error. A signal's handler
        may call it: nothing is printed, and no lock taken."""
        if self._drawn is not None:
            self.ticker.notice = text
        else:
            os.write(2, f"{text}\n".encode())

    def last(self, text: str, **facts: Any) -> None:
        """The last line of a run that has ended in order, also when quiet."""
        self.event("finished", text=text, **facts)
        if not self.is_json:
            self._print(text, "bold")

    def start(self, rows: list[tuple[str, str]], **facts: Any) -> None:
        """What is about to run."""
        self.line(summary_text(rows))
        self.event("start", **facts, summary=dict(rows))

    def step(self, step: int, metrics: dict[str, float], seconds_left: float | None) -> None:
        every = HEADER_EVERY if self.rich else math.inf
        if self.lines_since_header is None or self.lines_since_header >= every:
            self.line(header_line(), "bold")
            self.lines_since_header = 0
        self.line(step_line(step, metrics, seconds_left))
        self.lines_since_header += 1
        self.ticker.steps_done, self.ticker.seconds_left = step, seconds_left

    def start_phase(self, name: str) -> None:
        self.ticker.start(name)
        if self.mode == "quiet":
            return
        if self.rich is not None:
            self._drawn = self._drawn or Drawn(self.rich, self.ticker, self.total_steps)
        else:
            self._beats = self._beats or Beats(self.beat)

    def advance(self, done: float, total: float | None, detail: str = "") -> None:
        """How far the phase is: `done` of `total` (None: nobody knows) things; `detail` says what
        they are."""
        self.ticker.advance(done, total, detail)

    def ask(self, question: Callable[[], str]) -> None:
        """Have `question` asked, from another thread, for what else is known of the phase."""
        self.ticker.ask(question)

    def refresh(self) -> None:
        """Draw now, not only the next time."""
        if self._drawn is not None:
            self._drawn.refresh()

    def end_phase(self) -> None:
        self.ticker.phase = None

    def beat(self, now: float) -> None:
        """Where there is no terminal: say what goes on, if that has gone on for long."""
        phase = self.ticker.phase
        if phase is None or now - max(phase.began, self._last_beat) < BEAT_EVERY_S:
            return
        self._last_beat = now
        seconds = now - phase.began
        progress = self.ticker.progress(phase, now)
        self.event(
            "progress",
            phase=phase.name,
            seconds=round(seconds, 1),
            done=phase.done,
            total=phase.total,
            text=progress,
        )
        about = f": {progress}" if progress else ""
        place = self.ticker.steps_done + 1 if self.lines_since_header else ""
        self.line(f"{place:>{STEP_WIDTH}}  {phase.title}, {duration(seconds)}{about}")

    def close(self) -> None:
        """Take the live progress away; lines printed so far stay."""
        self.ticker.phase = None
        if self._drawn is not None:
            self._drawn.close()
            self._drawn = None
        if self._beats is not None:
            self._beats.close()
            self._beats = None

    def _print(self, text: str, style: str) -> None:
        if self.rich is None:
            self._write(text)
        else:
            style = "" if self.rich.no_color else style
            self.rich.print(text, style=style, markup=False, soft_wrap=True)

    def _write(self, text: str) -> None:
        with self._writing:
            self.stream.write(text + "\n")
            self.stream.flush()
