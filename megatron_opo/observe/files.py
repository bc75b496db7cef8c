"""Reading and writing the files of a run directory, with errors that say what to do."""

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_opo.errors import LogError

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
RUN_LOG = "run.log"
# What a process says first in it; group 1 is the start of a job that it belongs to, if to any.
FIRST_LINE = re.compile(r"  run \S.* starts at version \d+ of \d+(?:, in start (\S+))?$", re.M)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a LogError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise LogError(
                f"{path}: cannot be written: the disk is full ({error.strerror}). Everything "
                "logged earlier is intact; free space (or move the run directory to a larger "
                "disk) and start the same run again to resume it"
            ) from error
        raise LogError(
            f"{path}: cannot be written: {error.strerror or error}; give a run_dir in which you "
            "may create files"
        ) from error


def append_text(path: Path, text: str) -> None:
    """Append `text` in full or not at all, and hand it to the system before returning.

    Raises:
        LogError: the disk is full, or the file cannot be written.
    """
    data = memoryview(text.encode())
    with writing(path), open(path, "ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            # Half a line would have to be repaired by every later reader.
            with suppress(OSError):
                file.truncate(start)
            raise


def replace_text(path: Path, text: str) -> None:
    """Write a whole file so that a reader, or a crash, sees the old one or the new one.

    Raises:
        LogError: the disk is full, or the file cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            # A model may emit half of a surrogate pair, which has no UTF-8 form.
            temporary.write_bytes(text.encode("utf-8", errors="replace"))
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def to_json_line(record: dict[str, Any]) -> str:
    """One line of strict JSON (ASCII). The record must hold no NaN or infinity."""
    return json.dumps(record, allow_nan=False, default=str) + "\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; [] when it does not exist.

    A last line that is cut short is left out: a killed run may leave one.

    Raises:
        LogError: the file cannot be read, or an earlier line is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror or error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise LogError(
                f"{path}, line {number}: not valid JSON ({error}), got {line[:60]!r}; remove "
                "that line to use the rest"
            ) from None
        if not isinstance(record, dict):
            raise LogError(
                f"{path}, line {number}: must be a JSON object, got {line[:60]!r}; remove that "
                "line to use the rest"
            )
        records.append(record)
    return records


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, each with its `step` and its `kind`, train or eval.

    Raises:
        LogError: the file cannot be read, or a line is no such record.
    """
    path = run_path / "metrics.jsonl"
    records = read_json_lines(path)
    for record in records:
        step, kind = record.get("step"), record.get("kind")
        if not isinstance(step, int) or kind not in ("train", "eval"):
            raise LogError(
                f"{path}: a record has step {step!r} and kind {kind!r}; a step is a whole number "
                "and a kind train or eval. The file was not written by this program; move it away"
            )
    return records
