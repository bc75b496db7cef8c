"""A wish to stop early and in order: Slurm's warning before the time limit (SIGUSR1), a job that is
cancelled or preempted (SIGTERM), ctrl-c (SIGINT).

What has begun is given up if that loses nothing (sampling), else finished (an update); then the run
writes a checkpoint and ends with an exit code that says so. Before it trains there is nothing to
write: SIGINT and SIGTERM then end it as they come, and so does a second one of these.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
# One wish may come twice: from Slurm, and from the launcher that Slurm has told, too.
SAME_WISH_SECONDS = 2.0


class StopNow(KeyboardInterrupt):
    """Raised in the main thread where giving up loses nothing. No Exception, so that nothing that
    handles failures takes it for one; and of all others asyncio lets only this kind pass."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, before there was anything to keep."""


def write_to_stderr(text: str) -> None:
    """As a signal's handler may: no buffer is touched."""
    os.write(2, f"{text}\n".encode())


class StopRequest:
    """Listens while it is entered; in the main thread only. `signum` is what asked, or None.
    `say` tells the user, from within a signal's handler."""

    def __init__(self, say: Callable[[str], None] = write_to_stderr) -> None:
        self._say = say
        self.signum: int | None = None
        self._may_interrupt = False
        self._keeps = False
        self._first_interrupt: float | None = None
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        return self.signum is not None

    def keep_from_now_on(self) -> None:
        """There is something to lose: what interrupts asks for a stop in order."""
        self._keeps = True

    def unless_asked(self, work: Callable[[], T]) -> T | None:
        """The result of `work`, or None when it was given up or not even begun."""
        if self.asked:
            return None
        try:
            self._may_interrupt = True
            result = work()
            self._may_interrupt = False
            return result
        except StopNow:
            return None
        finally:
            self._may_interrupt = False

    def _ask(self, signum: int, _frame) -> None:
        if signum in INTERRUPTS and not self._take_interrupt(signum):
            return
        if self.signum is None:
            self.signum = signum
        if self._may_interrupt:
            self._may_interrupt = False
            raise StopNow

    def _take_interrupt(self, signum: int) -> bool:
        """Whether it is the first."""
        if not self._keeps:
            raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
            self._say("stopping after a checkpoint; once more stops at once")
            return True
        if now - self._first_interrupt > SAME_WISH_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        return False

    def __enter__(self) -> "StopRequest":
        signal.signal(signal.SIGUSR1, self._ask)
        for signum in INTERRUPTS:
            # A shell starts background jobs with ctrl-c ignored; that stays so.
            if (before := signal.getsignal(signum)) != signal.SIG_IGN:
                self._before[signum] = before
                signal.signal(signum, self._ask)
        return self

    def __exit__(self, *_) -> None:
        # A second warning must not end the program while it closes what it owns.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        for signum, before in self._before.items():
            signal.signal(signum, before)  # pyright: ignore[reportArgumentType]
