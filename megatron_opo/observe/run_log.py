"""Everything a run writes about itself, to its directory and to the terminal."""

import json
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter

from megatron_opo.batch import Group
from megatron_opo.errors import LogError, UnfitEnvironmentError
from megatron_opo.observe.console import Console, duration, number, step_line, summary_text
from megatron_opo.observe.files import (
    RUN_LOG,
    append_text,
    read_metrics,
    replace_text,
    to_json_line,
    writing,
)
from megatron_opo.observe.samples import Kind, finite, list_samples, write_samples

# The phase a step begins with; those before it (start-up, evaluation, checkpoints) lie between.
FIRST_PHASE = "generate"
STEPS_FOR_ESTIMATE = 20


class RunLog:
    """The log of one run, in `run_path`:

    recipe.yaml, versions.json  what ran
    metrics.jsonl               a line a step, a line an evaluation: {"step", "kind": "train" or
                                "eval", "time" (UTC), "elapsed_s", metrics...}; what is not
                                finite is null
    samples/                    responses: see observe.samples
    tensorboard/                the metrics again
    run.log                     what the terminal showed, with times

    Step s (1 to `total_steps`) is the update that makes policy version s; the evaluation of
    version v has step v, 0 before training. Everything raises LogError when a file cannot be
    written. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        run_path: Path,
        *,
        recipe_text: str,
        versions: dict[str, str],
        total_steps: int,
        wandb_project: str | None = None,
        samples_per_step: int = 16,
        first_step: int = 0,
        attempt: str | None = None,
        wandb_id: str | None = None,
        quiet: bool = False,
    ):
        """Start a log (`first_step` 0), or continue one.

        `first_step` is the version training starts from, the number of steps already done. What
        an earlier process logged past it is dropped, since that runs again; with 0 that is all.
        `attempt` names the start of a job that this process belongs to.
        `wandb_id` is that of the run that goes on, should the run directory not say.

        Raises:
            LogError: the directory cannot be written.
            UnfitEnvironmentError: wandb is asked for and missing, or does not start.
        """
        self.run_path = Path(run_path)
        self.total_steps = total_steps
        self.samples_per_step = samples_per_step
        self.seconds_in_step: dict[str, float] = {}
        self.seconds_between: dict[str, float] = {}
        self.step_start: float | None = None
        self.step_ends: deque[float] = deque(maxlen=STEPS_FOR_ESTIMATE + 1)
        with writing(self.run_path):
            (self.run_path / "samples").mkdir(parents=True, exist_ok=True)
        self.metrics_path = self.run_path / "metrics.jsonl"
        self.log_path = self.run_path / RUN_LOG
        replace_text(self.run_path / "recipe.yaml", recipe_text)
        replace_text(self.run_path / "versions.json", json.dumps(versions, indent=2) + "\n")
        kept = _drop_steps_that_run_again(self.run_path, first_step)
        self.elapsed_before = max((r.get("elapsed_s") or 0.0 for r in kept), default=0.0)
        self.started = time.monotonic()
        with writing(self.run_path / "tensorboard"):
            self.tensorboard: SummaryWriter | None = SummaryWriter(
                str(self.run_path / "tensorboard"), purge_step=first_step + 1 if first_step else 0
            )
        self.wandb, self.wandb_id = None, wandb_id
        if wandb_project is not None:
            self.wandb_id = _wandb_id(self.run_path, wandb_id, first_step)
            self.wandb = _start_wandb(self.run_path, wandb_project, recipe_text, self.wandb_id)
        self.console = Console(total_steps, quiet=quiet)
        self.console.steps_done = first_step
        start = f", in start {attempt}" if attempt else ""
        self._log(f"run {self.run_path} starts at version {first_step} of {total_steps}{start}")

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
        """Show `name` as going on, and add its seconds to timing_s/`name` of the step.

        A step begins with its phase generate. What goes on between two steps (checkpoint) is
        logged with the later one, eval with its evaluation.
        """
        start = time.monotonic()
        if self.step_start is None and name == FIRST_PHASE:
            self.step_start = start
            if not self.step_ends:
                self.step_ends.append(start)
        self.console.start_phase(name)
        try:
            yield
        finally:
            self.console.end_phase()
            in_step = self.step_start is not None
            seconds = self.seconds_in_step if in_step else self.seconds_between
            key = f"timing_s/{name}"
            seconds[key] = seconds.get(key, 0.0) + time.monotonic() - start

    def advance(self, done: float, total: float | None, detail: str = "") -> None:
        """Move the bar of the current phase; `total` None or 0 when it is unknown."""
        self.console.advance(done, total or None, detail)

    def summary(self, rows: list[tuple[str, str]]) -> None:
        """Show and log what is about to run: (label, value) rows."""
        text = summary_text(rows)
        self.console.line(text)
        self._log(text)

    def note(self, text: str) -> None:
        self.console.line(text)
        self._log(text)

    def warn(self, text: str) -> None:
        self.console.warn(text)
        self._log(f"warning: {text}")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Log a training step and print its line.

        Adds timing_s/step (from the start of its phase generate to now) and timing_s/PHASE; a
        value given in `metrics` goes before a measured one.
        """
        now = time.monotonic()
        timing = {**self.seconds_between, **self.seconds_in_step}
        self.seconds_between, self.seconds_in_step = {}, {}
        if self.step_start is not None:
            timing["timing_s/step"] = now - self.step_start
        self.step_start = None
        self.step_ends.append(now)
        metrics = {**timing, **metrics}
        left = self._seconds_left(step)
        self.console.step(step, metrics, left)
        self._log(step_line(step, metrics, left))
        self._write(step, "train", metrics)

    def eval(self, step: int, metrics: dict[str, float]) -> None:
        """Log the evaluation of policy version `step`; adds timing_s/eval."""
        seconds = self.seconds_between.pop("timing_s/eval", None)
        if seconds is not None:
            metrics = {**metrics, "timing_s/eval": seconds}
        shown = [f"{k.removeprefix('eval/')} {number(v)}" for k, v in metrics.items() if "@" in k]
        took = "" if seconds is None else f" ({duration(seconds)})"
        self.note(f"{step:>5}  eval: {', '.join(shown)}{took}")
        self._write(step, "eval", metrics)

    def samples(
        self,
        step: int,
        groups: list[Group],
        advantages: Sequence[Sequence[float | None]] | None = None,
        kind: Kind = "train",
    ) -> None:
        """Keep whole groups of a step, up to `samples_per_step` samples.

        `advantages` runs parallel to the groups and their samples; None or NaN stands for a
        sample that does not train.
        """
        write_samples(self.run_path, step, groups, advantages, kind, self.samples_per_step)

    def close(self, failed: bool = False) -> None:
        """End the live progress and flush everything; a second call does nothing."""
        self.console.close()
        if self.tensorboard is not None:
            writer, self.tensorboard = self.tensorboard, None
            with writing(self.run_path / "tensorboard"):
                writer.close()
        if self.wandb is not None:
            run, self.wandb = self.wandb, None
            run.finish(exit_code=1 if failed else 0)

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
            "elapsed_s": round(self.elapsed_before + time.monotonic() - self.started, 3),
        }
        append_text(
            self.metrics_path,
            to_json_line({**record, **{name: finite(value) for name, value in values.items()}}),
        )
        if self.tensorboard is not None:
            with writing(self.run_path / "tensorboard"):
                for name, value in values.items():
                    self.tensorboard.add_scalar(name, value, step)
                self.tensorboard.flush()
        if self.wandb is not None:
            self.wandb.log({"step": step, **values})

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


def _wandb_id(run_path: Path, earlier: str | None, first_step: int) -> str:
    path = run_path / "wandb_id.txt"
    if first_step == 0 or not path.exists():
        replace_text(path, earlier or uuid.uuid4().hex[:12])
    return path.read_text().strip()


def _start_wandb(run_path: Path, project: str, recipe_text: str, run_id: str):
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UnfitEnvironmentError(
            f"log.wandb_project is {project!r}, but wandb cannot be imported ({error}); "
            "`pip install wandb`, or set log.wandb_project to null (metrics.jsonl and "
            "TensorBoard are always written)"
        ) from error
    try:
        run = wandb.init(
            project=project,
            name=run_path.name,
            id=run_id,
            resume="allow",
            dir=str(run_path),
            config=yaml.safe_load(recipe_text),
        )
    except Exception as error:
        raise UnfitEnvironmentError(
            f"log.wandb_project is {project!r}, but wandb does not start: {error}; log in with "
            "`wandb login`, set WANDB_MODE=offline, or set log.wandb_project to null"
        ) from error
    # The step axis is a metric of its own, so that a resumed run may log a step again.
    run.define_metric("*", step_metric="step")
    return run
