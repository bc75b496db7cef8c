"""A finished (or unfinished) run as one HTML file that needs nothing else to be read."""

from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_opo.observe.charts import (
    SMALL,
    WIDE,
    Line,
    legend,
    line_chart,
    stacked_chart,
    tick,
)
from megatron_opo.observe.files import replace_text
from megatron_opo.observe.page import render
from megatron_opo.observe.report_samples import browser_data, eval_comparisons, extremes
from megatron_opo.observe.run_data import Run, curve_of, read_run
from megatron_opo.observe.text import duration

BLUE, ORANGE, GREEN, PURPLE, RED, SOFT = (
    f"var(--{name})" for name in ("blue", "orange", "green", "purple", "red", "soft")
)
REPORT = "report.html"
PHASES = {"generate": BLUE, "reward": GREEN, "update": ORANGE, "sync": PURPLE}
# What the recipe means by null (`AlgorithmConfig.gap_bounds`), without a correction.
DEFAULT_GAP_LIMIT = 0.5


def write_report(run_path: Path, out: Path | None = None) -> Path:
    """Write `out`, or `run_path`/report.html, from metrics.jsonl, samples/, recipe.yaml
    and versions.json.

    A run that has not ended, was not evaluated or kept no samples gives a report of what there
    is.

    Raises:
        LogError: there is no metrics.jsonl, a file is broken, or the report cannot be written.
    """
    path = out or Path(run_path) / REPORT
    replace_text(path, report_page(run_path))
    return path


def report_page(run_path: Path, *, live: bool = False) -> str:
    """The HTML of `write_report`; a live one asks its server whether there is a newer one.

    Raises:
        LogError: there is no metrics.jsonl, or a file is broken.
    """
    run_path = Path(run_path)
    run = read_run(run_path)
    compared, best_and_worst = eval_comparisons(run_path), extremes(run_path)
    rows = [*(compared["rows"] if compared else ()), *best_and_worst]
    parts = [part for row in rows for card in row["cards"] for part in card["parts"]]
    return render(
        "report.html.j2",
        browser_data([(run.name, run_path)]),
        live=live,
        name=run.name,
        about=about(run),
        tiles=_tiles(run),
        hero=_hero(run),
        charts=_charts(run),
        timing=timing(run),
        comparisons=compared,
        extremes=best_and_worst,
        several_speak=any(added for _, added in parts),
        metrics=_metric_table(run),
        recipe_text=run.recipe_text,
        versions=run.versions,
    )


def about(run: Run) -> str:
    """One line: model, estimator, how far it came, when."""
    done = run.train[-1]["step"] if run.train else 0
    total = run.setting("train", "steps")
    model = Path(str(run.setting("model", "path") or "")).name
    parts = [model, str(run.setting("algorithm", "estimator") or "")]
    if isinstance(total, int):
        state = "finished" if done >= total else "not finished"
        parts.append(f"{state}: {done} of {total} steps")
    else:
        parts.append(f"{done} steps")
    times = [record.get("time") for record in (*run.train, *run.evals)]
    times = [time for time in times if isinstance(time, str)]
    if times:
        parts.append(f"{datetime.fromisoformat(max(times)):%Y-%m-%d %H:%M} UTC")
    return " \u00b7 ".join(part for part in parts if part)


def _tiles(run: Run) -> list[dict[str, str]]:
    """The headline numbers: label, value, note."""
    tiles = []
    rewards = run.curve("critic/rewards/mean")
    if rewards:
        size = max(1, min(10, len(rewards) // 5))
        start = sum(y for _, y in rewards[:size]) / size
        end = sum(y for _, y in rewards[-size:]) / size
        note = f"mean of first and last {size} steps" if size > 1 else "first and last step"
        value = _change(start, end) if len(rewards) > 1 else _headline(end)
        tiles.append({"label": "training reward", "value": value, "note": note})
    for prefix, meaning in (("eval/avg@", "mean reward"), ("eval/pass@", "solved")):
        metric = run.eval_metric(prefix)
        if metric and (points := curve_of(run.evals, metric)):
            prompts = run.evals[-1].get("eval/prompts")
            note = meaning if prompts is None else f"{meaning}, {prompts:g} held-out prompts"
            start, end = points[0][1], points[-1][1]
            value = _change(start, end) if len(points) > 1 else _headline(end)
            tiles.append({"label": metric.replace("/", " "), "value": value, "note": note})
    records = [*run.train, *run.evals]
    seconds = max((r.get("elapsed_s") or 0.0 for r in records), default=0.0)
    steps = run.curve("timing_s/step")
    mean = f"{duration(sum(y for _, y in steps) / len(steps))} a step" if steps else ""
    tiles.append({"label": "wall time", "value": duration(seconds), "note": mean})
    tokens = sum(y for _, y in run.curve("rollout/tokens"))
    if tokens:
        samples = sum(y for _, y in run.curve("rollout/samples"))
        note = f"in {samples:,.0f} responses"
        tiles.append({"label": "tokens sampled", "value": tick(tokens), "note": note})
    gaps = run.curve("on_policy/logprob_gap_max")
    if gaps:
        value = f"{max(y for _, y in gaps):.2g}"
        note = "nats, any token, trainer against server"
        tiles.append({"label": "largest logprob gap", "value": value, "note": note})
    return tiles


def _change(start: float, end: float) -> str:
    return f"{_headline(start)} \u2192 {_headline(end)}"


def _headline(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 10 else f"{value:.3g}"


def _hero(run: Run) -> dict[str, Any] | None:
    """The curve the run is about, in a wide and a narrow drawing."""
    lines = [
        Line("training reward", BLUE, run.curve("critic/rewards/mean"), smooth=True),
    ]
    for prefix, color in (("eval/avg@", ORANGE), ("eval/pass@", GREEN)):
        metric = run.eval_metric(prefix)
        if metric is not None and not _same_as_average(run, metric):
            label = metric.replace("/", " ")
            lines.append(Line(label, color, curve_of(run.evals, metric), markers=True))
    if not any(line.points for line in lines):
        return None
    wide, narrow = (
        line_chart("reward", lines, size=size, x_range=run.steps, y_range=(0.0, 0.0))
        for size in (WIDE, SMALL)
    )
    return {"wide": wide, "narrow": narrow, "legend": legend(lines)}


def _same_as_average(run: Run, metric: str) -> bool:
    """With one sample a prompt and rewards of 0 and 1, pass@1 is avg@1 again."""
    average = run.eval_metric("eval/avg@")
    return (
        metric != average
        and average is not None
        and (curve_of(run.evals, metric) == curve_of(run.evals, average))
    )


def _gap_limit(run: Run) -> float | None:
    """At which gap of a token the run stops; None: at none, or it is not known."""
    limit = run.setting("algorithm", "max_logprob_gap")
    correction = run.setting("algorithm", "correction")
    if limit is None and isinstance(correction, dict) and correction.get("kind") == "none":
        return DEFAULT_GAP_LIMIT
    return limit


def _charts(run: Run) -> list[dict[str, str]]:
    """The small charts: title, what it shows, SVG, legend."""
    limit = _gap_limit(run)
    limits = ((f"stops at {limit:g}", limit),) if isinstance(limit, int | float) else ()
    gap_max = Line("max", PURPLE, run.curve("on_policy/logprob_gap_max"), keep_peaks=True)
    gap_mean = Line("mean", BLUE, run.curve("on_policy/logprob_gap_mean"))
    truncated = run.curve("response_length/clip_ratio")
    equal = run.curve("rollout/groups_all_equal")
    unscorable = run.curve("rollout/unscorable_share")
    if not any(share for _, share in unscorable):
        unscorable = []
    baseline = run.curve("advantages/baseline_mean")
    plots = [
        ("Response length", "tokens, mean of the step", {}, [
            Line("mean", BLUE, run.curve("response_length/mean"), smooth=True),
            Line("eval", ORANGE, curve_of(run.evals, "eval/response_length/mean"), markers=True),
        ]),
        ("Entropy", "nats a token, at the sampling temperature", {}, [
            Line("entropy", GREEN, run.curve("actor/entropy"), smooth=True),
        ]),
        ("KL to the start", "nats a token", {}, [
            Line("KL to the start", PURPLE, run.curve("on_policy/kl_to_start")),
        ]),
        ("KL of a step", "nats a token", {}, [
            Line("KL of a step", BLUE, run.curve("on_policy/kl_step")),
        ]),
        ("Logprob gap", "trainer against server, nats", {"log": True, "limits": limits},
         [gap_max, gap_mean]),
        ("Gradient norm", "before clipping", {}, [
            Line("gradient norm", ORANGE, run.curve("actor/grad_norm"), smooth=True),
        ]),
        ("Baseline", "what is subtracted from rewards, mean over groups", {}, [
            Line("baseline", BLUE, baseline, smooth=True),
        ]),
        ("Shares", "responses cut short, or without a reward; groups without signal",
         {"y_range": (0.0, 0.05)}, [
            Line("truncated", ORANGE, truncated),
            Line("groups all equal", PURPLE, equal, smooth=True),
            Line("no reward", RED, unscorable),
        ]),
    ]  # fmt: skip
    charts = []
    for title, about, options, lines in plots:
        if any(line.points for line in lines):
            svg = line_chart(title, lines, x_range=run.steps, **options)
            charts.append({"title": title, "about": about, "svg": svg, "legend": legend(lines)})
    return charts


def timing(run: Run) -> dict[str, str] | None:
    """What a step spends its time on, in a wide and a narrow drawing."""
    lines = [Line(name, color, run.curve(f"timing_s/{name}")) for name, color in PHASES.items()]
    if not any(line.points for line in lines):
        return None
    others = [(float(record["step"]), _seconds_of_others(record)) for record in run.train]
    lines.append(Line("other phases", SOFT, others))
    lines.append(Line("unaccounted", RED, run.curve("timing_s/unaccounted")))
    wide, narrow = (stacked_chart("time of a step", lines, size=s) for s in (WIDE, SMALL))
    return {"wide": wide, "narrow": narrow, "legend": legend(lines)}


def _seconds_of_others(record: dict[str, Any]) -> float:
    """Of the phases without a colour of their own; what they consist of is in them."""
    known = {f"timing_s/{name}" for name in (*PHASES, "step", "unaccounted")}
    return sum(
        value or 0.0
        for name, value in record.items()
        if name.startswith("timing_s/") and name.count("/") == 1 and name not in known
    )


def _metric_table(run: Run) -> list[dict[str, str]]:
    """First, last, least and largest value of every metric."""
    names = {name for record in [*run.train, *run.evals] for name in record}
    rows = []
    for name in sorted(names - {"step", "kind", "time", "elapsed_s"}):
        points = curve_of(run.train, name) or curve_of(run.evals, name)
        values = [y for _, y in points]
        if values:
            numbers = (values[0], values[-1], min(values), max(values))
            rows.append({"name": name, "values": [tick(v) for v in numbers]})
    return rows
