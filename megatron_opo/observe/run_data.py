"""What a run directory tells, read for a report."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_opo.errors import LogError
from megatron_opo.observe.charts import Point
from megatron_opo.observe.files import read_metrics


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
        return curve_of(self.train, metric)

    def eval_metric(self, prefix: str) -> str | None:
        """The metric `prefix`k with the largest k, e.g. eval/pass@8."""
        names = {name for record in self.evals for name in record if name.startswith(prefix)}
        return max(names, key=lambda name: int(name.removeprefix(prefix)), default=None)

    @property
    def steps(self) -> tuple[float, float] | None:
        """The first and the last that there is a record of."""
        steps = [float(record["step"]) for record in (*self.train, *self.evals)]
        return (min(steps), max(steps)) if steps else None

    def setting(self, section: str, key: str) -> Any:
        values = self.recipe.get(section)
        return values.get(key) if isinstance(values, dict) else None


def read_run(run_path: Path) -> Run:
    if not (run_path / "metrics.jsonl").is_file():
        raise LogError(
            f"{run_path} is not a run: it has no metrics.jsonl; give the directory of a run that "
            "has started (runs/NAME)"
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


def curve_of(records: list[dict[str, Any]], metric: str) -> list[Point]:
    points = [(float(record["step"]), record.get(metric)) for record in records]
    return [(step, value) for step, value in points if isinstance(value, int | float)]
