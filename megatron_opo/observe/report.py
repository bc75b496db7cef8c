"""A finished (or unfinished) run as one HTML file that needs nothing else to be read."""

import json
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import yaml

from megatron_opo.errors import LogError
from megatron_opo.observe.charts import (
    SMALL,
    WIDE,
    Line,
    Point,
    legend,
    line_chart,
    stacked_chart,
    tick,
)
from megatron_opo.observe.console import duration
from megatron_opo.observe.files import read_metrics, replace_text
from megatron_opo.observe.samples import list_samples, read_samples

LONGEST_TEXT = 6000
GROUPS_SHOWN = 3
# C0 controls and DEL would vanish or garble the page: show their Unicode pictures instead.
VISIBLE_CONTROLS = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {127: 0x2421}
BLUE, ORANGE, GREEN, PURPLE, RED, SOFT = (
    f"var(--{name})" for name in ("blue", "orange", "green", "purple", "red", "soft")
)


PHASES = {"generate": BLUE, "reward": GREEN, "update": ORANGE, "sync": PURPLE}


@dataclass(frozen=True)
class Run:
    """What a run directory tells, the newest record of each step."""

    name: str
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    recipe_text: str
    recipe: dict[str, Any]
    versions: dict[str, str]

    def curve(self, metric: str) -> list[Point]:
        return _curve(self.train, metric)

    def eval_metric(self, prefix: str) -> str | None:
        """The metric `prefix`k with the largest k, e.g. eval/pass@8."""
        names = {name for record in self.evals for name in record if name.startswith(prefix)}
        return max(names, key=lambda name: int(name.removeprefix(prefix)), default=None)

    def setting(self, section: str, key: str) -> Any:
        values = self.recipe.get(section)
        return values.get(key) if isinstance(values, dict) else None


def write_report(run_path: Path) -> Path:
    """Write `run_path`/report.html from metrics.jsonl, samples/, recipe.yaml and versions.json.

    A run that has not ended, was not evaluated or kept no samples gives a report of what there
    is.

    Raises:
        LogError: there is no metrics.jsonl, a file is broken, or the report cannot be written.
    """
    run_path = Path(run_path)
    run = _read_run(run_path)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        files("megatron_opo.observe").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    page = template.render(
        name=run.name,
        about=_about(run),
        tiles=_tiles(run),
        hero=_hero(run),
        charts=_charts(run),
        timing=_timing(run),
        comparisons=_eval_comparisons(run_path),
        extremes=_extremes(run_path),
        metrics=_metric_table(run),
        recipe_text=run.recipe_text,
        versions=run.versions,
    )
    path = run_path / "report.html"
    replace_text(path, page.translate(VISIBLE_CONTROLS))
    return path


def _read_run(run_path: Path) -> Run:
    if not (run_path / "metrics.jsonl").is_file():
        raise LogError(
            f"{run_path} has no metrics.jsonl; give the directory of a run that has started "
            "(runs/NAME)"
        )
    newest = {(r["kind"], r["step"]): r for r in read_metrics(run_path)}
    records = sorted(newest.values(), key=lambda record: record["step"])
    recipe_text = _read_text(run_path / "recipe.yaml")
    try:
        recipe = yaml.safe_load(recipe_text)
        versions = json.loads(_read_text(run_path / "versions.json") or "{}")
    except (yaml.YAMLError, ValueError) as error:
        raise LogError(
            f"{run_path}: recipe.yaml or versions.json cannot be parsed: {error}; restore it or "
            "remove it"
        ) from error
    recipe = recipe if isinstance(recipe, dict) else {}
    return Run(
        name=str(recipe.get("name") or run_path.resolve().name),
        train=[record for record in records if record["kind"] == "train"],
        evals=[record for record in records if record["kind"] == "eval"],
        recipe_text=recipe_text,
        recipe=recipe,
        versions=versions if isinstance(versions, dict) else {},
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: cannot be read: {error}; restore it or remove it") from error


def _curve(records: list[dict[str, Any]], metric: str) -> list[Point]:
    points = [(float(record["step"]), record.get(metric)) for record in records]
    return [(step, value) for step, value in points if isinstance(value, int | float)]


def _about(run: Run) -> str:
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
        if metric and (points := _curve(run.evals, metric)):
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
            lines.append(Line(label, color, _curve(run.evals, metric), markers=True))
    if not any(line.points for line in lines):
        return None
    wide, narrow = (line_chart("reward", lines, size=s, y_range=(0.0, 0.0)) for s in (WIDE, SMALL))
    return {"wide": wide, "narrow": narrow, "legend": legend(lines)}


def _same_as_average(run: Run, metric: str) -> bool:
    """With one sample a prompt and rewards of 0 and 1, pass@1 is avg@1 again."""
    average = run.eval_metric("eval/avg@")
    return (
        metric != average
        and average is not None
        and (_curve(run.evals, metric) == _curve(run.evals, average))
    )


def _charts(run: Run) -> list[dict[str, str]]:
    """The small charts: title, what it shows, SVG, legend."""
    limit = run.setting("algorithm", "max_logprob_gap")
    limits = ((f"stops at {limit:g}", limit),) if isinstance(limit, int | float) else ()
    gap_max = Line("max", PURPLE, run.curve("on_policy/logprob_gap_max"), keep_peaks=True)
    gap_mean = Line("mean", BLUE, run.curve("on_policy/logprob_gap_mean"))
    truncated = run.curve("response_length/clip_ratio")
    equal = run.curve("rollout/groups_all_equal")
    baseline = run.curve("advantages/baseline_mean")
    plots = [
        ("Response length", "tokens, mean of the step", {}, [
            Line("mean", BLUE, run.curve("response_length/mean"), smooth=True),
            Line("eval", ORANGE, _curve(run.evals, "eval/response_length/mean"), markers=True),
        ]),
        ("Entropy", "nats a token, at the sampling temperature", {}, [
            Line("entropy", GREEN, run.curve("actor/entropy"), smooth=True),
        ]),
        ("Logprob gap", "trainer against server, nats", {"log": True, "limits": limits},
         [gap_max, gap_mean]),
        ("Gradient norm", "before clipping", {}, [
            Line("gradient norm", ORANGE, run.curve("actor/grad_norm"), smooth=True),
        ]),
        ("Baseline", "what is subtracted from rewards, mean over groups", {}, [
            Line("baseline", BLUE, baseline, smooth=True),
        ]),
        ("Shares", "responses cut short; groups without signal",
         {"y_range": (0.0, 0.05)}, [
            Line("truncated", ORANGE, truncated),
            Line("groups all equal", PURPLE, equal, smooth=True),
        ]),
    ]  # fmt: skip
    charts = []
    for title, about, options, lines in plots:
        if any(line.points for line in lines):
            svg = line_chart(title, lines, **options)
            charts.append({"title": title, "about": about, "svg": svg, "legend": legend(lines)})
    return charts


def _timing(run: Run) -> dict[str, str] | None:
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


def _eval_comparisons(run_path: Path) -> dict[str, Any] | None:
    """The first response to held-out prompts in the first and in the last evaluation: the three
    whose reward rose most, and the one that rose least or fell, so that a loss is not hidden.
    """
    evaluations = list_samples(run_path, "eval")
    if len(evaluations) < 2:
        return None
    (first_step, first_path), (last_step, last_path) = evaluations[0], evaluations[-1]
    earlier = {group[0].get("prompt"): group for group in read_samples(first_path)}
    pairs = []
    for late in read_samples(last_path):
        early = earlier.get(late[0].get("prompt"))
        if early is not None:
            pairs.append((early, late))
    pairs.sort(key=lambda pair: (_rise(pair[0][:1], pair[1][:1]), _rise(*pair)), reverse=True)
    rows = [
        {
            "prompt": _shown(early[0].get("prompt")),
            "truth": _shown(early[0].get("ground_truth")),
            "change": _change(_mean_reward(early), _mean_reward(late)),
            "samples": len(late),
            "cards": [
                {"title": f"before, step {first_step}", **_card(early[0])},
                {"title": f"after, step {last_step}", **_card(late[0])},
            ],
        }
        for early, late in [*pairs[:3], *pairs[3:][-1:]]
    ]
    return {"first": first_step, "last": last_step, "rows": rows} if rows else None


def _extremes(run_path: Path) -> list[dict[str, Any]]:
    """Of the first and the last step, the best and the worst response that were kept."""
    kept = list_samples(run_path, "train")
    rows = []
    for step, path in dict.fromkeys([*kept[:1], *kept[-1:]]):
        groups = read_samples(path)
        scored = [r for group in groups for r in group if r.get("reward") is not None]
        if not scored:
            continue
        # Between equal rewards the advantage tells how far from its group a response was.
        order = sorted(scored, key=lambda r: (r["reward"], r.get("advantage") or 0.0))
        worst, best = order[0], order[-1]
        rows.append(
            {
                "step": step,
                "cards": [{"title": "best", **_card(best)}, {"title": "worst", **_card(worst)}],
                "groups": [
                    {"prompt": _shown(group[0].get("prompt")), "cards": [_card(r) for r in group]}
                    for group in groups[:GROUPS_SHOWN]
                ],
            }
        )
    return rows


def _rise(early: list[dict[str, Any]], late: list[dict[str, Any]]) -> float:
    return _mean_reward(late) - _mean_reward(early)


def _mean_reward(group: list[dict[str, Any]]) -> float:
    return sum(record.get("reward") or 0.0 for record in group) / len(group)


def _card(record: dict[str, Any]) -> dict[str, Any]:
    reward, advantage = record.get("reward"), record.get("advantage")
    return {
        "step": record.get("step"),
        "prompt": _shown(record.get("prompt")),
        "response": _shown(record.get("response")),
        "truth": _shown(record.get("ground_truth")),
        "reward": "unscorable" if reward is None else f"{reward:.3g}",
        "tone": "none" if reward is None else "good" if reward > 0 else "bad",
        "advantage": None if advantage is None else f"{advantage or 0:+.3g}",
        "length": record.get("length"),
        "cut": record.get("finish_reason") == "length",
        "error": _shown(record.get("reward_error")) if record.get("reward_error") else None,
    }


def _shown(value: Any) -> str:
    """Text from a data set or a model, at a bearable length; the template escapes it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}\n[... {len(text) - LONGEST_TEXT:,} more characters]"
    return text


def _metric_table(run: Run) -> list[dict[str, str]]:
    """First, last, least and largest value of every metric."""
    names = {name for record in [*run.train, *run.evals] for name in record}
    rows = []
    for name in sorted(names - {"step", "kind", "time", "elapsed_s"}):
        points = _curve(run.train, name) or _curve(run.evals, name)
        values = [y for _, y in points]
        if values:
            numbers = (values[0], values[-1], min(values), max(values))
            rows.append({"name": name, "values": [tick(v) for v in numbers]})
    return rows
