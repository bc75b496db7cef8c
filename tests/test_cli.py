"""The command line itself; tests of runs are in test_end_to_end.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_opo.cli import main
from megatron_opo.errors import RecipeError
from megatron_opo.observe.console import Console
from megatron_opo.recipe import Recipe
from megatron_opo.train_command import _is_finished

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("flag", ["--print", "--fresh"])
def test_overrides_may_stand_behind_an_option(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "nowhere.yaml", "name=x", flag, "train.step=7"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: recipe nowhere.yaml: no such file\n"


def test_overrides_on_both_sides_of_an_option_count(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: a\nmodel: {path: m}\ndata: {train: {files: [t.jsonl]}}\n")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), "name=b", "--print", "seed=7", "train.steps=9"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(line in shown for line in ("name: b\n", "seed: 7\n", "steps: 9\n"))


def test_a_mistake_is_told_to_programs_as_well(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "nowhere.yaml", "--json"])
    out, err = capsys.readouterr()
    error, end = map(json.loads, out.splitlines())
    assert err == f"error: {error['text']}\n" == "error: recipe nowhere.yaml: no such file\n"
    assert (error["event"], error["kind"]) == ("error", "RecipeError")
    assert (end["event"], end["exit_code"], ended.value.code) == ("end", 2, 2)


@pytest.mark.parametrize(
    "words", [["train", "x.yaml", "--frehs"], ["logs", "runs/x", "a=1"], ["train", "x", "-p"]]
)
def test_an_unknown_argument_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_run_without_its_exported_model_is_not_finished(tmp_path, capsys):
    recipe = Recipe.model_validate(
        {
            "name": "a",
            "run_dir": str(tmp_path),
            "model": {"path": "m"},
            "data": {"train": {"files": ["t.jsonl"]}},
            "train": {"steps": 3},
        }
    )
    checkpoint = tmp_path / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    state = {"version": 3, "cursor": {}, "recipe": {}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    console = Console(3)
    assert not _is_finished(recipe, console)
    without = recipe.checkpoint.model_copy(update={"export_hf": False})
    assert _is_finished(recipe.model_copy(update={"checkpoint": without}), console)
    (tmp_path / "hf" / "step_3").mkdir(parents=True)
    assert _is_finished(recipe, console)
    assert capsys.readouterr().out.count("already has all of its 3 steps") == 2


def test_a_report_can_be_written_of_a_run_that_still_goes_on(tmp_path, capsys):
    record = {"step": 1, "kind": "train", "critic/rewards/mean": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "<html" in (tmp_path / "report.html").read_text()


def test_a_report_of_no_run_is_a_clear_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 2
    assert "is not a run: it has no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("python", [[], ["-u"]])
@pytest.mark.parametrize("words", [["plan", "recipes/opo_7b.yaml"], ["--help"], ["logs", "RUN"]])
def test_a_command_ends_quietly_when_nobody_reads_it_any_more(python, words, tmp_path):
    (tmp_path / "run.log").write_text("  run x starts at version 0 of 9\n" + "line\n" * 10**4)
    words = [str(tmp_path) if word == "RUN" else word for word in words]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        ended = subprocess.run(
            [sys.executable, *python, "-m", "megatron_opo", *words],
            cwd=ROOT,
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_broken_connection_is_no_reader_that_has_ended():
    program = """
import os
from megatron_opo import cli

def run(options):
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")

cli.report_command.run = run
cli.main(["report", "x"])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1 and "BrokenPipeError" in ended.stderr


def test_only_a_run_that_has_trained_is_in_the_way(tmp_path):
    sections = {"name": "x", "model": {"path": "m"}, "data": {"train": {"files": ["a"]}}}
    recipe = Recipe.model_validate(sections | {"run_dir": str(tmp_path)})
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0, "kind": "eval"}\n')
    console = Console(3)
    assert not _is_finished(recipe, console)
    with metrics.open("a") as stream:
        stream.write('{"step": 1, "kind": "train"}\n')
    with pytest.raises(RecipeError, match="left no checkpoint to resume from"):
        _is_finished(recipe, console)
