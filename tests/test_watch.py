import http.client
import io
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import Page, full_run, train_record, write_lines

from megatron_opo.cli import main
from megatron_opo.errors import LogError
from megatron_opo.observe import watch as module
from megatron_opo.observe.run_data import read_run
from megatron_opo.observe.watch import (
    BLOCKS,
    SPARK_WIDTH,
    check_run,
    new_lines,
    picture,
    sparkline,
    states,
    watch,
)
from megatron_opo.observe.watch_server import serving


def ask(address, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer, content


def test_the_served_report_follows_the_run(tmp_path):
    full_run(tmp_path, steps=3)
    with serving(tmp_path, 0) as address:
        assert urlsplit(address).hostname == "127.0.0.1"
        answer, before = ask(address)
        assert answer.status == 200 and "finished: 3 of 3 steps" in before
        page = Page(before)
        assert page.tags.count("script") == 4 and "DOMParser" in page.texts["script"][3]
        (policy,) = [v for _, v in page.attributes if v and v.startswith("default-src")]
        assert "connect-src 'self'" in policy and "'none'" in policy
        _, version = ask(address, "/version")
        assert ask(address, "/version")[1] == version
        full_run(tmp_path, steps=4)
        assert ask(address, "/version")[1] != version
        assert "finished: 4 of 4 steps" in ask(address)[1]


@pytest.mark.parametrize(
    "path",
    ["/metrics.jsonl", "/../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/./", "/?x",
     "/samples/", "http://127.0.0.1/secret.txt"],
)  # fmt: skip
def test_no_address_but_the_report_has_anything(tmp_path, path):
    (tmp_path / "secret.txt").write_text("secret")
    run = tmp_path / "run"
    run.mkdir()
    with serving(full_run(run), 0) as address:
        answer, content = ask(address, path)
    assert answer.status == 404 and content == "there is only / here\n"


def test_only_who_asks_for_this_machine_by_its_name_is_answered(tmp_path):
    with serving(full_run(tmp_path), 0) as address:
        for host, status in (("localhost:9000", 200), ("127.0.0.1", 200), ("evil.example", 403)):
            assert ask(address, Host=host)[0].status == status
        assert ask(address, method="POST")[0].status == 501
        answer, content = ask(address, method="HEAD")
        assert answer.status == 200 and content == ""


def test_a_run_without_steps_is_answered_with_what_is_missing(tmp_path):
    with serving(tmp_path, 0) as address:
        answer, content = ask(address)
        assert answer.status == 503 and "no step is logged yet" in content
        assert answer.headers["Refresh"] == "1"
        assert ask(address, "/favicon.ico")[0].status == 204
        full_run(tmp_path)
        assert ask(address)[0].status == 200


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LogError, match=rf"--port {port}: .*or 0"), serving(tmp_path, port):
            pass


def test_no_run_is_refused(tmp_path):
    with pytest.raises(LogError, match=r"neither recipe\.yaml nor metrics\.jsonl.*runs/NAME"):
        check_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    check_run(tmp_path)


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_a_port_that_cannot_be_is_refused(tmp_path, port, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(tmp_path), f"--port={port}"])
    assert ended.value.code == 2 and "from 0 to 65535" in capsys.readouterr().err


def test_states_begin_with_what_is_there_and_go_on_with_what_is_added(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)
    full_run(tmp_path, steps=2)
    found = states(tmp_path)
    assert len(next(found).train) == 2

    def go_on():
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(train_record(3)) + '\n{"step": 4, "ki')

    writer = threading.Thread(target=go_on)
    writer.start()
    assert [record["step"] for record in next(found).train] == [1, 2, 3]
    writer.join()


class Ended(io.StringIO):
    """A reader that has ended once it has read of step 3."""

    def write(self, text):
        if text.startswith("    3 "):
            raise KeyboardInterrupt
        return super().write(text)


def test_without_a_terminal_each_step_is_a_line_without_control_codes(tmp_path):
    full_run(tmp_path, steps=3)
    stream = Ended()
    with pytest.raises(KeyboardInterrupt):
        watch(tmp_path, 0, stream)
    address, header, *lines = stream.getvalue().splitlines()
    assert address.startswith("the report: http://127.0.0.1:") and "reward" in header
    assert [line.split()[:2] for line in lines] == [["1", "0.062"], ["2", "0.125"]]
    assert "\x1b" not in stream.getvalue()


def test_the_newest_step_tells_what_is_left(tmp_path):
    records = [train_record(s, **{"timing_s/step": 2.0}) for s in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", records)
    (tmp_path / "recipe.yaml").write_text("train: {steps: 8}\n")
    lines = new_lines(read_run(tmp_path), after=1)
    assert [line.split()[0] for line in lines] == ["2", "3"]
    assert lines[-1].endswith("10s") and lines[0].endswith("-")


def test_the_picture_shows_curves_and_the_last_steps(tmp_path):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(picture(read_run(full_run(tmp_path)), "http://127.0.0.1:1/"))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "demo" in text and "http://127.0.0.1:1/" in text
    assert f"{BLOCKS[0]}{BLOCKS[-1]}" in text, "two evaluations"
    steps = [line.split()[0] for line in text.splitlines() if line[:5].strip().isdigit()]
    assert steps == [str(step) for step in range(5, 13)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_a_sparkline_has_a_block_for_each_value_or_run_of_neighbours(values):
    line = sparkline(values)
    assert len(line) == min(len(values), SPARK_WIDTH) and set(line) <= set(BLOCKS)
    if len(values) <= SPARK_WIDTH and max(values) > min(values):
        assert line[values.index(max(values))] == BLOCKS[-1]
        assert line[values.index(min(values))] == BLOCKS[0]
