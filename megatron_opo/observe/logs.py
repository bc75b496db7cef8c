"""The logs of all processes of a run as one: in the order of the times that their lines carry."""

import heapq
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from megatron_opo.errors import LogError
from megatron_opo.observe.files import FIRST_LINE, RUN_LOG

POLL_S = 0.5
STAMP = re.compile(rb"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d+)?)")


@dataclass(frozen=True)
class Line:
    """`time` sorts as text: "2026-01-31 23:59:59"."""

    time: str
    source: str
    text: str


class LogFile:
    """A file that others append to, or write anew. `run.log` has the lines of all starts of a run,
    of which only those of `attempt` count."""

    def __init__(self, path: Path, source: str, attempt: str | None):
        self.path = path
        self.source = source
        self._attempt = attempt
        self._counts = path.name != RUN_LOG
        self._offset = 0
        self._time = ""

    def read(self, last: bool) -> Iterator[Line]:
        """What was added since the last call; with `last` also a line that has not ended.

        Times never decrease: a line has that of its predecessor where its own is missing or
        earlier, and the first lines that of the first one with a time. A file without any has the
        time of its last change.

        Raises:
            LogError: the file cannot be read.
        """
        untimed: list[str] = []
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._offset:
                    self._offset, self._time = 0, ""
                file.seek(self._offset)
                for raw in file:
                    if not (last or raw.endswith(b"\n")):
                        break
                    self._offset += len(raw)
                    if not self._is_of_attempt(raw):
                        continue
                    untimed.append(shown_text(raw))
                    self._time = max(self._time, stamp(raw))
                    if self._time:
                        yield from self._lines(self._time, untimed)
                        untimed = []
        except FileNotFoundError:
            return
        except OSError as error:
            raise LogError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        changed = datetime.fromtimestamp(status.st_mtime).isoformat(" ", "seconds")
        yield from self._lines(changed, untimed)

    def _is_of_attempt(self, raw: bytes) -> bool:
        if self.path.name == RUN_LOG and (first := FIRST_LINE.search(raw.decode(errors="replace"))):
            self._counts = first[1] == self._attempt
        return self._counts

    def _lines(self, at: str, texts: Iterable[str]) -> Iterator[Line]:
        return (Line(at, self.source, text) for text in texts)


class Logs:
    """The files of one start of a job, `attempt`; without one, those of the newest start, of every
    start that begins meanwhile too. `only` is a part of a source's name, or a pattern with * and ?.
    """

    def __init__(self, run_path: Path, attempt: str | None = None, only: str = "*"):
        """
        Raises:
            LogError: there is no such run or start.
        """
        self._run_path = run_path
        self._attempt = attempt
        self._only = f"*{only}*"
        self._files: dict[tuple[str | None, Path], LogFile] = {}
        if not (run_path / "logs").is_dir() and not (run_path / RUN_LOG).exists():
            raise LogError(f"{run_path} is not a run: it has neither logs/ nor {RUN_LOG}")
        if attempt is not None and attempt not in (known := starts(run_path)):
            names = ", ".join(name for name in known if name) or "none"
            raise LogError(f"--attempt: {run_path}/logs has no {attempt}; it has: {names}")

    def read(self, last: bool) -> Iterator[Line]:
        """What was added since the last call, in order of time, and of each file in its own order;
        see `LogFile.read`."""
        attempt = self._attempt or newest(starts(self._run_path))
        for source, path in sources(self._run_path, attempt).items():
            if (attempt, path) not in self._files and fnmatchcase(source, self._only):
                self._files[attempt, path] = LogFile(path, source, attempt)
        streams = [file.read(last) for file in self._files.values()]
        return heapq.merge(*streams, key=lambda line: line.time)


def show_logs(logs: Logs, follow: bool, out: TextIO | None = None) -> int:
    """Print them; with `follow` until interrupted. The number of lines."""
    stream = out or sys.stdout
    count = 0
    while True:
        for line in logs.read(last=not follow):
            stream.write(f"{line.source} | {line.text}\n")
            count += 1
        stream.flush()
        if not follow:
            return count
        time.sleep(POLL_S)


def starts(run_path: Path) -> dict[str | None, float]:
    """Starts of jobs that have logs here, and when they began; None stands for logs of a run on
    one machine, and when they last changed."""
    found: dict[str | None, float] = {}
    for path in (run_path / "logs").glob("*"):
        if path.suffix == ".log":
            found[None] = max(found.get(None, 0.0), path.stat().st_mtime)
        elif any(path.glob("*/*.log")):
            # Nothing is added to it, but to what is in it, once its nodes have met.
            found[path.name] = path.stat().st_mtime
    return found


def newest(known: dict[str | None, float]) -> str | None:
    return max(known, key=lambda attempt: known[attempt], default=None)


def sources(run_path: Path, attempt: str | None) -> dict[str, Path]:
    """Files by name: "run", "server_0", "node_1_gpu042/rank_8"."""
    directory = run_path / "logs" / (attempt or "")
    found = {"run": run_path / RUN_LOG}
    for path in sorted(directory.glob("*/*.log" if attempt else "*.log")):
        found[str(path.relative_to(directory).with_suffix(""))] = path
    return found


def stamp(raw: bytes) -> str:
    """The time that a line begins with, or an empty string."""
    match = STAMP.match(raw)
    return f"{match[1].decode()} {match[2].decode().replace(',', '.')}" if match else ""


def shown_text(raw: bytes) -> str:
    """As a terminal would show it, which of a progress bar is its last state; but what a terminal
    would act on is shown as a literal."""
    text = raw.decode(errors="backslashreplace").rstrip("\r\n").rpartition("\r")[2]
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text
    )
