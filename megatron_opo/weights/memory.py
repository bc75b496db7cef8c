"""Memory for large tensors that live for a moment, such as those on their way between files.

From the system such memory comes in small pages, which it has to find and clear one by one at each
first touch: that takes several times as long as to read a file into them. Here it comes in huge
pages, and is used again.
"""

import errno
import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

import numpy as np
import torch

HUGE_PAGE_BYTES = 2**21
KEPT_BYTES = 2**27


class _Pages:
    """Blocks of powers of two; of a block, only what was once used takes memory."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[mmap.mmap] = []  # the newest last
        # Given back whenever a tensor ends, be it in the midst of `take`: that must not lock.
        self._given_back: deque[mmap.mmap] = deque()

    def take(self, num_bytes: int) -> mmap.mmap:
        """Raises OSError: too little memory, or a kernel without huge pages."""
        size = 1 << (num_bytes - 1).bit_length()
        with self._lock:
            while self._given_back:
                pages = self._given_back.popleft()
                if len(pages) <= KEPT_BYTES:
                    self._free.append(pages)
            while sum(map(len, self._free)) > KEPT_BYTES:
                del self._free[0]
            for i in reversed(range(len(self._free))):
                if len(self._free[i]) == size:
                    return self._free.pop(i)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def give_back(self, pages: mmap.mmap) -> None:
        self._given_back.append(pages)


_pages = _Pages()


def is_shortage(error: BaseException) -> bool:
    """Whether it says that there is too little memory."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and ("allocate memory" in text or "new thread" in text))
    )


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor. Up to 128 MB of what is free again are kept for the next ones."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= HUGE_PAGE_BYTES:
        with suppress(OSError):  # then torch finds memory, or complains
            pages = _pages.take(num_bytes)
            data = np.frombuffer(pages, dtype=np.uint8, count=num_bytes)
            weakref.finalize(data, _pages.give_back, pages).atexit = False
            return torch.from_numpy(data).view(dtype).reshape(tuple(shape))
    return torch.empty(tuple(shape), dtype=dtype)
