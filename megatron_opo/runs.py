"""What a run directory holds, read without Megatron."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
class Checkpoint:
    """A complete checkpoint. `cursor` is the prompt cursor's state, `recipe` what was run."""

    directory: Path
    version: int
    cursor: dict[str, Any]
    recipe: dict[str, Any]


def complete_checkpoints(run_path: Path) -> list[Path]:
    """Their directories, oldest first."""
    root = run_path / CHECKPOINTS
    if not root.is_dir():
        return []
    steps = {
        int(match[1]): path
        for path in root.iterdir()
        if (match := re.fullmatch(r"step_(\d+)", path.name)) and (path / STATE_FILE).exists()
    }
    return [steps[step] for step in sorted(steps)]


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
    """The newest complete checkpoint of a run.

    Raises:
        CheckpointError: its state file cannot be read.
    """
    found = complete_checkpoints(run_path)
    if not found:
        return None
    path = found[-1] / STATE_FILE
    try:
        state = json.loads(path.read_text())
        return Checkpoint(
            found[-1],
            version=int(state["version"]),
            cursor=dict(state["cursor"]),
            recipe=dict(state["recipe"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {found[-1]}: {STATE_FILE} cannot be used "
            f"({type(error).__name__}: {error}); move the directory away to resume from the one "
            "before it"
        ) from None


def attempts(run_path: Path) -> list[dict[str, Any]]:
    """The starts of jobs on this run so far, and the step that each began at."""
    path = run_path / ATTEMPTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_restart(run_path: Path) -> bool:
    """Whether this process belongs to a job that Slurm has started on this run before."""
    own = os.environ.get(ATTEMPT_VARIABLE)
    if not own:
        return False
    job = own.partition(".")[0]
    return any(
        a["attempt"] != own and a["attempt"].startswith(f"{job}.") for a in attempts(run_path)
    )


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


@contextmanager
def only_run(run_path: Path) -> Iterator[None]:
    """Hold the run directory; the operating system lets go of it however the process ends.

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
