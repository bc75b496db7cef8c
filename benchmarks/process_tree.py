"""What a process and all that it started take: memory and processor seconds, from /proc."""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
EVERY_S = 0.1
# To read how much memory a process has holds the process up.
MEMORY_SHARE = 0.01


@dataclass
class Usage:
    """`marks` are (time.monotonic(), processor seconds of all so far) when the watched file had
    grown by another line: the first one, the second one, ..."""

    peak_bytes: int = 0
    cpu_seconds: float = 0.0
    marks: list[tuple[float, float]] = field(default_factory=list)


class Watch:
    """Looks at the tree of `root` several times a second, in a thread, until left; at its memory as
    often as takes MEMORY_SHARE of the time.

    Memory is the proportional set size (a page that n processes share counts 1/n for each), summed
    over the processes of one look.
    """

    def __init__(self, root: int, lines_of: Path):
        self.usage = Usage()
        self._root = root
        self._lines_of = lines_of
        self._seconds: dict[tuple[int, int], float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Usage:
        self._thread.start()
        return self.usage

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        next_look = 0.0
        while not self._end.wait(EVERY_S):
            new = count_lines(self._lines_of) - len(self.usage.marks)
            members = self._look()
            start = time.monotonic()
            self.usage.marks += [(start, self.usage.cpu_seconds)] * new
            if start >= next_look:
                memory = sum(map(proportional_bytes, members))
                self.usage.peak_bytes = max(self.usage.peak_bytes, memory)
                now = time.monotonic()
                next_look = now + (now - start) / MEMORY_SHARE

    def _look(self) -> list[int]:
        found = tree(self._root)
        self._seconds |= {(pid, start): seconds for pid, start, seconds in found}
        self.usage.cpu_seconds = sum(self._seconds.values())
        return [pid for pid, *_ in found]


def tree(root: int) -> list[tuple[int, int, float]]:
    """(process, when it started, its processor seconds) of `root` and its descendants."""
    found: dict[int, tuple[int, int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            seconds = (int(fields[11]) + int(fields[12])) / TICKS
            found[int(entry.name)] = (int(fields[1]), int(fields[19]), seconds)
    members = {root} & found.keys()
    size = 0
    while len(members) > size:
        size = len(members)
        members |= {pid for pid, (parent, *_) in found.items() if parent in members}
    return [(pid, *found[pid][1:]) for pid in members]


def proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
