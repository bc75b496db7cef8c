"""What a trace must be, whatever it is of."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read_tracks(path: Path) -> dict[str, dict[int, list[Event]]]:
    """Events by process and thread, in the order of their starts, wider ones first. What a thread
    does at a time is one thing within another."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks: dict[str, dict[int, list[Event]]] = {name: {} for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["name"]
            tracks[names[event["pid"]]].setdefault(event["tid"], []).append(event)
        else:
            assert event["ph"] == "M"
    for threads in tracks.values():
        for thread in threads.values():
            thread.sort(key=lambda event: (event["ts"], -event["dur"]))
            check_nesting(thread)
    return tracks


def check_nesting(thread: list[Event]) -> None:
    open_ends: list[float] = []
    for before, event in pairwise([{"ts": -1e18, "dur": 0}, *thread]):
        assert event["ts"] >= before["ts"]
        end = event["ts"] + event["dur"]
        # Microseconds are written with three decimals.
        while open_ends and open_ends[-1] <= event["ts"] + 0.002:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 0.002, f"{event} overlaps another's end"
        open_ends.append(end)
