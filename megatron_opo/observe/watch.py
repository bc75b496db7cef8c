"""A run as it goes on: in the terminal and, when asked, on a port of this machine."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group as Rows
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_opo.errors import LogError
from megatron_opo.observe.charts import Point
from megatron_opo.observe.report import about
from megatron_opo.observe.report_samples import VISIBLE_CONTROLS
from megatron_opo.observe.run_data import Run, curve_of, read_run
from megatron_opo.observe.text import header_line, number, step_line
from megatron_opo.observe.watch_server import serving, version_of

POLL_S = 1.0
STEPS_SHOWN = 8
STEPS_FOR_ESTIMATE = 20
SPARK_WIDTH = 40
# Eight heights of a block.
BLOCKS = "".join(chr(0x2581 + i) for i in range(8))
CURVES = (
    ("reward", "critic/rewards/mean"),
    ("response length", "response_length/mean"),
    ("entropy", "actor/entropy"),
    ("KL to the start", "on_policy/kl_to_start"),
    ("logprob gap, max", "on_policy/logprob_gap_max"),
    ("gradient norm", "actor/grad_norm"),
    ("seconds a step", "timing_s/step"),
)


def watch(run_path: Path, port: int | None = None, stream: TextIO | None = None) -> None:
    """Show the run until interrupted: a picture in place on a terminal, a line a step elsewhere.

    Raises:
        LogError: there is no such run, a file of it is broken, or the port is taken.
    """
    stream = stream or sys.stdout
    assert stream is not None
    check_run(run_path)
    with ExitStack() as resources:
        address = None if port is None else resources.enter_context(serving(run_path, port))
        if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            console = RichConsole(file=stream, highlight=False)
            live = Live(console=console, auto_refresh=False)
            resources.enter_context(live)
            for run in states(run_path):
                live.update(picture(run, address), refresh=True)
        else:
            if address:
                print(f"the report: {address}", file=stream, flush=True)
            shown = 0
            print(header_line(), file=stream, flush=True)
            for run in states(run_path):
                for line in new_lines(run, shown):
                    print(line, file=stream, flush=True)
                shown = run.train[-1]["step"] if run.train else 0


def check_run(run_path: Path) -> None:
    """A run writes its recipe first and its metrics after its first step."""
    if not any((run_path / name).is_file() for name in ("recipe.yaml", "metrics.jsonl")):
        raise LogError(
            f"{run_path} is not a run: it has neither recipe.yaml nor metrics.jsonl; give the "
            "directory of a run that has started (runs/NAME)"
        )


def states(run_path: Path) -> Iterator[Run]:
    """The run, whenever its metrics have changed; the first as it is, or when it has some."""
    seen = None
    while True:
        version = version_of(run_path)
        if version is not None and version != seen:
            seen = version
            yield read_run(run_path)
        time.sleep(POLL_S)


def picture(run: Run, address: str | None = None) -> Rows:
    """What the terminal shows: how far it is, curves in a line each, the last steps."""
    curves = Table.grid(padding=(0, 2))
    for label, points in _curves(run):
        values = [value for _, value in points]
        curves.add_row(label, Text(sparkline(values), style="blue"), number(values[-1]))
    rows = [Text(f"{run.name}  {about(run)}".translate(VISIBLE_CONTROLS), style="bold")]
    if address:
        rows.append(Text(f"the report: {address}"))
    rows += [Text(""), curves, Text(""), Text(header_line(), style="bold", no_wrap=True)]
    first = run.train[-STEPS_SHOWN]["step"] - 1 if len(run.train) > STEPS_SHOWN else 0
    rows += [Text(line, no_wrap=True) for line in new_lines(run, first)]
    return Rows(*rows)


def _curves(run: Run) -> list[tuple[str, list[Point]]]:
    curves = [(label, run.curve(metric)) for label, metric in CURVES]
    for prefix in ("eval/avg@", "eval/pass@"):
        metric = run.eval_metric(prefix)
        if metric is not None:
            curves.append((metric.replace("/", " "), curve_of(run.evals, metric)))
    return [(label, points) for label, points in curves if points]


def sparkline(values: list[float]) -> str:
    """The values as blocks of eight heights, at most SPARK_WIDTH: means of neighbours."""
    count = min(len(values), SPARK_WIDTH)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return BLOCKS[0] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * 7)] for mean in means)


def new_lines(run: Run, after: int) -> list[str]:
    """A line for each step past `after`, the newest with the time that is left."""
    records = [record for record in run.train if record["step"] > after]
    lines = [step_line(record["step"], record, None) for record in records[:-1]]
    return lines + [step_line(r["step"], r, _seconds_left(run)) for r in records[-1:]]


def _seconds_left(run: Run) -> float | None:
    total = run.setting("train", "steps")
    seconds = [value for _, value in run.curve("timing_s/step")[-STEPS_FOR_ESTIMATE:]]
    if not isinstance(total, int) or not seconds:
        return None
    return max(0, total - run.train[-1]["step"]) * sum(seconds) / len(seconds)
