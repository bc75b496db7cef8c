import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import Page, found_in, sample, train_record, write_lines

from megatron_opo.cli import main
from megatron_opo.errors import LogError
from megatron_opo.observe.charts import MOST_POINTS, Line, line_chart
from megatron_opo.observe.comparison import write_comparison
from megatron_opo.observe.run_data import read_run
from megatron_opo.observe.run_groups import differences, group_runs, mean_and_range

CURVE = st.lists(
    st.tuples(st.integers(0, 9), st.floats(-9, 9)), max_size=9, unique_by=lambda p: p[0]
)


def make_run(path, rewards, *, seed=0, **recipe):
    path.mkdir()
    records = [
        train_record(step, **{"critic/rewards/mean": r, "timing_s/generate": 2.0})
        for step, r in enumerate(rewards, 1)
    ]
    last = len(rewards)
    records.append({"step": last, "kind": "eval", "eval/avg@2": rewards[-1], "eval/pass@2": 1.0})
    write_lines(path / "metrics.jsonl", records)
    write_lines(path / "samples" / "step_000001.jsonl", [sample(1, response=f"of {path.name}")])
    settings = {"name": path.name, "seed": seed, "run_dir": str(path), **recipe}
    (path / "recipe.yaml").write_text(json.dumps(settings))
    (path / "versions.json").write_text('{"torch": "2.13.0"}')
    return path


@pytest.fixture
def runs(tmp_path):
    opo, grpo = {"algorithm": {"estimator": "opo"}}, {"algorithm": {"estimator": "grpo"}}
    return [
        make_run(tmp_path / "opo_s0", [0.1, 0.25], seed=0, **opo),
        make_run(tmp_path / "opo_s1", [0.3, 0.75], seed=1, **opo),
        make_run(tmp_path / "grpo", [0.2, 0.4], seed=0, **grpo, optimizer={"lr": 1e-5}),
    ]


def test_runs_that_differ_only_in_the_seed_are_one_curve_with_a_band(runs):
    opo, grpo = group_runs([read_run(run) for run in runs])
    assert (opo.label, opo.seeds, grpo.label) == ("opo (2 runs)", "0, 1", "grpo")
    assert opo.color != grpo.color
    line = opo.line("critic/rewards/mean")
    assert dict(line.points) == pytest.approx({1: 0.2, 2: 0.5})
    assert line.band == [(1, 0.1, 0.3), (2, 0.25, 0.75)]
    assert grpo.line("critic/rewards/mean").band == [], "one run has no range"
    assert differences([opo, grpo]) == [
        ("algorithm.estimator", ["opo", "grpo"]), ("optimizer.lr", ["-", "1e-05"]),
    ]  # fmt: skip


def test_runs_of_one_name_are_told_apart_by_what_differs(tmp_path):
    made = [
        make_run(tmp_path / str(i), [0.5], name="same", optimizer={"lr": lr, "betas": [0.9]})
        for i, lr in enumerate([1e-6, 2e-6])
    ]
    groups = group_runs([read_run(run) for run in made])
    assert [group.label for group in groups] == ["same: lr 1e-06", "same: lr 2e-06"]


def test_runs_without_a_recipe_are_not_taken_for_equal(tmp_path):
    made = [make_run(tmp_path / name, [0.5]) for name in ("a", "b")]
    for run in made:
        (run / "recipe.yaml").unlink()
    assert len(group_runs([read_run(run) for run in made])) == 2


@given(st.lists(CURVE, min_size=1, max_size=4))
def test_the_mean_is_over_the_curves_that_have_a_step(curves):
    points, band = mean_and_range(curves)
    at: dict[float, list[float]] = {
        step: [y for curve in curves for x, y in curve if x == step] for step in range(10)
    }
    expected = [step for step in range(10) if at[step]]
    assert [x for x, _ in points] == [x for x, _, _ in band] == expected
    for (x, mean), (_, low, high) in zip(points, band, strict=True):
        assert mean == pytest.approx(sum(at[x]) / len(at[x]))
        assert (low, high) == (min(at[x]), max(at[x]))


def test_a_band_spans_its_range_and_stays_when_a_curve_is_thinned_out():
    count = 10 * MOST_POINTS
    band = [(float(x), -1.0, 1.0) for x in range(count)]
    band[77] = (77.0, -5.0, 1.0)
    line = Line("mean", "red", [(x, 0.0) for x, _, _ in band], band=band)
    svg = line_chart("t", [line])
    (polygon,) = re.findall(r'<polygon points="([^"]*)"', svg)
    corners = [tuple(map(float, corner.split(","))) for corner in polygon.split()]
    assert len(corners) <= 2 * MOST_POINTS
    heights = sorted(y for _, y in corners)
    (curve,) = re.findall(r'<polyline points="([^"]*)"', svg)
    middle = float(curve.split()[0].split(",")[1])
    assert heights[-1] - middle == pytest.approx(5 * (middle - heights[0]), rel=0.01)
    assert "mean: 0 (-5 to 1)" in svg


def test_a_comparison_lays_curves_over_each_other_and_names_what_differs(runs, tmp_path):
    out = write_comparison(runs, tmp_path / "out.html")
    text = out.read_text()
    page = Page(text)
    assert {"headline", "curves", "recipes", "browser"} <= set(page.ids)
    assert page.texts["h1"] == ["3 runs"]
    assert "eval avg@2" in page.texts["h3"] and "Training reward" in page.texts["h3"]
    assert text.count("<polygon") == 4, "two drawings of the reward, and two evaluations"
    assert "step 2\nopo (2 runs): 0.5 (0.25 to 0.75)\ngrpo: 0.4" in text
    cells = [cell.split() for cell in page.texts["td"]]
    assert ["algorithm.estimator"] in cells and ["1e-05"] in cells
    (groups,) = found_in(page).values()
    assert [group["members"][0]["text"] for group in groups] == [f"of {run.name}" for run in runs]
    assert json.loads(page.texts["script"][0])["runs"] == [run.name for run in runs]


def test_the_command_writes_a_comparison_beside_the_first_run(runs, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, runs)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    assert (tmp_path / "comparison.html").is_file()


def test_a_run_that_is_given_twice_is_refused(runs, tmp_path):
    with pytest.raises(LogError, match=r"grpo is given twice"):
        write_comparison([*runs, tmp_path / "opo_s0" / ".." / "grpo"], tmp_path / "out.html")
