"""What a command shows on a terminal, in a file, and to a program."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.observe.console import BEAT_EVERY_S, Console
from megatron_opo.observe.live import bar
from megatron_opo.observe.text import amount, clock
from megatron_opo.plan.planner import find_config
from megatron_opo.prompts import PromptSet
from megatron_opo.recipe_file import load_recipe
from megatron_opo.rollout.process import Server
from megatron_opo.rollout.rate import TokenRate, waiting_for
from megatron_opo.start_summary import summary_rows
from tests.terminals import ESCAPE, lines_of, screen_of, terminal
from tests.test_end_to_end import make_project

ROOT = Path(__file__).parents[1]
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38|48)(?:;\d+)*m")


def prompts(split: str, count: int) -> PromptSet:
    return PromptSet(split, (), rows=count, overlong=0, repeated=0, max_prompt_tokens=512)


def summary_of(recipe, config, **options) -> dict[str, str]:
    both = [prompts("train", 0), prompts("eval", 0)]
    options = {"world_size": recipe.actor.replica_size, "device": "cuda"} | options
    return dict(summary_rows(recipe, config, *both, **options))


# --- the summary


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("opo_*.yaml")), ids=lambda p: p.name
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_summary_fits_a_screen_of_24_lines_of_100_columns(path, device, capsys):
    recipe = load_recipe(path, [])
    shown = summary_of(recipe, find_config(recipe, path, None)[1], device=device)
    Console(9).start(list(shown.items()))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 18, "with what comes before it and the progress below it"
    assert max(map(len, lines)) <= 100
    assert list(shown) == [
        *("model", "data", "step", "update", "trainer", "servers", "eval", "saved", "run")
    ]


def test_the_summary_says_what_will_run_where_and_what_is_kept():
    path = ROOT / "recipes" / "opo_7b.yaml"
    changes = ["actor.tensor_parallel=4", "actor.pipeline_parallel=2", "checkpoint.every=10"]
    changes += ["checkpoint.keep=3", "checkpoint.keep_best=true", "checkpoint.export_hf_every=50"]
    changes += ["rollout.servers=2", "rollout.tensor_parallel=4", "run_dir=here", "train.steps=1"]
    changes += ["actor.micro_batch_tokens=12345"]
    recipe = load_recipe(path, changes)
    config = find_config(recipe, path, None)[1]
    shown = {k: " ".join(v.split()) for k, v in summary_of(recipe, config, world_size=16).items()}
    assert "qwen2, 7.6B parameters, " in shown["model"]
    assert "micro-batches of 12,345 tokens" in shown["update"]
    assert shown["trainer"] == (
        "16 processes on a GPU each: tensor_parallel 4, pipeline_parallel 2, data_parallel 2"
    )
    assert shown["servers"].startswith("2 x tensor_parallel 4, on the trainers' GPUs (colocated)")
    assert shown["servers"].endswith("weights by shared memory")
    assert (
        "here: checkpoints every 10 steps and at the end (newest 3 kept, the best)"
        in (shown["saved"])
    )
    assert "Hugging Face model every 50 steps and at the end" in shown["saved"]
    assert shown["run"].startswith("1 step; ctrl-c stops it after a checkpoint, the same command")
    only = summary_of(recipe, config, trains=False)
    assert not {"update", "trainer", "eval"} & only.keys() and "checkpoint" not in str(only)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (789_888, "0.79M"), (134_515_008, "0.13B"), (7_615_616_512, "7.6B"), (999, "999"),
        (70_553_706_496, "70.6B"), (235_093_634_560, "0.24T"), (45_000, "45.0k"),
    ],
)  # fmt: skip
def test_amounts(count, text):
    assert amount(count) == text


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.booleans())
def test_a_bar_has_its_width_and_is_full_at_the_end(done, total, ascii_only):
    drawn = bar(done, total, 20, ascii_only)
    assert len(drawn) == 20 and drawn.isascii() == ascii_only
    assert bar(total, total, 20, ascii_only) == bar(2 * total, total, 20, ascii_only)
    assert set(bar(0, total, 20, True)) == {"-"} and set(bar(total, total, 20, True)) == {"#"}


def test_clock():
    assert [clock(s) for s in (0.9, 61, 3599, 3600, 7509)] == [
        *("0:00", "1:01", "59:59", "1:00:00", "2:05:09")
    ]


# --- the three modes


def drive(console: Console) -> None:
    console.start([("model", "tiny")], run="runs/x", total_steps=3)
    console.start_phase("generate")
    console.advance(1, 4, "samples [of a step]")
    console.ask(lambda: "5 tokens/s")
    console.end_phase()
    console.note("a note")
    console.step(1, {"critic/rewards/mean": 0.25}, 60.0)
    console.event("step", step=1, **{"critic/rewards/mean": 0.25})
    console.warn("careful\nof this\u2028")
    console.last("finished: 3 steps", step=3)
    console.close()


def test_json_is_an_object_a_line_and_nothing_else():
    stream = io.StringIO()
    drive(Console(3, mode="json", stream=stream))
    lines = stream.getvalue().split("\n")
    assert lines.pop() == ""
    events = [json.loads(line) for line in lines]
    assert all(list(event)[:2] == ["event", "time"] for event in events)
    shown = [{k: v for k, v in event.items() if k != "time"} for event in events]
    assert shown == [
        {"event": "start", "run": "runs/x", "total_steps": 3, "summary": {"model": "tiny"}},
        {"event": "note", "text": "a note"},
        {"event": "step", "step": 1, "critic/rewards/mean": 0.25},
        {"event": "warning", "text": "careful\nof this\u2028"},
        {"event": "finished", "text": "finished: 3 steps", "step": 3},
    ]


def test_quiet_is_warnings_and_the_last_line():
    stream = io.StringIO()
    drive(Console(3, mode="quiet", stream=stream))
    assert stream.getvalue() == "warning: careful\n  of this\nfinished: 3 steps\n"


@pytest.mark.parametrize("mode", ["lines", "json", "quiet"])
def test_without_a_terminal_a_long_phase_is_told_of_every_half_minute(mode):
    stream = io.StringIO()
    console = Console(9, mode=mode, stream=stream)
    console.ticker.start("generate")
    console.advance(120, 256, "samples")
    console.ask(lambda: "5,301 tokens/s")
    phase = console.ticker.phase
    assert phase is not None
    for second in range(95):
        console.beat(phase.began + second)
    told = stream.getvalue().splitlines()
    if mode == "quiet":
        assert told == []
    elif mode == "lines":
        assert told == [
            f"       generate, {took}: 120/256 samples, 5,301 tokens/s"
            for took in ("30s", "1m00s", "1m30s")
        ]
    else:
        events = [json.loads(line) for line in told]
        assert [event["seconds"] for event in events] == [30, 60, 90]
        assert {(e["event"], e["phase"], e["done"], e["total"]) for e in events} == {
            ("progress", "generate", 120, 256)
        }
    console.end_phase()
    console.beat(phase.began + 2 * BEAT_EVERY_S + 100)
    assert stream.getvalue().splitlines() == told, "nothing goes on"


@pytest.mark.parametrize("no_colour", [True, False])
def test_what_is_drawn_fits_the_terminal_and_is_gone_at_the_end(no_colour, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")  # else rich asks the terminal of the tests
    monkeypatch.setenv("NO_COLOR", "1") if no_colour else monkeypatch.delenv("NO_COLOR", False)
    with terminal(rows=24, columns=60) as screen, os.fdopen(screen.device, "w") as stream:
        console = Console(3, stream=stream)
        console.start_phase("servers")
        console.advance(1, None, "a server says " + "very much " * 20)
        console.refresh()
        console.warn("careful")
        console.start_phase("generate")
        console.advance(3, 4, "samples [a]")
        console.notice("stopping")
        console.refresh()
        console.note("a note")
        console.close()
    drawn = lines_of(screen.text)
    assert max(map(len, drawn)) < 60
    assert any("start servers: a server says very" in line for line in drawn)
    assert any("0:00  generate: 3/4 samples [a]" in line for line in drawn)
    assert "stopping" in drawn
    assert any("0 of 3 steps" in line for line in drawn)
    assert [line for line in screen_of(screen.text) if line] == ["warning: careful", "a note"]
    assert bool(COLOURS.search(screen.text)) is not no_colour
    hidden = screen.text.rfind("\x1b[?25l")
    assert screen.text.find("\x1b[?25h", hidden) > 0, "the cursor is there, however this ends"


# --- what servers say


def test_the_rate_is_what_servers_say_since_then_else_what_came_of_it(tmp_path):
    line = (
        "[2026-01-01 00:00:00] Decode batch, #running-req: 8, gen throughput (token/s): {}, #q: 0\n"
    )
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    for log in logs:
        log.write_text(line.format("9000.00"))
    servers = [Server(f"server {i}", "", log=log) for i, log in enumerate(logs)]
    rate = TokenRate(servers)
    assert rate.shown() == "", "what was said before is of another phase"
    rate.count(10**9)
    assert int(rate.shown().removesuffix(" tokens/s").replace(",", "")) > 10**6
    for log, said in zip(logs, (["1.00", "1000.50"], ["2000.00"]), strict=True):
        with log.open("a") as file:
            file.writelines(line.format(each) for each in said)
    assert rate.shown() == "3,000 tokens/s"
    assert TokenRate([Server("server 2", "http://elsewhere")]).shown() == ""


def test_of_a_starting_server_only_whole_lines_of_its_own_are_shown():
    server = Server("server 0", "")
    assert waiting_for(server, "  warnings.warn(") == "waiting for server 0"
    said = "[2026-01-01 00:00:00 TP0] Load weight begin."
    assert waiting_for(server, said) == "server 0 says: Load weight begin."


# --- a real run


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A run without training: standard output is a program's, standard error a terminal."""
    project = make_project(tmp_path_factory.mktemp("project"))
    command = [sys.executable, "-m", "megatron_opo", "train", "recipe.yaml", "--rollout-only"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    with terminal() as screen:
        ended = subprocess.run(
            [*command, "--json", "train.steps=2"],
            cwd=project,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=screen.device,
            text=True,
            timeout=240,
        )
    assert ended.returncode == 0, screen.text
    return project, ended.stdout, screen.text


def test_a_run_tells_a_program_all_that_it_writes_down(sampled):
    project, told, _ = sampled
    events = [json.loads(line) for line in told.splitlines()]
    run = project / "runs" / "letters.rollout_only"
    assert [e["event"] for e in events if e["event"] not in ("note", "warning")] == [
        *("start", "step", "step", "finished", "end")
    ]
    assert events[0]["text"] == "letters: starting 1 server", "at once"
    assert [e["total_steps"] for e in events if e["event"] == "start"] == [2]
    written = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for record, event in zip(written, (e for e in events if e["event"] == "step"), strict=True):
        assert {k: v for k, v in event.items() if k not in ("event", "time")} == {
            k: v for k, v in record.items() if k not in ("kind", "time")
        }
    assert Path(events[-2]["report"]) == run.relative_to(project) / "report.html"
    assert events[-1]["exit_code"] == 0


def test_and_nothing_to_a_person(sampled):
    assert sampled[2] == ""


def test_a_terminal_shows_a_failed_run_as_one_error_below_what_it_did(sampled):
    """The run is there already and left no checkpoint: sampling again is refused."""
    project, *_ = sampled
    command = [sys.executable, "-m", "megatron_opo", "train", "recipe.yaml", "--rollout-only"]
    with terminal() as screen:
        ended = subprocess.run(
            [*command, "train.steps=2"],
            cwd=project,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
            stdout=screen.device,
            stderr=screen.device,
            timeout=60,
        )
    assert ended.returncode == 2
    drawn = lines_of(screen.text)
    assert any(re.search(r"0:0\d  load packages", line) for line in drawn)
    assert max(map(len, (line for line in drawn if "load packages" in line))) < 100
    first, second, *more = [line for line in screen_of(screen.text) if line]
    assert first == "letters: starting 1 server"
    assert second.startswith("error: run_dir: ") and more == []


def test_no_control_codes_go_to_a_file(sampled):
    assert ESCAPE not in (sampled[0] / "runs" / "letters.rollout_only" / "run.log").read_text()
