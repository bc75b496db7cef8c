"""A directory that appears under its name when it is complete, and not at all otherwise."""

import errno
import fcntl
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from megatron_opo.errors import CheckpointError
from megatron_opo.weights.streaming import flush_to_disk
from megatron_opo.weights.text import shown_size

# Whoever still writes does so far more often.
IDLE_S = 24 * 3600


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A directory to fill, which takes the name `directory` when the block ends without an error,
    and is removed otherwise, whatever interrupts that.

    What killed processes left of earlier tries is removed, and never what another still fills, on
    this machine or another one.

    Raises:
        CheckpointError: `directory` exists, be it only when the block ends; or it cannot be
            written, which stands for any OSError of the block.
    """
    check_target(directory)
    label = f"{_machine()}-{secrets.token_hex(4)}"
    # Nobody takes it for a leftover before it is locked.
    begun = directory.with_name(f".{directory.name}.begun-{label}")
    partial = directory.with_name(f".{directory.name}.partial-{label}")
    try:
        _remove_leftovers(directory)
        begun.mkdir(parents=True)
        with _held(begun):
            begun.rename(partial)
            yield partial
            flush_to_disk([*partial.rglob("*"), partial])
            with _uninterrupted():
                _publish(partial, directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
    finally:
        try:
            with _uninterrupted():
                shutil.rmtree(begun, ignore_errors=True)
                shutil.rmtree(partial, ignore_errors=True)
        finally:  # where an interrupt came just before they were held off
            shutil.rmtree(begun, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)


def check_target(directory: Path) -> None:
    """Raises CheckpointError where no new directory of this name can be made."""
    if os.path.lexists(directory):
        what = "exists already"
        if not directory.exists():
            what = "exists already, as a symbolic link to nothing"
        raise CheckpointError(f"{directory} {what}: remove it or choose another place")
    if directory.name in ("", ".."):
        raise CheckpointError(f"{directory} does not end in the name of a new directory: add one")
    place = _nearest(directory)
    if not place.is_dir():
        raise CheckpointError(f"{directory} cannot be made: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{directory} cannot be made: {place} may not be written; choose another place"
        )


def check_space(directory: Path, needed: int) -> None:
    """Raises CheckpointError where `needed` bytes do not fit on the disk of a new directory."""
    place = _nearest(directory)
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error
    if free < needed:
        raise CheckpointError(
            f"{directory} needs {shown_size(needed)} of disk, but only {shown_size(free)} are "
            f"free in {place}: make room or choose another place"
        )


def _nearest(directory: Path) -> Path:
    """The directory that is there, in which it would have to be made."""
    return next(parent for parent in directory.absolute().parents if os.path.lexists(parent))


def _publish(partial: Path, directory: Path) -> None:
    appeared = CheckpointError(
        f"{directory} appeared while it was written here, by another process: that one is kept, "
        "and this one's is removed"
    )
    if os.path.lexists(directory):
        raise appeared
    try:
        partial.rename(directory)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise appeared from error
        raise
    flush_to_disk([directory.parent])


def _machine() -> str:
    """Of its own for each start of each machine; another one's locks may not be seen here."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{socket.gethostname()[:24]}-{boot}"


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Lock it; the system lets go however the process ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    here = f".{directory.name}.partial-{_machine()}-"
    for path in directory.parent.glob(f".{escape(directory.name)}.partial-*"):
        with suppress(OSError):  # it is held, or another process removes it
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.name.startswith(here) or _idle_s(path) > IDLE_S:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _idle_s(path: Path) -> float:
    return time.time() - max(each.lstat().st_mtime for each in [path, *path.rglob("*")])


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
