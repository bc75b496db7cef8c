"""Everything a run writes about itself, to its directory and to the terminal."""

import json
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from megatron_opo.batch import Group
from megatron_opo.errors import LogError
from megatron_opo.observe.console import Console
from megatron_opo.observe.files import (
    RUN_LOG,
    append_text,
    read_metrics,
    replace_text,
    to_json_line,
    writing,
)
from megatron_opo.observe.loggers import LoggedRun, Loggers
from megatron_opo.observe.prometheus import Exposed
from megatron_opo.observe.samples import (
    Decode,
    Kind,
    TokenValues,
    Values,
    finite,
    list_samples,
    write_samples,
)
from megatron_opo.observe.text import duration, number, step_line, summary_text
from megatron_opo.spans import Spans

# The phase that the first step begins with; what is before it is the start of the run.
FIRST_PHASE = "generate"
STEPS_FOR_ESTIMATE = 20


class RunLog:
    """The log of one run, in `run_path`:

    recipe.yaml, versions.json  what ran
    metrics.jsonl               a line a step, a line an evaluation: {"step", "kind": "train" or
                                "eval", "time" (UTC), "elapsed_s", metrics...}; what is not
                                finite is null
    samples/                    responses: see observe.samples
    tensorboard/, wandb/, ...   the metrics again, for each of the loggers
    run.log                     what the terminal showed, with times

    Step s (1 to `total_steps`) is the update that makes policy version s; the evaluation of
    version v has step v, 0 before training. Everything raises LogError when a file cannot be
    written. Use it as a context manager, or call `close`.

    Steps follow each other without a gap: what goes on after one is logged (evaluation, checkpoint)
    belongs to the next.
    """

    def __init__(
        self,
        run_path: Path,
        *,
        recipe_text: str,
        versions: dict[str, str],
        total_steps: int,
        loggers: Sequence[str] = ("tensorboard",),
        project: str = "megatron_opo",
        exposed: Exposed | None = None,
        samples_per_step: int = 16,
        first_step: int = 0,
        attempt: str | None = None,
        run_id: str | None = None,
        quiet: bool = False,
        console: Console | None = None,
        spans: Spans | None = None,
        decode: Decode | None = None,
    ):
        """Start a log (`first_step` 0), or continue one.

        `first_step` is the version training starts from, the number of steps already done. What
        an earlier process logged past it is dropped, since that runs again; with 0 that is all.
        `attempt` names the start of a job that this process belongs to.
        `loggers` are names of `loggers.NEEDS`, `project` what they file the run under, `run_id`
        what they know it by, of the run that goes on, should the run directory not say.
        `exposed` is what Prometheus is shown.
        `console` is one that has spoken already, else there is a new one, perhaps a quiet one.
        `spans` are those of this process. With `decode`, samples keep the logprob of each token.

        Raises:
            LogError: the directory cannot be written.
            UnfitEnvironmentError: the package of a logger is not installed.
        """
        self.run_path = Path(run_path)
        self.total_steps = total_steps
        self.samples_per_step = samples_per_step
        # Few tokens of a vocabulary make up most texts.
        self.decode = decode and lru_cache(maxsize=100_000)(decode)
        self.spans = spans or Spans()
        self.seconds_of_eval: float | None = None
        self.seconds_of_start: dict[str, float] = {}
        self.began: float | None = None
        self.step_ends: deque[float] = deque(maxlen=STEPS_FOR_ESTIMATE + 1)
        with writing(self.run_path):
            (self.run_path / "samples").mkdir(parents=True, exist_ok=True)
        self.metrics_path = self.run_path / "metrics.jsonl"
        self.log_path = self.run_path / RUN_LOG
        replace_text(self.run_path / "recipe.yaml", recipe_text)
        replace_text(self.run_path / "versions.json", json.dumps(versions, indent=2) + "\n")
        kept = _drop_steps_that_run_again(self.run_path, first_step)
        self.elapsed_before = max((r.get("elapsed_s") or 0.0 for r in kept), default=0.0)
        self.started = self.spans.clock()
        self.run_id = _run_id(self.run_path, run_id, first_step)
        self.exposed = exposed
        self.console = console or Console(total_steps, quiet=quiet)
        self.console.ticker.steps_done = first_step
        self.first_step = first_step
        start = f", in start {attempt}" if attempt else ""
        self._log(f"run {self.run_path} starts at version {first_step} of {total_steps}{start}")
        recipe = yaml.safe_load(recipe_text) or {}
        run = LoggedRun(self.run_path, project, self.run_id, recipe, first_step, kept)
        self.loggers = Loggers(loggers, run, self.warn)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self.close()
        else:
            # What went wrong first is what the user must see.
            with suppress(LogError):
                self._log(f"stopped by {type(error).__name__}: {error}")
            with suppress(LogError):
                self.close(failed=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as going on, as a span: its seconds become timing_s/`name` of the step.

        The first step begins with its phase generate.
        """
        if not self.step_ends and name == FIRST_PHASE:
            start = self.spans.take()
            self.step_ends.append(start.end)
            self.began = start.start
            seconds = start.seconds().items()
            self.seconds_of_start = {path: value for path, value in seconds if "/" not in path}
        self.console.start_phase(name)
        if self.exposed is not None:
            self.exposed.enter(name)
        try:
            with self.spans.of(name):
                yield
        finally:
            self.console.end_phase()
            if name == "eval":
                self.seconds_of_eval = (self.seconds_of_eval or 0.0) + self.spans.done[-1].seconds

    def first_sample(self) -> None:
        """One is there; of the run's first one, say what it had to wait for."""
        if self.began is None:
            return
        seconds, self.began = self.spans.clock() - self.began, None
        parts = {**self.seconds_of_start, FIRST_PHASE: self.spans.clock() - self.step_ends[0]}
        shown = [f"{name} {value:.0f}" for name, value in parts.items() if value >= 0.5]
        self.note(f"first sample after {seconds:.0f} s: {', '.join(shown)}")
        self.seconds_of_start["first_sample"] = seconds

    def advance(self, done: float, total: float | None, detail: str = "") -> None:
        """How far the current phase is; `total` None or 0 when it is unknown. See `Console`."""
        self.console.advance(done, total or None, detail)

    def ask(self, question: Callable[[], str]) -> None:
        """Of the current phase; see `Console`."""
        self.console.ask(question)

    def summary(self, rows: list[tuple[str, str]]) -> None:
        """Show and log what is about to run: (label, value) rows."""
        self.console.start(
            rows,
            run=str(self.run_path),
            version=self.first_step,
            total_steps=self.total_steps,
        )
        self._log(summary_text(rows))

    def note(self, text: str) -> None:
        self.console.note(text)
        self._log(text)

    def last(self, text: str, **facts: Any) -> None:
        """The run has ended in order; see `Console`."""
        self.console.last(text, run=str(self.run_path), **facts)
        self._log(text)

    def warn(self, text: str) -> None:
        self.console.warn(text)
        self._log(f"warning: {text}")

    def step(self, step: int, metrics: dict[str, float], tokens: int = 0) -> None:
        """Log a training step on so many tokens and print its line.

        Adds timing_s/step, the seconds since the step before was logged; timing_s/ of each phase,
        its parts and what they leave (`Stretch.seconds`), which add up to it; and to the first
        step start_s/, the phases before it.
        """
        took = self.spans.take()
        with self.spans.of("log"):
            seconds = took.end - took.start
            timing = {f"timing_s/{path}": value for path, value in took.seconds().items()}
            timing |= {f"start_s/{path}": value for path, value in self.seconds_of_start.items()}
            self.seconds_of_start.clear()
            self.step_ends.append(took.end)
            metrics = {**timing, "timing_s/step": seconds, **metrics}
            if tokens:
                metrics["perf/tokens_per_second"] = tokens / max(seconds, 1e-9)
            left = self._seconds_left(step)
            self.console.step(step, metrics, left)
            self._log(step_line(step, metrics, left))
            self._write(step, "train", metrics)

    def eval(self, step: int, metrics: dict[str, float]) -> None:
        """Log the evaluation of policy version `step`; adds timing_s/eval."""
        seconds, self.seconds_of_eval = self.seconds_of_eval, None
        if seconds is not None:
            metrics = {**metrics, "timing_s/eval": seconds}
        shown = [f"{k.removeprefix('eval/')} {number(v)}" for k, v in metrics.items() if "@" in k]
        if unscorable := metrics.get("eval/unscorable"):
            shown.append(
                f"{unscorable:.0f} of {metrics['eval/samples']:.0f} unscorable, taken as 0"
            )
        took = "" if seconds is None else f" ({duration(seconds)})"
        text = f"{step:>5}  eval: {', '.join(shown)}{took}"
        self.console.line(text)
        self._log(text)
        self._write(step, "eval", metrics)

    def samples(
        self,
        step: int,
        groups: list[Group],
        advantages: Values | None = None,
        kind: Kind = "train",
        baselines: Values | None = None,
        token_values: TokenValues | None = None,
    ) -> None:
        """Keep whole groups of a step, up to `samples_per_step` samples.

        `advantages` and `baselines` run parallel to the groups and their samples; None or NaN
        stands for a sample that does not train; `token_values` tells of each token.
        """
        limit = self.samples_per_step
        write_samples(
            self.run_path, step, groups, advantages, kind, limit,
            baselines=baselines, decode=self.decode, token_values=token_values,
        )  # fmt: skip

    def close(self, failed: bool = False) -> None:
        """End the live progress and flush everything; a second call does nothing."""
        self.console.close()
        self.loggers.close(failed)

    def elapsed(self) -> float:
        """Seconds that all processes of the run have taken so far."""
        return self.elapsed_before + self.spans.clock() - self.started

    def _seconds_left(self, step: int) -> float | None:
        spans = len(self.step_ends) - 1
        if spans < 1:
            return None
        mean = (self.step_ends[-1] - self.step_ends[0]) / spans
        return max(0, self.total_steps - step) * mean

    def _write(self, step: int, kind: Kind, metrics: dict[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        record = {
            "step": step,
            "kind": kind,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "elapsed_s": round(self.elapsed(), 3),
        }
        written = {**record, **{name: finite(value) for name, value in values.items()}}
        append_text(self.metrics_path, to_json_line(written))
        event = {name: value for name, value in written.items() if name not in ("kind", "time")}
        self.console.event("step" if kind == "train" else kind, **event)
        self.loggers.log(step, values)
        if self.exposed is not None:
            self.exposed.update(step, kind, values)

    def _log(self, text: str) -> None:
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        lines = text.splitlines() or [""]
        append_text(self.log_path, "".join(f"{stamp}  {line}\n" for line in lines))


def _drop_steps_that_run_again(run_path: Path, first_step: int) -> list[dict[str, Any]]:
    """Cut metrics.jsonl and samples/ back to `first_step`; return the metrics that stay."""
    path = run_path / "metrics.jsonl"
    records = read_metrics(run_path) if first_step else []
    kept = [record for record in records if record["step"] <= first_step]
    if path.exists():
        replace_text(path, "".join(map(to_json_line, kept)))
    for kind in ("train", "eval"):
        for step, samples in list_samples(run_path, kind):
            if first_step == 0 or step > first_step:
                with writing(samples):
                    samples.unlink()
    return kept


def _run_id(run_path: Path, earlier: str | None, first_step: int) -> str:
    path = run_path / "run_id.txt"
    if first_step == 0 or not path.exists():
        replace_text(path, earlier if first_step and earlier else uuid.uuid4().hex[:12])
    return path.read_text().strip()
