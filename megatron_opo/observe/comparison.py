"""Several runs as one HTML file: their curves over each other, and what differs between them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opo.errors import LogError
from megatron_opo.observe.charts import SMALL, WIDE, Line, Point, legend, line_chart
from megatron_opo.observe.files import replace_text
from megatron_opo.observe.page import render
from megatron_opo.observe.report import timing
from megatron_opo.observe.report_samples import browser_data
from megatron_opo.observe.run_data import Run, curve_of, read_run
from megatron_opo.observe.run_groups import RunGroup, differences, group_runs

REWARD = ("Training reward", "mean of the step", "critic/rewards/mean")
SHARE = {"y_range": (0.0, 0.05)}
# Title, what it shows, metric, options of the chart and of its lines.
CHARTS: tuple[tuple[str, str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("Response length", "tokens, mean of the step", "response_length/mean", {}, {"smooth": True}),
    ("Entropy", "nats a token", "actor/entropy", {}, {"smooth": True}),
    ("KL to the start", "nats a token", "on_policy/kl_to_start", {}, {}),
    ("KL of a step", "nats a token", "on_policy/kl_step", {}, {}),
    ("Logprob gap", "largest of a step, nats", "on_policy/logprob_gap_max", {"log": True},
     {"keep_peaks": True}),
    ("Gradient norm", "before clipping", "actor/grad_norm", {}, {"smooth": True}),
    ("Baseline", "mean over groups", "advantages/baseline_mean", {}, {"smooth": True}),
    ("Groups without signal", "share", "rollout/groups_all_equal", SHARE, {"smooth": True}),
    ("Cut short", "share of responses", "response_length/clip_ratio", SHARE, {"smooth": True}),
)  # fmt: skip
TABLE = (
    ("reward", "critic/rewards/mean"),
    ("length", "response_length/mean"),
    ("entropy", "actor/entropy"),
    ("KL to start", "on_policy/kl_to_start"),
    ("s a step", "timing_s/step"),
)


def write_comparison(run_paths: Sequence[Path], out: Path) -> Path:
    """Write `out`, an HTML file that lays the curves of the runs over each other.

    Raises:
        LogError: a run is given twice or has no metrics.jsonl, a file is broken, or `out` cannot
            be written.
    """
    paths = [Path(path) for path in run_paths]
    for i, path in enumerate(paths):
        if path.resolve() in [earlier.resolve() for earlier in paths[:i]]:
            raise LogError(f"{path} is given twice; name each run once")
    runs = [read_run(path) for path in paths]
    groups = group_runs(runs)
    evals = [metric for name in ("avg", "pass") if (metric := _largest(runs, name))]
    named = [*TABLE, *((metric.replace("/", " "), metric) for metric in evals)]
    columns = [(heading, metric) for heading, metric in named if any(_of(r, metric) for r in runs)]
    ends = [end for run in runs for end in run.steps or ()]
    steps = (min(ends), max(ends)) if ends else None
    page = render(
        "comparison.html.j2",
        browser_data(list(zip(_run_names(runs, paths), paths, strict=True))),
        name=f"{len(runs)} runs",
        groups=groups,
        headings=[heading for heading, _ in columns],
        rows=[_row(group, [metric for _, metric in columns]) for group in groups],
        hero=_hero(groups, steps),
        charts=_charts(groups, evals, steps),
        timing=_timing(groups),
        recipes=differences(groups),
        versions=differences(groups, lambda run: run.versions),
    )
    replace_text(out, page)
    return out


def _run_names(runs: list[Run], paths: list[Path]) -> list[str]:
    """The name of each run; where several have it, its directory."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def _largest(runs: list[Run], name: str) -> str | None:
    """Of eval/`name`@k the largest k that all evaluated runs have."""
    found = [
        {m for record in run.evals for m in record if m.startswith(f"eval/{name}@")}
        for run in runs
        if run.evals
    ]
    common = set.intersection(*found) if found else set()
    return max(common, key=lambda metric: int(metric.partition("@")[2]), default=None)


def _of(run: Run, metric: str) -> list[Point]:
    return curve_of(run.evals if metric.startswith("eval/") else run.train, metric)


def _row(group: RunGroup, metrics: list[str]) -> dict[str, Any]:
    steps = sorted({run.train[-1]["step"] if run.train else 0 for run in group.runs})
    return {
        "group": group,
        "steps": " to ".join(str(step) for step in dict.fromkeys([steps[0], steps[-1]])),
        "values_at_end": [
            _at_end([_of(run, metric) for run in group.runs], metric) for metric in metrics
        ],
    }


def _at_end(curves: list[list[Point]], metric: str) -> dict[str, str]:
    """Mean over the curves of their end, and the range of these: of a training metric the mean of
    its last tenth, of an evaluation the last."""
    ends = []
    for curve in curves:
        size = 1 if metric.startswith("eval/") else max(1, len(curve) // 10)
        last = [y for _, y in curve[-size:]]
        if last:
            ends.append(sum(last) / len(last))
    if not ends:
        return {"mean": "-", "range": ""}
    span = f"{min(ends):.3g} to {max(ends):.3g}" if len(ends) > 1 else ""
    return {"mean": f"{sum(ends) / len(ends):.3g}", "range": span}


def _hero(groups: list[RunGroup], steps: tuple[float, float] | None) -> dict[str, Any] | None:
    title, about, metric = REWARD
    lines = [group.line(metric, smooth=True) for group in groups]
    if not any(line.points for line in lines):
        return None
    wide, narrow = (
        line_chart(title, lines, size=size, x_range=steps, y_range=(0.0, 0.0))
        for size in (WIDE, SMALL)
    )
    return {"title": title, "about": about, "wide": wide, "narrow": narrow,
            "legend": legend(lines)}  # fmt: skip


def _charts(
    groups: list[RunGroup], evals: list[str], steps: tuple[float, float] | None
) -> list[dict[str, str]]:
    plots: list[tuple[str, str, list[Line], dict[str, Any]]] = []
    for metric in evals:
        lines = [group.line(metric, of_evals=True, markers=True) for group in groups]
        plots.append((metric.replace("/", " "), "held-out prompts", lines, {}))
    for title, about, metric, of_chart, of_line in CHARTS:
        lines = [group.line(metric, **of_line) for group in groups]
        plots.append((title, about, lines, of_chart))
    return [
        {"title": title, "about": about, "legend": legend(lines),
         "svg": line_chart(title, lines, x_range=steps, **options)}
        for title, about, lines, options in plots
        if any(line.points for line in lines)
    ]  # fmt: skip


def _timing(groups: list[RunGroup]) -> list[dict[str, str]]:
    """Of the first run of each group: how a step divides is a matter of machine and recipe."""
    charts = []
    for group in groups:
        drawn = timing(group.runs[0])
        if drawn is not None:
            title = group.label if len(group.runs) == 1 else f"{group.label}: {group.runs[0].name}"
            charts.append({"title": title, "svg": drawn["narrow"], "legend": drawn["legend"]})
    return charts
