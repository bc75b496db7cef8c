"""Standard output: it ends with its reader, and can be kept for JSON alone."""

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _Output(io.FileIO):
    """Standard output. When who reads it has ended (`| head`), so does this program, with the code
    that a shell gives to one that SIGPIPE ends; a broken connection is an error as ever."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # What is still in buffers has to go somewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None


@contextmanager
def ending_with_its_reader() -> Iterator[None]:
    before = sys.stdout
    if before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):
        yield  # captured, or closed
        return
    before.flush()
    output = _Output(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        output if before.write_through else io.BufferedWriter(output),  # pyright: ignore
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before


@contextmanager
def only_for_json() -> Iterator[TextIO]:
    """What standard output was, for whoever uses this. What anybody else writes there, libraries
    and other processes, too, goes to standard error meanwhile."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    output = _Output(own, "w", closefd=False)
    stream = io.TextIOWrapper(io.BufferedWriter(output), encoding="utf-8", line_buffering=True)
    try:
        yield stream
    finally:
        stream.flush()
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)
