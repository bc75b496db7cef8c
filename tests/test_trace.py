import json

import pytest
from traces import read_tracks

from megatron_opo.errors import LogError
from megatron_opo.observe.trace import write_trace
from megatron_opo.spans import Span, Stretch


def ranks() -> list[Stretch]:
    requests = [
        Span("prompt 1", 100.5, 103.0, "server 1", {"samples": 8, "response_tokens": 320}),
        Span("prompt 0", 100.5, 101.0, "server 0", {"samples": 8}),
        Span("prompt 2", 100.6, 104.0, "server 1"),
        Span("prompt 3", 103.0, 103.5, "server 1"),
    ]
    own = [Span("update/optimizer", 105.0, 106.0), Span("update", 104.5, 106.0)]
    other = [Span("wait", 99.5, 104.5), Span("update", 104.5, 106.5)]
    return [Stretch(100.0, 107.0, [*requests, *own]), Stretch(99.5, 107.25, other)]


def test_ranks_and_servers_have_tracks_in_microseconds_of_the_step(tmp_path):
    write_trace(tmp_path / "trace.json", 3, ranks(), [0.0, 2.5e-5])
    tracks = read_tracks(tmp_path / "trace.json")
    assert list(tracks) == ["rank 0", "rank 1", "server 0", "server 1"]

    def shown(track: str, thread: int = 0):
        return [(e["name"], e["ts"], e["dur"]) for e in tracks[track][thread]]

    assert shown("rank 0") == [
        ("step 3", 0, 7e6), ("update", 4.5e6, 1.5e6), ("optimizer", 5e6, 1e6)
    ]  # fmt: skip
    assert shown("rank 1") == [
        ("step 3", -5e5, 7.75e6), ("wait", -5e5, 5e6), ("update", 4.5e6, 2e6)
    ]  # fmt: skip
    # What goes on at the same time lies beside each other; what is free is used again.
    assert shown("server 1") == [("prompt 1", 5e5, 2.5e6), ("prompt 3", 3e6, 5e5)]
    assert shown("server 1", 1) == [("prompt 2", 6e5, 3.4e6)]
    assert tracks["server 1"][0][0]["args"] == {"samples": 8, "response_tokens": 320}
    about = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert about == {"step": 3, "clock_error_us": [0, 25]}


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(LogError, match=r"trace\.json"):
        write_trace(tmp_path / "missing" / "trace.json", 3, ranks(), [0.0, 0.0])
