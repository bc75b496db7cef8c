"""The tab key completes commands, options, fields and paths: asked of a real bash."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_opo.recipe import Recipe

# What bash sets before it calls the function that `complete` names, and what it then shows.
PRESS_TAB = """
source "$1"
shift
complete -p megatron-opo | grep -q -- '-F _megatron_opo ' || exit 3
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
compopt() { [[ $2 == nospace ]] && echo "no space behind:"; }
_megatron_opo megatron-opo "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "megatron-opo"
    command = [sys.executable, "-m", "megatron_opo", "completion", "bash"]
    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return path


def press_tab(script: Path, *words: str, where: Path | None = None) -> list[str]:
    command = ["bash", "--norc", "-c", PRESS_TAB, "bash", str(script), "megatron-opo", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=where, check=True)
    assert not done.stderr
    return done.stdout.split("\n")[:-1]


def test_commands_and_options_are_completed(script):
    assert press_tab(script, "tr") == ["train"]
    assert set(press_tab(script, "train", "x.yaml", "--r")) == {"--replay", "--rollout-only"}
    assert press_tab(script, "completion", "z") == ["zsh"]
    assert press_tab(script, "nonsense", "x") == [""]


@pytest.mark.parametrize("command", ["train", "launch", "plan", "eval"])
def test_fields_of_a_recipe_are_completed_and_wait_for_their_value(script, command):
    found = press_tab(script, command, "x.yaml", "optimizer.")
    assert found[0] == "no space behind:"
    fields = Recipe.model_fields["optimizer"].get_default().model_dump()
    assert set(found[1:]) == {f"optimizer.{name}=" for name in fields}


def test_more_than_one_field_is_completed(script):
    words = ["train", "x.yaml", "name=y", "seed=1", "model.p"]
    assert press_tab(script, *words) == ["no space behind:", "model.path="]


def test_a_section_is_no_field(script):
    assert "data.train=" not in press_tab(script, "train", "x.yaml", "data.train")


def test_recipes_are_files_and_runs_are_directories(script, tmp_path):
    (tmp_path / "run_1").mkdir()
    (tmp_path / "run.yaml").write_text("")
    assert set(press_tab(script, "train", "ru", where=tmp_path)) == {"run_1", "run.yaml"}
    assert press_tab(script, "report", "ru", where=tmp_path) == ["run_1"]


def test_zsh_gets_the_same_commands_and_fields():
    command = [sys.executable, "-m", "megatron_opo", "completion", "zsh"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert text.startswith("#compdef megatron-opo")
    assert all(word in text for word in ("train", "--rollout-only", "optimizer.lr", "_files"))
