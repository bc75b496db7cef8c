"""The command line itself; tests of runs are in test_end_to_end.py."""

import pytest

from megatron_opo.cli import main


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
