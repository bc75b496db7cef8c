"""Where the time of a process goes: spans within spans, by a clock that never jumps."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

UNACCOUNTED = "unaccounted"
_END = object()


@dataclass(frozen=True, slots=True)
class Span:
    """`path` is its name after those of the spans around it: "update/optimizer". Clock readings in
    seconds. `track` is "" for what the process does itself, one thing after the other; others hold
    what goes on at the same time, such as requests to a server."""

    path: str
    start: float
    end: float
    track: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Stretch:
    """What ended from one `Spans.take` to the next."""

    start: float
    end: float
    spans: list[Span]

    def seconds(self) -> dict[str, float]:
        """Seconds by path. What the parts of a path leave of it is PATH/unaccounted, and what the
        outermost ones leave of the stretch "unaccounted", so that each level adds up.

        Example, of 10 s with 8 s of "update", 5 s thereof in "update/optimizer"::

            {"update": 8, "update/optimizer": 5, "update/unaccounted": 3, "unaccounted": 2}
        """
        seconds: dict[str, float] = {}
        for span in self.spans:
            if not span.track:
                seconds[span.path] = seconds.get(span.path, 0.0) + span.seconds
        left = {"": self.end - self.start}
        for path, value in seconds.items():
            around = path.rpartition("/")[0]
            left[around] = left.get(around, seconds.get(around, 0.0)) - value
        return seconds | {
            f"{path}/{UNACCOUNTED}" if path else UNACCOUNTED: value for path, value in left.items()
        }


class Spans:
    """Notes spans of one thread, at the cost of two readings of the clock each.

    Example::

        spans = Spans()
        with spans.of("update"):
            with spans.of("optimizer"):
                ...
        spans.take().seconds()  # of "update", "update/optimizer" and what they leave
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.done: list[Span] = []
        self.taken: Stretch | None = None
        self._open: list[tuple[str, float]] = []
        self._since = clock()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The block is a span of the one that is open, or an outermost one."""
        depth = len(self._open)
        self.begin(name)
        try:
            yield
        finally:
            # Those within that an error has left open, too.
            while len(self._open) > depth:
                self.end()

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items; a span for the wait for each."""
        iterator = iter(items)
        while True:
            with self.of(name):
                item: Any = next(iterator, _END)
            if item is _END:
                return
            yield item

    def begin(self, name: str) -> None:
        """Where a block would not do; `end` ends what was begun last."""
        path = f"{self._open[-1][0]}/{name}" if self._open else name
        self._open.append((path, self.clock()))

    def end(self) -> None:
        path, start = self._open.pop()
        self.done.append(Span(path, start, self.clock()))

    @contextmanager
    def on(self, track: str, name: str, **about: Any) -> Iterator[dict[str, Any]]:
        """The block is a span of another track; the dict is what is shown with it."""
        start = self.clock()
        try:
            yield about
        except BaseException as error:
            about["error"] = type(error).__name__
            raise
        finally:
            self.done.append(Span(name, start, self.clock(), track, about))

    def add_earlier(self, name: str, start: float) -> None:
        """What went on from `start` until this was made."""
        self.done.append(Span(name, start, self._since))
        self._since = start

    def take(self) -> Stretch:
        """What has ended since the last time, or since the beginning; also kept as `taken`."""
        assert not self._open, f"{self._open[-1][0]} is not done"
        now = self.clock()
        self.taken = Stretch(self._since, now, self.done)
        self.done, self._since = [], now
        return self.taken
