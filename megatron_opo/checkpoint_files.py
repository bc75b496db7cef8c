"""The files of a checkpoint: how they become one, how they are checked, and which are kept.

A checkpoint is written into `step_N.partial`, its checksums and then its state file last, and all
is on the disk before it takes the name `step_N`: so a directory of that name is whole, whenever the
machine may have stopped. `sha256sum -c checksums.sha256` checks it, too.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_opo.errors import CheckpointError
from megatron_opo.runs import (
    ATTEMPT_VARIABLE,
    CHECKPOINTS,
    STATE_FILE,
    Checkpoint,
    complete_checkpoints,
    step_of,
)
from megatron_opo.weights.streaming import flush_to_disk

CHECKSUMS = "checksums.sha256"
PARTIAL = ".partial"
DAMAGED = ".damaged"
# What the small files need that one rank writes while others wait for it in a collective.
ROOM_BYTES = 2**20


@dataclass(frozen=True)
class Found:
    """What a run resumes from: the newest whole checkpoint, and why those after it are not whole.
    `unverified` says that it has no checksums."""

    checkpoint: Checkpoint | None
    damaged: dict[Path, str] = field(default_factory=dict)
    unverified: bool = False

    @property
    def version(self) -> int:
        return self.checkpoint.version if self.checkpoint else 0


def partial_directory(run_path: Path, step: int) -> Path:
    """Where the checkpoint of a step is written; a job that was started again has another place
    than its earlier start, whose processes may still write."""
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    return run_path / CHECKPOINTS / f"step_{step}{f'.{attempt}' if attempt else ''}{PARTIAL}"


def make_partial(partial: Path) -> None:
    """An empty directory, on a disk that is not full already. Raises OSError."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    room = partial / "room"
    write_durably(room, bytes(ROOM_BYTES))
    room.unlink()


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(partial: Path, final: Path, digests: dict[str, str], state: bytes) -> None:
    """Complete what all ranks have written and flushed.

    Args:
        digests: of files, by name; files that it lacks are flushed and digested here.
        state: the contents of the state file.

    Raises:
        OSError: it cannot be written.
    """
    own = [path for path in partial.iterdir() if path.name not in digests]
    flush_to_disk(own)
    digests = digests | {path.name: digest(path) for path in own}
    lines = [f"{value}  {name}\n" for name, value in sorted(digests.items())]
    lines.append(f"{hashlib.sha256(state).hexdigest()}  {STATE_FILE}\n")
    write_durably(partial / CHECKSUMS, "".join(lines).encode())
    flush_to_disk([partial])
    write_durably(partial / STATE_FILE, state)
    flush_to_disk([partial])
    if final.exists():
        final.rename(_free_name(final, PARTIAL))
    partial.rename(final)
    flush_to_disk([final.parent])


def read_checksums(directory: Path) -> dict[str, str] | None:
    """Digests by file name; None where there are none, as in older checkpoints.

    Raises:
        CheckpointError: they are damaged.
    """
    try:
        lines = (directory / CHECKSUMS).read_bytes().decode().splitlines()
        digests = {}
        for line in lines:
            value, name = line.split("  ", 1)
            if Path(name).name != name:
                raise ValueError(f"it names {name!r}")
            digests[name] = value
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CHECKSUMS} cannot be read ({error})") from None
    if list(digests)[-1:] != [STATE_FILE]:
        raise CheckpointError(f"{CHECKSUMS} does not end with {STATE_FILE}: it was cut short")
    return digests


def split_by_size(directory: Path, names: Iterable[str], shares: int) -> list[list[str]]:
    """Shares of about as many bytes; a file that is missing counts as empty."""
    sizes = {}
    for name in names:
        path = directory / name
        sizes[name] = path.stat().st_size if path.is_file() else 0
    split: list[list[str]] = [[] for _ in range(shares)]
    filled = [0] * shares
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = filled.index(min(filled))
        split[least].append(name)
        filled[least] += sizes[name]
    return split


def problem_with(path: Path, expected: str) -> str | None:
    """What is wrong with a file that should have this digest."""
    try:
        found = digest(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or error})"
    if found == expected:
        return None
    return f"{path.name} is damaged (sha256 {found[:16]}..., written as {expected[:16]}...)"


def to_drop(
    steps: Sequence[int], *, keep: int, keep_every: int = 0, best: int | None = None
) -> list[int]:
    """Which of the steps' checkpoints go: all but the newest `keep`, those that `keep_every`
    divides (0: none), and `best`."""
    return [
        step
        for step in sorted(steps)[:-keep]
        if step != best and not (keep_every and step % keep_every == 0)
    ]


def drop_old(run_path: Path, *, keep: int, keep_every: int, best: int | None) -> None:
    """Remove checkpoints that need not be kept.

    Raises:
        CheckpointError: one cannot be removed.
    """
    directories = {step_of(path): path for path in complete_checkpoints(run_path)}
    for step in to_drop(list(directories), keep=keep, keep_every=keep_every, best=best):
        try:
            # Half of one must not pass for a checkpoint.
            doomed = directories[step].rename(_free_name(directories[step], PARTIAL))
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {directories[step]} is to be dropped (checkpoint.keep={keep}) and "
                f"cannot be removed ({error}): remove it yourself, and start again"
            ) from error


def set_aside(directory: Path) -> Path:
    """Rename a damaged checkpoint, so that its step can be written again.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    aside = _free_name(directory, DAMAGED)
    try:
        directory.rename(aside)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {directory} is damaged and cannot be renamed ({error.strerror}): move it "
            "away, to resume from the one before it"
        ) from None
    return aside


def remove_leftovers(run_path: Path) -> None:
    """What killed processes have left. Nobody else may write to the run meanwhile."""
    for path in (run_path / CHECKPOINTS).glob(f"step_*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _free_name(directory: Path, suffix: str) -> Path:
    name = directory.with_name(directory.name + suffix)
    if name.exists():
        name = directory.with_name(f"{directory.name}.{time.time_ns()}{suffix}")
    return name
