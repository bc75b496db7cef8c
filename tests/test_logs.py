"""The merged view of a run's logs."""

import io
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.errors import LogError
from megatron_opo.observe.logs import Line, Logs, show_logs, shown_text
from megatron_opo.observe.run_log import RunLog

ROOT = Path(__file__).parents[1]
CLOCK = "2026-01-31 10:00:"


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def start(run: Path, attempt: str, seconds: int) -> Path:
    """The directory of node 0 of a start, which began `seconds` after some moment."""
    node = run / "logs" / attempt / "node_0_n1"
    write(node / "server_0.log", f"[{CLOCK}{seconds:02}] start {attempt}")
    os.utime(node.parent, (10**9 + seconds, 10**9 + seconds))
    return node


def shown(run: Path, **choice) -> list[str]:
    out = io.StringIO()
    count = show_logs(Logs(run, **choice), follow=False, out=out)
    lines = out.getvalue().splitlines()
    assert count == len(lines)
    return lines


def test_lines_stand_in_the_order_of_their_times_and_each_behind_its_source(tmp_path):
    logs = tmp_path / "logs" / "42.0"
    server = (
        "a warning of some library",
        f"[{CLOCK}01 TP0] loads",
        f"[{CLOCK}04 TP0] fails",
        "Traceback",
        f"[{CLOCK}03 TP1] late",
    )
    write(logs / "node_1_n2" / "server_1.log", *server)
    write(logs / "node_0_n1" / "server_0.log", f"[{CLOCK}02] loads", f"[{CLOCK}05] goes on")
    rank = write(logs / "node_1_n2" / "rank_1.log", "dies")
    os.utime(rank, (2 * 10**9, 2 * 10**9))
    assert shown(tmp_path) == [
        "node_1_n2/server_1 | a warning of some library",
        f"node_1_n2/server_1 | [{CLOCK}01 TP0] loads",
        f"node_0_n1/server_0 | [{CLOCK}02] loads",
        f"node_1_n2/server_1 | [{CLOCK}04 TP0] fails",
        "node_1_n2/server_1 | Traceback",
        f"node_1_n2/server_1 | [{CLOCK}03 TP1] late",
        f"node_0_n1/server_0 | [{CLOCK}05] goes on",
        "node_1_n2/rank_1 | dies",
    ]
    assert shown(tmp_path, only="rank_") == ["node_1_n2/rank_1 | dies"]
    only_node_0 = [line for line in shown(tmp_path) if line.startswith("node_0")]
    assert shown(tmp_path, only="node_0*server") == only_node_0


def test_the_newest_start_counts_unless_another_is_named(tmp_path):
    start(tmp_path, "9.1", 1)
    start(tmp_path, "10.0", 2)
    (tmp_path / "logs" / "11.0").mkdir()  # was refused before any server started
    assert shown(tmp_path) == [f"node_0_n1/server_0 | [{CLOCK}02] start 10.0"]
    assert shown(tmp_path, attempt="9.1") == [f"node_0_n1/server_0 | [{CLOCK}01] start 9.1"]
    with pytest.raises(LogError, match=r"has no 9; it has: "):
        Logs(tmp_path, attempt="9")
    write(tmp_path / "logs" / "server_0.log", "then on one machine")
    assert shown(tmp_path) == ["server_0 | then on one machine"]


def test_of_the_run_log_only_the_lines_of_that_start_count(tmp_path):
    start(tmp_path, "7.0", 1)
    start(tmp_path, "7.1", 2)
    for attempt, words in [(None, "alone"), ("7.0", "first"), ("7.1", "second")]:
        options = {"recipe_text": "", "versions": {}, "total_steps": 3, "quiet": True}
        with RunLog(tmp_path, attempt=attempt, **options) as log:
            log.note(words)
    for attempt, words in [("7.0", "first"), ("7.1", "second")]:
        lines = shown(tmp_path, attempt=attempt, only="run")
        assert len(lines) == 2 and lines[0].endswith(f"in start {attempt}")
        assert lines[1].startswith("run | 20") and lines[1].endswith(f"  {words}")


def test_what_is_no_run_is_an_error(tmp_path):
    with pytest.raises(LogError, match=r"is not a run: it has neither logs/ nor run\.log"):
        Logs(tmp_path)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"tab\tand \xc3\xa9\n", "tab\tand \u00e9"),
        (b"\x1b[31mred\x07\n", "\\x1b[31mred\\x07"),
        (b"\r 0%|   |\r50%|## |\r99%|###|\r\n", "99%|###|"),
        (b"\xff\xfe\n", "\\xff\\xfe"),
        ("\u202egnp.exe\n".encode(), "\\u202egnp.exe"),
    ],
)
def test_a_terminal_sees_nothing_that_it_would_act_on(raw, text):
    assert shown_text(raw) == text


pieces = st.sampled_from(
    ["a", "b\n", "\n", f"{CLOCK}01 c\n", f"[{CLOCK}02] d\n", f"[{CLOCK}03", f" TP1] {CLOCK}00\n"]
)


@settings(max_examples=150, deadline=None)
@given(rounds=st.lists(st.lists(st.tuples(st.integers(0, 2), pieces), max_size=8), max_size=5))
def test_no_line_is_lost_or_doubled_and_files_keep_their_order(rounds):
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        (run / "logs").mkdir()
        logs = Logs(run)
        batches = []
        for written in rounds:
            for file, piece in written:
                with (run / "logs" / f"server_{file}.log").open("a") as stream:
                    stream.write(piece)
            batches.append(list(logs.read(last=False)))
        batches.append(list(logs.read(last=True)))
        at_once = list(Logs(run).read(last=True))
        for batch in [*batches, at_once]:
            assert [line.time for line in batch] == sorted(line.time for line in batch)
        for file in range(3):
            path = run / "logs" / f"server_{file}.log"
            expected = path.read_text().removesuffix("\n").split("\n") if path.exists() else []
            for found in ([line for batch in batches for line in batch], at_once):
                assert texts(found, f"server_{file}") == expected


def texts(lines: list[Line], source: str) -> list[str]:
    return [line.text for line in lines if line.source == source]


def test_following_sees_new_lines_new_files_new_starts_and_files_that_begin_anew(tmp_path):
    node = start(tmp_path, "5.0", 1)
    command = [sys.executable, "-m", "megatron_opo", "logs", str(tmp_path), "--follow"]
    following = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # Tests that run in the background inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert following.stdout is not None
        assert following.stdout.readline() == f"node_0_n1/server_0 | [{CLOCK}01] start 5.0\n"
        with (node / "server_0.log").open("a") as stream:
            stream.write("half")
            stream.flush()
            write(node / "rank_1.log", "a new file")
            assert following.stdout.readline() == "node_0_n1/rank_1 | a new file\n"
            stream.write(" and half\n")
        assert following.stdout.readline() == "node_0_n1/server_0 | half and half\n"
        write(node / "server_0.log", "anew")
        assert following.stdout.readline() == "node_0_n1/server_0 | anew\n"
        start(tmp_path, "5.1", 2)
        assert following.stdout.readline() == f"node_0_n1/server_0 | [{CLOCK}02] start 5.1\n"
        following.send_signal(signal.SIGINT)
        assert following.stdout.read() == ""
        assert following.wait(10) == 130
    finally:
        following.kill()
        following.wait()
