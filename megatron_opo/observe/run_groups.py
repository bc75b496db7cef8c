"""Several runs side by side: which differ only in their seed, and in what the others differ."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_opo.observe.charts import Line, Point, Range
from megatron_opo.observe.run_data import Run, curve_of

COLORS = tuple(
    f"var(--{name})"
    for name in ("blue", "orange", "green", "purple", "red", "teal", "pink", "olive")
)
# What runs of one experiment differ in: its label is made of the rest.
OF_ONE_RUN = ("name", "run_dir", "seed")
SETTINGS_IN_LABEL = 3
SEED_IN_NAME = re.compile(r"[-_. ]+(seed|s)?[-_. ]*\d+$")


@dataclass(frozen=True)
class RunGroup:
    """Runs whose recipes differ in nothing but seed, name and directory."""

    label: str
    color: str
    dashed: bool
    runs: list[Run]

    def line(self, metric: str, *, of_evals: bool = False, **options: Any) -> Line:
        """The mean over the runs that have a step and, of several runs, their range."""
        curves = [curve_of(run.evals if of_evals else run.train, metric) for run in self.runs]
        points, band = mean_and_range(curves)
        return Line(
            self.label,
            self.color,
            points,
            band=band if len(self.runs) > 1 else [],
            dashed=self.dashed,
            **options,
        )

    @property
    def seeds(self) -> str:
        return ", ".join(str(run.recipe.get("seed", "?")) for run in self.runs)


def mean_and_range(curves: list[list[Point]]) -> tuple[list[Point], list[Range]]:
    """Over the curves that have a value at a step: their mean, and (step, least, largest)."""
    values: dict[float, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            values.setdefault(step, []).append(value)
    steps = sorted(values)
    points = [(step, sum(values[step]) / len(values[step])) for step in steps]
    return points, [(step, min(values[step]), max(values[step])) for step in steps]


def group_runs(runs: list[Run]) -> list[RunGroup]:
    """Runs that differ only in the seed together, in the order given."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(json.dumps(flat_recipe(run), default=str, sort_keys=True), []).append(run)
    groups = list(alike.values())
    return [
        RunGroup(label, COLORS[i % len(COLORS)], i // len(COLORS) % 2 == 1, members)
        for i, (label, members) in enumerate(zip(_labels(groups), groups, strict=True))
    ]


def flat_recipe(run: Run) -> dict[str, Any]:
    """section.field: value, without what is of one run alone. The values of a run without a
    recipe are unknown, so that it is like no other: its name stands for them."""
    if not run.recipe:
        return {"name": run.name}
    flat: dict[str, Any] = {}
    _flatten("", run.recipe, flat)
    return {key: value for key, value in flat.items() if key not in OF_ONE_RUN}


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, into)
    else:
        into[prefix] = value


def differences(
    groups: list[RunGroup], facts: Callable[[Run], dict[str, Any]] = flat_recipe
) -> list[tuple[str, list[str]]]:
    """(name, value in each group) of those facts that are not the same in all."""
    return _differing([facts(group.runs[0]) for group in groups])


def _differing(facts: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    rows = []
    for name in dict.fromkeys(name for of_group in facts for name in of_group):
        values = [_text(of_group[name]) if name in of_group else "-" for of_group in facts]
        if len(set(values)) > 1:
            rows.append((name, values))
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _labels(groups: list[list[Run]]) -> list[str]:
    """The name that the runs of a group share; where others have it too, what differs besides."""
    names = [_common_name([run.name for run in members]) for members in groups]
    differing = _differing([flat_recipe(members[0]) for members in groups])
    labels = []
    for i, (name, members) in enumerate(zip(names, groups, strict=True)):
        if names.count(name) > 1:
            settings = [f"{k.split('.')[-1]} {v[i]}" for k, v in differing[:SETTINGS_IN_LABEL]]
            name = f"{name}: {', '.join(settings)}" if settings else name
        labels.append(f"{name} ({len(members)} runs)" if len(members) > 1 else name)
    return labels


def _common_name(names: list[str]) -> str:
    """opo_s0, opo_s1: opo."""
    if len(set(names)) == 1:
        return names[0]
    without_seed = {SEED_IN_NAME.sub("", name) for name in names}
    return without_seed.pop() if len(without_seed) == 1 else " + ".join(names)
