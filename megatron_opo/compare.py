"""The same recipe under several estimators and seeds: `megatron-opo compare`."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_opo.errors import RecipeError
from megatron_opo.recipe_file import load_recipe

if TYPE_CHECKING:
    from megatron_opo.observe.console import Console

DESCRIPTION = (
    "Train a recipe once for each estimator and seed, one run after the other, and compare what "
    "came of them. Runs that are complete are not repeated, and one that was stopped goes on: the "
    "same command again. On a cluster start them as an array of jobs (docs/cluster.md), each with "
    "run_dir=DIR/ESTIMATOR_seed_N, and give --only-summary."
)
OURS = ("algorithm.estimator=", "seed=", "run_dir=", "name=", "log.policy_shift=")


@dataclass(frozen=True)
class Run:
    estimator: str
    seed: int
    directory: Path

    @property
    def label(self) -> str:
        return f"{self.estimator}, seed {self.seed}"

    def overrides(self) -> list[str]:
        return [
            f"algorithm.estimator={self.estimator}",
            f"seed={self.seed}",
            f"name={self.directory.name}",
            f"run_dir={self.directory}",
            "log.policy_shift=true",
        ]


@dataclass(frozen=True)
class Column:
    """What a run is judged by: `value` of its training and evaluation records."""

    title: str
    value: Callable[[list[dict[str, Any]], list[dict[str, Any]]], float | None]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="YAML file, e.g. recipes/quickstart_cpu.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="changes to the recipe"
    )
    parser.add_argument("--estimators", default="opo,grpo", metavar="A,B", help="default: opo,grpo")
    parser.add_argument("--seeds", default="0,1,2", metavar="N,M", help="default: 0,1,2")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="of the runs; default: runs/compare_NAME"
    )
    parser.add_argument(
        "--only-summary", action="store_true", help="train nothing: compare the runs that are there"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--quiet", action="store_true", help="say only errors and where the comparison is"
    )
    output.add_argument(
        "--json", action="store_true", help="one JSON object a line for each run, for programs"
    )


def run(options: argparse.Namespace) -> int:
    """Train what is not complete, then write DIR/summary.md and DIR/report.html; the exit code."""
    # What these import is not needed by other commands.
    from megatron_opo.observe.comparison import write_comparison
    from megatron_opo.observe.console import Console
    from megatron_opo.observe.files import read_metrics, replace_text

    runs = planned_runs(options)
    mode = "json" if options.json else "quiet" if options.quiet else "lines"
    # Closed by the command, however this ends.
    options.console = console = Console(0 if options.only_summary else len(runs), mode=mode)
    console.ticker.of_what = "runs"
    directory = runs[0].directory.parent
    console.event("start", directory=str(directory), runs=[each.label for each in runs])
    if not options.only_summary:
        for number, each in enumerate(runs, 1):
            if code := train(each, options.recipe, options.overrides, console):
                return code
            console.ticker.steps_done = number
    console.start_phase("compare")
    found = {each: read_metrics(each.directory) for each in runs}
    text = summary(found)
    replace_text(directory / "summary.md", text)
    report = write_comparison([each.directory for each in runs], directory / "report.html")
    console.close()
    console.line(f"\n{text}")
    written = {"summary": str(directory / "summary.md"), "report": str(report)}
    console.last(", ".join(written.values()), **written)
    return 0


def planned_runs(options: argparse.Namespace) -> list[Run]:
    """In turns: all estimators of a seed, then the next seed. All recipes are checked first.

    Raises:
        RecipeError: an estimator or seed that is none, or given twice; a recipe that does not
            load.
    """
    for override in options.overrides:
        if override.startswith(OURS):
            raise RecipeError(
                f"{override}: `compare` sets this field itself; use --estimators, --seeds or --dir"
            )
    estimators = _listed("--estimators", options.estimators)
    try:
        seeds = [int(seed) for seed in _listed("--seeds", options.seeds)]
    except ValueError:
        raise RecipeError(f"--seeds: {options.seeds!r}, must be whole numbers: 0,1,2") from None
    recipe = load_recipe(options.recipe, options.overrides)
    directory = (options.dir or Path("runs") / f"compare_{recipe.name}").absolute()
    runs = [
        Run(estimator, seed, directory / f"{estimator}_seed_{seed}")
        for seed in seeds
        for estimator in estimators
    ]
    for each in runs:
        load_recipe(options.recipe, [*options.overrides, *each.overrides()])
    return runs


def _listed(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise RecipeError(f"{option}: {text!r}, must be different words with commas between them")
    return words


def train(each: Run, recipe: Path, overrides: Sequence[str], console: "Console") -> int:
    """The run's exit code; what it prints goes to a file beside it."""
    from megatron_opo.failure import error_text
    from megatron_opo.observe.text import duration

    def steps_so_far() -> str:
        return _newest_step(each.directory)

    each.directory.parent.mkdir(parents=True, exist_ok=True)
    log = each.directory.with_suffix(".log")
    command = [sys.executable, "-m", "megatron_opo", "train", str(recipe), *overrides]
    start = time.monotonic()
    console.start_phase(each.label)
    console.ask(steps_so_far)
    with log.open("ab") as file:
        done = subprocess.run([*command, *each.overrides()], stdout=file, stderr=file)
    if done.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()[-12:]
        text = f"{each.label} ended with exit code {done.returncode}; the end of {log}:"
        console.close()
        console.event("error", text=text, log=str(log))
        print(error_text("\n".join([text, *lines])), file=sys.stderr)
        return done.returncode
    seconds = time.monotonic() - start
    console.line(f"{each.label}: {duration(seconds)}")
    console.event("run", run=each.label, directory=str(each.directory), seconds=round(seconds, 1))
    return 0


def _newest_step(run_path: Path) -> str:
    """How far a run that goes on is; "" when it has no step yet."""
    from megatron_opo.errors import LogError
    from megatron_opo.observe.files import read_metrics

    try:
        steps = [record["step"] for record in read_metrics(run_path) if record["kind"] == "train"]
    except LogError:
        return ""
    return f"step {steps[-1]}" if steps else ""


def _mean(name: str, last: float = 1.0) -> Callable[..., float | None]:
    """Over the last share of the steps, of those that have a value."""

    def value(steps: list[dict[str, Any]], _evals: list[dict[str, Any]]) -> float | None:
        part = [step.get(name) for step in steps[-max(1, int(last * len(steps))) :]]
        part = [value for value in part if value is not None]
        return fmean(part) if part else None

    return value


def _last_eval(_steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> float | None:
    for record in reversed(evals):
        for name, value in record.items():
            if name.startswith("eval/avg@"):
                return value
    return None


COLUMNS = (
    Column("last eval, avg@k", _last_eval),
    Column("reward, last quarter", _mean("critic/rewards/mean", last=0.25)),
    Column("entropy, last quarter", _mean("actor/entropy", last=0.25)),
    Column("KL to the start, last quarter", _mean("on_policy/kl_to_start", last=0.25)),
    Column("KL of a step, mean", _mean("on_policy/kl_step")),
    Column("response length, last quarter", _mean("response_length/mean", last=0.25)),
    Column("gradient norm, mean", _mean("actor/grad_norm")),
)


def values_of(records: list[dict[str, Any]]) -> list[float | None]:
    """One of each column."""
    steps = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    return [column.value(steps, evals) for column in COLUMNS]


def summary(found: dict[Run, list[dict[str, Any]]]) -> str:
    """A table of each estimator's means over seeds with lowest and highest, one of the differences
    from the first estimator, seed by seed, and one of single runs."""
    values = {each: values_of(records) for each, records in found.items()}
    estimators = list(dict.fromkeys(each.estimator for each in found))
    seeds = list(dict.fromkeys(each.seed for each in found))
    by = {(each.estimator, each.seed): row for each, row in values.items()}
    lines = [
        f"Seeds {', '.join(map(str, seeds))}: mean, and lowest to highest. Entropies and KL are in "
        "nats a token.",
        "",
        *_head("estimator"),
    ]
    for estimator in estimators:
        columns = zip(*(by[estimator, seed] for seed in seeds), strict=True)
        lines.append(_row(estimator, [_spread(column) for column in columns]))
    first = estimators[0]
    for other in estimators[1:]:
        pairs = [zip(by[other, seed], by[first, seed], strict=True) for seed in seeds]
        columns = zip(*([_minus(a, b) for a, b in pair] for pair in pairs), strict=True)
        lines.append(_row(f"{other} - {first}", [_spread(column, "+.3g") for column in columns]))
    lines += ["", *_head("run")]
    lines += [_row(each.label, [_number(v) for v in row]) for each, row in values.items()]
    return "\n".join(lines) + "\n"


def _head(first: str) -> list[str]:
    titles = [first, *(column.title for column in COLUMNS)]
    return [f"| {' | '.join(titles)} |", f"|---|{'--:|' * len(COLUMNS)}"]


def _row(label: str, cells: list[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _spread(values: Sequence[float | None], form: str = ".3g") -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    mean = format(fmean(there), form)
    if len(there) == 1:
        return mean
    return f"{mean} ({format(min(there), form)} to {format(max(there), form)})"


def _number(value: float | None) -> str:
    return "-" if value is None else format(value, ".3g")
