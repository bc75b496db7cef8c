"""Tensors into files at known places: a few threads write, and only so many bytes wait for them."""

import io
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Condition
from typing import Any, Protocol

import torch

CHUNK_BYTES = 2**26
# The system caches what is written in pages as large as one write; of very large ones it has few at
# hand, and to find others takes several times as long as to write.
WRITE_BYTES = 2**18


class OnProgress(Protocol):
    def __call__(self, bytes_done: int, bytes_total: int, /) -> object: ...


class FileStream:
    """Files of known sizes, filled in any order.

    A file is created at its first byte, and flushed to the disk and closed after its last one.
    Leaving the `with` block waits for all writes, or for those under way where something failed.
    `on_progress` is called by the thread that calls `write`.

    Example::

        with FileStream({path: 12}, buffer_bytes=2**20, threads=2) as stream:
            stream.write(path, 4, torch.zeros(2))
            stream.write(path, 0, torch.ones(1))
    """

    def __init__(
        self,
        sizes: dict[Path, int],
        *,
        buffer_bytes: int,
        threads: int,
        on_progress: OnProgress | None = None,
    ):
        self._left = dict(sizes)
        self._total = sum(sizes.values())
        self._done = 0
        self._on_progress = on_progress
        self._buffer_bytes = buffer_bytes
        self._waiting = 0
        self._descriptors: dict[Path, int] = {}
        self._error: BaseException | None = None
        self._changed = Condition()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")

    def write(self, path: Path, offset: int, tensor: torch.Tensor) -> None:
        """Take the tensor's bytes; they must not change any more.

        Blocks while others fill the buffer; a tensor larger than it waits to be alone there.

        Raises:
            OSError: this or an earlier write failed.
        """
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._has_room(len(data)))
            if self._error:
                raise self._error
            self._waiting += len(data)
            if data and path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        for start in range(0, len(data), CHUNK_BYTES):
            self._pool.submit(self._write, path, offset + start, data[start : start + CHUNK_BYTES])
        if self._on_progress:
            self._on_progress(self._done, self._total)

    def _has_room(self, num_bytes: int) -> bool:
        return self._waiting == 0 or self._waiting + num_bytes <= self._buffer_bytes

    def _write(self, path: Path, offset: int, chunk: memoryview) -> None:
        try:
            if self._error is None:
                _write_all(self._descriptors[path], offset, chunk)
                self._count(path, len(chunk))
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._waiting -= len(chunk)
                self._changed.notify_all()

    def _count(self, path: Path, num_bytes: int) -> None:
        with self._changed:
            self._left[path] -= num_bytes
            complete = self._descriptors.pop(path) if self._left[path] == 0 else None
        if complete is not None:
            try:
                os.fsync(complete)
            finally:
                os.close(complete)
        with self._changed:
            self._done += num_bytes

    def __enter__(self) -> "FileStream":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            self._error = self._error or error
        self._pool.shutdown(wait=True)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        if error is None:
            if self._error is not None:
                raise self._error
            missing = [path.name for path, left in self._left.items() if left]
            assert not missing, f"not all bytes of {missing} were written"
            if self._on_progress:
                self._on_progress(self._done, self._total)


def _write_all(descriptor: int, offset: int, data: memoryview) -> None:
    start, size = offset, len(data)
    while data:
        count = os.pwrite(descriptor, data[:WRITE_BYTES], offset)
        data, offset = data[count:], offset + count
    # The disk begins to work now, and not only when the whole file is flushed.
    with suppress(OSError):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


class StreamedFile(io.FileIO):
    """An unbuffered file that is written as those of a FileStream are, whatever it is given."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            left = left[super().write(left[:WRITE_BYTES]) :]
        return size


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Files, or directories (which files they list), as they are now."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
