"""A recipe under several estimators and seeds: which runs, and what is said of them."""

import argparse
import json

import pytest

from megatron_opo import compare
from megatron_opo.errors import RecipeError
from megatron_opo.recipe_file import load_recipe

RECIPE = """
name: small
model: {path: model}
data: {max_prompt_tokens: 8, train: {files: [train.jsonl]}}
train: {steps: 8}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def parsed(*words) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    return parser.parse_intermixed_args([str(word) for word in words])


def test_each_estimator_has_a_run_of_each_seed(recipe, tmp_path):
    runs = compare.planned_runs(
        parsed(recipe, "train.steps=4", "--estimators=opo,rloo", "--seeds=3,5")
    )
    assert [each.label for each in runs] == [
        "opo, seed 3",
        "rloo, seed 3",
        "opo, seed 5",
        "rloo, seed 5",
    ]
    loaded = [load_recipe(recipe, ["train.steps=4", *each.overrides()]) for each in runs]
    assert [(r.algorithm.estimator, r.seed) for r in loaded] == [
        ("opo", 3),
        ("rloo", 3),
        ("opo", 5),
        ("rloo", 5),
    ]
    assert {r.run_path.parent for r in loaded} == {tmp_path / "runs" / "compare_small"}
    assert len({r.run_path for r in loaded}) == 4 and all(r.log.policy_shift for r in loaded)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--estimators=opo,gppo"], r"algorithm\.estimator"),
        (["--estimators=opo,opo"], "--estimators: 'opo,opo', must be different words"),
        (["--estimators="], "--estimators: '', must be"),
        (["--seeds=1,x"], "--seeds: '1,x', must be whole numbers"),
        (["seed=3"], "seed=3: `compare` sets this field itself"),
        (["train.stepz=3"], r"train\.stepz"),
    ],
)
def test_a_mistake_is_named_before_anything_is_trained(recipe, words, problem):
    with pytest.raises(RecipeError, match=problem):
        compare.planned_runs(parsed(recipe, *words))


def write_run(each, base, recipe):
    """Eight steps whose metrics are simple numbers above `base`, and two evaluations."""
    each.directory.mkdir(parents=True)
    (each.directory / "recipe.yaml").write_text(recipe.read_text())
    lines = [{"step": 0, "kind": "eval", "eval/avg@4": 0.1}]
    for step in range(1, 9):
        lines.append(
            {
                "step": step,
                "kind": "train",
                "critic/rewards/mean": base + step,
                "actor/entropy": 0.0,
                "on_policy/kl_step": base * step,
                "on_policy/kl_to_start": None if step == 8 else base,
            }
        )
    lines.append({"step": 8, "kind": "eval", "eval/avg@4": base})
    (each.directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_the_summary_is_of_means_ranges_and_differences_seed_by_seed(recipe, capsys):
    options = parsed(recipe, "--estimators=opo,grpo", "--seeds=0,1", "--only-summary")
    runs = compare.planned_runs(options)
    for each, base in zip(runs, (2.0, 1.0, 4.0, 5.0), strict=True):
        write_run(each, base, recipe)
    assert compare.run(options) == 0
    text = (runs[0].directory.parent / "summary.md").read_text()
    assert text in capsys.readouterr().out
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in text.splitlines() if line.startswith("|"))
    }
    # opo: 2 and 4, grpo: 1 and 5. The last quarter: steps 7 and 8, at 7.5 in the mean.
    assert rows["opo"][:3] == ["3 (2 to 4)", "10.5 (9.5 to 11.5)", "0 (0 to 0)"]
    assert rows["grpo"][:2] == ["3 (1 to 5)", "10.5 (8.5 to 12.5)"]
    assert rows["grpo - opo"][:2] == ["+0 (-1 to +1)", "+0 (-1 to +1)"]
    assert rows["opo"][3:5] == ["3 (2 to 4)", "13.5 (9 to 18)"]  # what is null is left out
    assert rows["opo"][5:] == ["-", "-"]
    assert rows["grpo, seed 1"][:2] == ["5", "12.5"]
    assert (runs[0].directory.parent / "report.html").exists()
