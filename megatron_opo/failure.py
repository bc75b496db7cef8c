"""What a failure shows: its cause and its cure on one screen. All that is known of it is in a file.

Only what Python itself has is imported, so that a failure to import anything can be shown, too.
"""

import errno
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_opo.errors import OpoError
from megatron_opo.redaction import HIDDEN, is_secret

INDENT = "  "
# Of an error: with what stands above and below it, one screen.
MOST_LINES = 16
WIDTH = 400
EXIT_BUG = 1
# What a user can do about what is no error of ours; by the name of its class.
CURES = {
    "OutOfMemoryError": "the GPU has too little memory left: lower actor.micro_batch_tokens or "
    "rollout.server_args.mem_fraction_static, or raise actor.tensor_parallel; `megatron-opo plan "
    "RECIPE` shows what needs how much",
    "MemoryError": "the machine has too little memory left: end what else runs on it, or lower "
    "rollout.servers, reward.workers or actor.micro_batch_tokens",
    "ModuleNotFoundError": "a package is missing or broken: `megatron-opo doctor` says which, and "
    "what to do",
    "PermissionError": "see to it that you may use that file",
}
DISK_FULL = "the disk is full: free some space; the same command goes on from the last checkpoint"


@dataclass
class Place:
    """Where a failure is described: `logs` of the run once there is one. `recipe` is its file."""

    recipe: Path | None = None
    logs: Path | None = None
    command: list[str] = field(default_factory=lambda: list(sys.argv))


def error_text(text: str, whole: Path | None = None) -> str:
    """ "error: " and the text, whose further lines are indented: the next line that is not is no
    part of it. Of a long text the middle is left out; `whole` says where that is."""
    lines = [_cut(line) for line in (text.splitlines() or [""])]
    if len(lines) > MOST_LINES:
        head, tail = MOST_LINES // 2, MOST_LINES - MOST_LINES // 2
        left = f"[... {len(lines) - head - tail} more lines]"
        lines = [*lines[:head], left, *lines[-tail:]]
    if whole is not None:
        lines.append(f"more about it: {whole}")
    first, *more = lines
    return "\n".join([f"error: {first}", *(f"{INDENT}{line}" for line in more)])


def describe(error: BaseException, place: Place) -> tuple[str, Path | None]:
    """What is to be shown of any error, and the file with its traceback, if there is one.

    An error that is meant for the user has a file only when a run has begun, or where it is longer
    than a screen.
    """
    if isinstance(error, OpoError):
        is_long = len(str(error).splitlines()) > MOST_LINES
        path = write_details(error, place) if is_long or _has_begun(place) else None
        return error_text(str(error), path), path
    path = write_details(error, place)
    said = str(error).strip() or "no message"
    lines = [f"{type(error).__name__}: {said}", *_origin(error)]
    cure = _cure(error)
    if cure:
        lines.append(cure)
    elif not isinstance(error, OSError):
        lines.append(
            "this was not foreseen: a fault of megatron-opo, or of a package that it uses. If it "
            "comes again, report it with the file below"
        )
    return error_text("\n".join(lines), path), path


def write_details(error: BaseException, place: Place) -> Path | None:
    """Traceback, command, versions and recipe of a failure: in the run's logs, else in a temporary
    file. None when even that cannot be written."""
    text = _details(error, place)
    rank = os.environ.get("RANK", "0")
    name = "error.txt" if rank == "0" else f"error_rank_{rank}.txt"
    if _has_begun(place):
        assert place.logs is not None
        with suppress(OSError):
            (place.logs / name).write_text(text)
            return place.logs / name
    with suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix="megatron_opo_error_", suffix=".txt", text=True)
        with open(descriptor, "w") as file:
            file.write(text)
        return Path(path)
    return None


def _has_begun(place: Place) -> bool:
    return place.logs is not None and place.logs.is_dir()


def _details(error: BaseException, place: Place) -> str:
    lines = [
        f"time       {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"command    {shlex.join(_without_secrets(place.command))}",
        f"directory  {Path.cwd()}",
        f"recipe     {place.recipe.absolute() if place.recipe else '-'}",
        f"rank       {os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}",
    ]
    with suppress(Exception):  # a broken environment may be what failed
        from megatron_opo.environment import versions

        lines += [f"{name:<10} {version}" for name, version in versions().items()]
    return "\n".join([*lines, "", "".join(traceback.format_exception(error))])


def _without_secrets(words: list[str]) -> list[str]:
    shown = []
    for word in words:
        name, equals, _ = word.partition("=")
        secret = equals and any(is_secret(part) for part in name.split("."))
        shown.append(f"{name}={HIDDEN}" if secret else word)
    return shown


def _origin(error: BaseException) -> list[str]:
    """The innermost place in this package, which says what was going on."""
    package = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(package)]
    if not ours:
        return []
    at = ours[-1]
    file = Path(at.filename).relative_to(Path(package).parent)
    return [f"in {at.name}, {file} line {at.lineno}"]


def _cure(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DISK_FULL
    for kind in type(error).__mro__:
        if kind.__name__ in CURES:
            return CURES[kind.__name__]
    return ""


def _cut(line: str) -> str:
    # What a server or a user's function said may move the cursor.
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).replace("\r", "")
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..."
