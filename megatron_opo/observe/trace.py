"""A step as a file for ui.perfetto.dev or chrome://tracing: a track for each rank and server."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_opo.observe.files import replace_text
from megatron_opo.spans import Span, Stretch

MICROSECONDS = 1e6


def write_trace(
    path: Path, step: int, ranks: Sequence[Stretch], clock_errors: Sequence[float]
) -> None:
    """Write Chrome's JSON of a step, in microseconds from its start on rank 0.

    Ranks and servers are processes there. A rank has one thread; a server has as many as it had
    requests at a time. Readings are of rank 0's clock.

    Args:
        ranks: of each rank what it did in the step; the servers' tracks are in that of rank 0.
        clock_errors: how far off each rank's readings may be, in seconds.

    Raises:
        LogError: it cannot be written.
    """
    zero = ranks[0].start
    events: list[dict[str, Any]] = []
    for rank, stretch in enumerate(ranks):
        own = [span for span in stretch.spans if not span.track]
        events += _process(rank, f"rank {rank}")
        whole = Span(f"step {step}", stretch.start, stretch.end)
        events += [_event(span, rank, 0, zero) for span in (whole, *own)]
    servers = _by_track(ranks[0].spans)
    for process, (name, requests) in enumerate(sorted(servers.items()), start=len(ranks)):
        events += _process(process, name)
        for request, lane in _lanes(requests):
            events.append(_event(request, process, lane, zero))
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step": step,
            "clock_error_us": [round(error * MICROSECONDS, 1) for error in clock_errors],
        },
    }
    replace_text(path, json.dumps(trace))


def _process(number: int, name: str) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": number, "tid": 0}
    return [
        {**common, "name": "process_name", "args": {"name": name}},
        {**common, "name": "process_sort_index", "args": {"sort_index": number}},
    ]


def _event(span: Span, process: int, thread: int, zero: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.path if span.track else span.path.rpartition("/")[2],
        "cat": "request" if span.track else span.path.partition("/")[0],
        "pid": process,
        "tid": thread,
        "ts": round((span.start - zero) * MICROSECONDS, 3),
        "dur": round(span.seconds * MICROSECONDS, 3),
        "args": span.about,
    }


def _by_track(spans: Iterable[Span]) -> Mapping[str, list[Span]]:
    tracks: dict[str, list[Span]] = {}
    for span in spans:
        if span.track:
            tracks.setdefault(span.track, []).append(span)
    return tracks


def _lanes(spans: list[Span]) -> Iterable[tuple[Span, int]]:
    """Each span with the first lane that is free when it starts."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda each: each.start):
        lane = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        yield span, lane
