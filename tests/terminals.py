"""A real terminal of some size, for tests of what is drawn on one."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ESCAPE = "\x1b"


class Terminal:
    """`device` is its end for programs; `text` what was written to it once it is closed."""

    def __init__(self, rows: int, columns: int):
        self._leader, self.device = pty.openpty()
        fcntl.ioctl(self.device, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._chunks: list[bytes] = []
        # A terminal's buffer is small: somebody must read while a program writes.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.text = ""

    def _read(self) -> None:
        with suppress(OSError):  # what Linux answers once the other end is closed
            while chunk := os.read(self._leader, 4096):
                self._chunks.append(chunk)

    def close(self) -> None:
        with suppress(OSError):  # a stream that was made of it may have closed it
            os.close(self.device)
        self._reader.join()
        os.close(self._leader)
        self.text = b"".join(self._chunks).decode()


@contextmanager
def terminal(rows: int = 24, columns: int = 100) -> Iterator[Terminal]:
    found = Terminal(rows, columns)
    try:
        yield found
    finally:
        found.close()


def lines_of(text: str) -> list[str]:
    """Every line that was written, also those that were drawn over later."""
    moved = re.sub(r"\x1b\[2K|\x1b\[\d*A|\r", "\n", text)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", moved).split("\n")


def screen_of(text: str) -> list[str]:
    """What stays to be read: the few codes that are used for drawing are obeyed. Lines must not be
    longer than the terminal is wide."""
    rows, row = [""], 0
    for code, printed in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", text):
        if code == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif code == "\x1b[2K":
            rows[row] = ""
        elif code.endswith("A"):
            row = max(0, row - int(code[2:-1] or 1))
        elif printed:
            rows[row] += printed
    return [line.rstrip() for line in rows]
