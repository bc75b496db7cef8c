"""What a run directory holds, read without Megatron."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_opo.errors import CheckpointError, ClusterError
from megatron_opo.recipe import Recipe

CHECKPOINTS = "checkpoints"
EXPORTS = "hf"
STATE_FILE = "state.json"
ATTEMPTS = "attempts.jsonl"
# Set by the launcher of a job: which start of which job this process belongs to.
ATTEMPT_VARIABLE = "MEGATRON_OPO_ATTEMPT"


@dataclass(frozen=True)
class BestEval:
    """The best mean reward of an evaluation so far, under the name of its metric, and its step."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `cursor` is the prompt cursor's state, `recipe` what was run and
    `layout` on what ranks; {} and None stand for what an older one does not say. `owes_eval`: the
    evaluation of this version was given up."""

    directory: Path
    version: int
    cursor: dict[str, Any]
    recipe: dict[str, Any]
    layout: dict[str, Any] = field(default_factory=dict)
    best_eval: BestEval | None = None
    run_id: str | None = None
    owes_eval: bool = False


def complete_checkpoints(run_path: Path) -> list[Path]:
    """Their directories, oldest first."""
    root = run_path / CHECKPOINTS
    if not root.is_dir():
        return []
    found = [
        path
        for path in root.iterdir()
        if re.fullmatch(r"step_\d+", path.name) and (path / STATE_FILE).exists()
    ]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def exports(run_path: Path) -> list[Path]:
    """Hugging Face directories of the run, in the order they were written. One that was written
    again, after a resume, lies beside the new one as step_N.TIME."""
    found = [
        path
        for path in (run_path / EXPORTS).glob("step_*")
        if re.fullmatch(r"step_\d+(\.\d{8}-\d{6})?", path.name) and path.is_dir()
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def latest_checkpoint(run_path: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run whose state file can be read.

    Raises:
        CheckpointError: there are checkpoints, and not one such.
    """
    problems = []
    for directory in reversed(complete_checkpoints(run_path)):
        try:
            return read_checkpoint(directory)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            "\n".join([*problems, f"{run_path} has no other checkpoint; --fresh starts anew"])
        )
    return None


def read_checkpoint(directory: Path) -> Checkpoint:
    """What a complete checkpoint says of itself.

    Raises:
        CheckpointError: its state file cannot be read.
    """
    try:
        state = json.loads((directory / STATE_FILE).read_text())
        best = state.get("best_eval")
        return Checkpoint(
            directory,
            version=int(state["version"]),
            cursor=dict(state["cursor"]),
            recipe=dict(state["recipe"]),
            layout=dict(state.get("layout", {})),
            best_eval=BestEval(**best) if best else None,
            run_id=state.get("run_id"),
            owes_eval=bool(state.get("owes_eval")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: {STATE_FILE} cannot be used ({type(error).__name__}: {error})"
        ) from None


def attempts(run_path: Path) -> list[dict[str, Any]]:
    """The starts of jobs on this run so far, and the step that each began at."""
    path = run_path / ATTEMPTS
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):  # torn by a full disk
            found.append(json.loads(line))
    return found


def is_restart(run_path: Path) -> bool:
    """Whether this process belongs to a job, and jobs have started on this run before: this one, or
    those before it in a chain."""
    own = os.environ.get(ATTEMPT_VARIABLE)
    return bool(own) and any(a["attempt"] != own for a in attempts(run_path))


def check_attempt(run_path: Path) -> None:
    """Refuse to write for a job that was started again meanwhile.

    Processes may outlive the daemon of their node, and not every file system knows locks.

    Raises:
        ClusterError: a later start holds the run.
    """
    own = os.environ.get(ATTEMPT_VARIABLE)
    if own and (latest := attempts(run_path)[-1]["attempt"]) != own:
        raise ClusterError(
            f"{run_path}: start {latest} of the job has taken over; this is {own}, which ends here"
        )


def changed_fields(before: dict[str, Any], recipe: Recipe) -> list[str]:
    """Lines like "optimizer.lr: 1e-06 -> 2e-06" for what differs from a checkpoint's recipe."""
    old, new = _flat(before), _flat(recipe.to_show())
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """What ranks of one job have to agree on, by name."""
    return {f"the recipe's {name}": v for name, v in _flat(recipe.to_show()).items()}


@contextmanager
def only_run(run_path: Path) -> Iterator[None]:
    """Hold the run directory; the operating system lets go of it however the process ends. In a job
    node 0's launcher does so for all.

    Raises:
        CheckpointError: another run holds it, or it cannot be written.
    """
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        lock = open(run_path / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(
            f"run_dir: {run_path} cannot be written: {error.strerror}; choose another run_dir="
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"run_dir: another run is training in {run_path}; wait for it, end it, or choose "
                "another name= or run_dir="
            ) from None
        yield


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= _flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
