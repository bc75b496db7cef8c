"""What goes on, beside the lines that stay: drawn below them on a terminal, said every half minute
elsewhere."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from megatron_opo.observe.text import clock

BAR_WIDTH = 20
DRAWN_PER_SECOND = 4
# What is asked of others (the servers' logs) while a phase goes on.
ASK_EVERY_S = 2.0
# For people; a phase that is not here is shown under its own name, which timing_s/ has, too.
TITLES = {
    "imports": "load packages",
    "data": "load data",
    "servers": "start servers",
    "model": "load model",
    "probe": "compare servers and trainer",
    "sync": "send weights",
    "hand_over": "hand memory over",
    "reward": "score",
    "check_ranks": "compare ranks",
    "export": "export model",
    "policy_shift": "measure policy shift",
}


@dataclass(frozen=True)
class Phase:
    """`total` None: nobody knows; `detail` says what is counted. `ask` is asked for more now and
    then, from another thread."""

    name: str
    began: float
    done: float = 0
    total: float | None = None
    detail: str = ""
    ask: Callable[[], str] | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)


class Ticker:
    """The phase that goes on, and how far the run is."""

    def __init__(self) -> None:
        self.phase: Phase | None = None
        self.notice = ""
        self.steps_done, self.of_what = 0, "steps"
        self.seconds_left: float | None = None
        self._asked: tuple[Phase | None, float, str] = (None, 0.0, "")

    def start(self, name: str) -> None:
        self.phase = Phase(name, time.monotonic())

    def advance(self, done: float, total: float | None, detail: str) -> None:
        if self.phase is not None:
            self.phase = replace(self.phase, done=done, total=total, detail=detail)

    def ask(self, question: Callable[[], str]) -> None:
        if self.phase is not None:
            self.phase = replace(self.phase, ask=question)

    def progress(self, phase: Phase, now: float) -> str:
        """Such as "120/256 samples, 5,301 tokens/s"; "" when nothing is known."""
        counted = f"{phase.done:,.0f}/{phase.total:,.0f} " if phase.total else ""
        more = self._more(phase, now)
        return ", ".join(filter(None, [(counted + phase.detail).strip(), more]))

    def _more(self, phase: Phase, now: float) -> str:
        if phase.ask is None:
            return ""
        of, at, said = self._asked
        if not said or of is None or of.began != phase.began or now - at >= ASK_EVERY_S:
            said = phase.ask()
            self._asked = (phase, now, said)
        return said


def bar(done: float, total: float, width: int = BAR_WIDTH, ascii_only: bool = False) -> str:
    full = round(width * min(1.0, max(0.0, done / total)))
    filled, empty = ("#", "-") if ascii_only else ("\u2501", "\u2500")
    return filled * full + empty * (width - full)


def drawn_lines(
    ticker: Ticker, total_steps: int, now: float, ascii_only: bool = False
) -> list[str]:
    """One of the run, unless it has no steps, and one of the phase. They may be too long."""
    phase, lines = ticker.phase, [ticker.notice] if ticker.notice else []
    if total_steps:
        shown = bar(ticker.steps_done, total_steps, ascii_only=ascii_only)
        left = "" if ticker.seconds_left is None else f"  {clock(ticker.seconds_left)} left"
        lines.append(f"  {shown}  {ticker.steps_done} of {total_steps} {ticker.of_what}{left}")
    if phase is None:
        return lines
    shown = bar(phase.done, phase.total, ascii_only=ascii_only) + "  " if phase.total else ""
    progress = ticker.progress(phase, now)
    title = f"{phase.title}: {progress}" if progress else phase.title
    lines.append(f"  {shown}{clock(now - phase.began)}  {title}")
    return lines


class Drawn:
    """Draws below the lines of a terminal until `close`."""

    def __init__(self, console: RichConsole, ticker: Ticker, total_steps: int):
        self._console, self._ticker, self._total = console, ticker, total_steps
        self._ascii = not console.encoding.lower().startswith("utf")
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            transient=True,
            refresh_per_second=DRAWN_PER_SECOND,
            # What goes to a file or a program must not be drawn instead.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        # rich hides it, and nobody would show it again after the process was killed.
        console.show_cursor(True)

    def refresh(self) -> None:
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        lines = drawn_lines(self._ticker, self._total, time.monotonic(), self._ascii)
        width = self._console.width - 1  # the last column may break the line
        return Group(*(Text(line[:width], no_wrap=True, overflow="crop") for line in lines))


class Beats:
    """Calls `say` about once a second, in a thread, until `close`."""

    def __init__(self, say: Callable[[float], None]):
        self._closed = threading.Event()
        self._say = say
        self._thread = threading.Thread(target=self._run, daemon=True, name="progress")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(1.0):
            self._say(time.monotonic())


def is_terminal(stream: TextIO, term: str | None) -> bool:
    """Whether it can be drawn on."""
    return stream.isatty() and term not in ("dumb", "unknown")
