"""docs/recipe.md says what the schema says, of every field."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from megatron_opo.errors import RecipeError
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "recipe.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$")
PROCEDURAL = {"procedural": {"task": "chain_sum"}}
SECTIONS = {
    "data.train",
    "data.eval",
    "data.train.procedural",
    "data.eval.procedural",
    "rollout.dynamic_sampling",
    "algorithm.correction",
}
SAID = {"name", "model.path", "data.train.procedural.task", "data.eval.procedural.task"}


def rows() -> dict[str, tuple[str, str]]:
    """Dotted field -> the default that the page gives, and what it says the field is."""
    found: dict[str, tuple[str, str]] = {}
    prefixes = [""]
    for line in PAGE.splitlines():
        if line.startswith("## "):
            prefixes = [f"{path}." for path in re.findall(r"`([\w.]+)`", line)] or [""]
        elif row := ROW.match(line):
            for prefix in prefixes:
                assert prefix + row[1] not in found, "described twice"
                found[prefix + row[1]] = (row[3], row[4])
    return found


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in tree.items():
        if value and isinstance(value, dict):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def values_of_a_recipe_that_says_nothing() -> dict[str, Any]:
    data = {"train": PROCEDURAL, "eval": PROCEDURAL}
    recipe = Recipe.model_validate({"name": "x", "model": {"path": "m"}, "data": data})
    return leaves(recipe.model_dump(mode="json"))


def test_the_committed_page_is_what_the_tool_writes():
    tool = runpy.run_path(str(ROOT / "tools" / "make_recipe_reference.py"))
    assert tool["reference"]() == PAGE, "run python tools/make_recipe_reference.py"


def test_the_page_describes_every_field_of_a_recipe_and_no_other():
    described = rows()
    assert set(described) == set(values_of_a_recipe_that_says_nothing()) | SECTIONS
    assert [name for name, (_, what) in described.items() if len(what) < 8] == []


def test_its_defaults_are_the_values_of_a_recipe_that_says_nothing():
    described = rows()
    for field, value in values_of_a_recipe_that_says_nothing().items():
        default = described[field][0]
        if field in SAID:
            assert default == "required", field
        else:
            assert json.loads(default.strip("`")) == value, field


@pytest.mark.parametrize(
    ("field", "bad", "allowed"),
    [
        ("rollout.samples_per_prompt", "1", "whole number >= 2"),
        ("rollout.port", "65536", "whole number >= 0, <= 65535"),
        ("eval.top_p", "0", "number > 0, <= 1"),
        ("optimizer.betas", "[0.9, 1]", "list: number >= 0, < 1; number >= 0, < 1"),
        ("algorithm.truncated", "cut", "`keep`, `mask`, `penalise`"),
        ("sync.verify", "7", "true or false"),
    ],
)
def test_a_value_that_it_does_not_allow_is_refused(field, bad, allowed, tmp_path):
    assert f"| `{field.split('.')[1]}` | {allowed} |" in PAGE
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nmodel: {path: m}\ndata: {train: {files: [a.jsonl]}}\n")
    with pytest.raises(RecipeError, match=re.escape(field)):
        load_recipe(path, [f"{field}={bad}"])
