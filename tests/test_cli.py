"""The command line itself; tests of runs are in test_end_to_end.py."""

import json

import pytest

from megatron_opo.cli import _is_finished, main
from megatron_opo.recipe import Recipe


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


@pytest.mark.parametrize(
    "words", [["train", "x.yaml", "--frehs"], ["report", "runs/x", "a=1"], ["train", "x", "-p"]]
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
    assert not _is_finished(recipe)
    without = recipe.checkpoint.model_copy(update={"export_hf": False})
    assert _is_finished(recipe.model_copy(update={"checkpoint": without}))
    (tmp_path / "hf" / "step_3").mkdir(parents=True)
    assert _is_finished(recipe)
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
