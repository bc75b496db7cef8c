"""A wish to stop early and in order: Slurm's warning before the time limit, for one.

SIGUSR1 asks for it. What has begun is given up if that loses nothing (sampling), else finished (an
update); then the run writes a checkpoint and ends with an exit code that says so.
"""

import signal
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StopNow(BaseException):
    """Raised in the main thread where giving up loses nothing. No Exception, so that nothing that
    handles failures takes it for one."""


class StopRequest:
    """Listens for SIGUSR1 while it is entered; in the main thread only."""

    def __init__(self) -> None:
        self.asked = False
        self._may_interrupt = False

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

    def _ask(self, *_) -> None:
        self.asked = True
        if self._may_interrupt:
            self._may_interrupt = False
            raise StopNow

    def __enter__(self) -> "StopRequest":
        signal.signal(signal.SIGUSR1, self._ask)
        return self

    def __exit__(self, *_) -> None:
        # A second warning must not end the program while it closes what it owns.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
