"""Causal attention over a server's cache, on a CPU: compiled on first use by the system's compiler.

Each query is computed by itself, over the keys that it sees, in the order of their places. So a
token's bits do not depend on the batch, on chunks of a prefill, or on a cached prefix.
"""

import ctypes
import logging
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from megatron_opo import invariant
from megatron_opo.errors import KernelError
from megatron_opo.kernel_build import load_cpp

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Less is not worth waking another thread for: products of a key and a query.
PRODUCTS_PER_THREAD = 1 << 18


@cache
def library() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        KernelError: there is no C++ compiler, or it fails.
    """
    loaded = load_cpp(Path(__file__).with_suffix(".cpp"), ["-fopenmp"])
    pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.opo_attend.argtypes = [
        *(whole, pointer, pointer, pointer, pointer, pointer, number, pointer, pointer, number),
        *(number, number, number, number, ctypes.c_float, number, whole),
    ]
    return loaded


def attend(
    query: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> None:
    """softmax(scale * query @ keys) @ values, computed in float32, written to `out`.

    Args:
        query: [rows, heads, channels], float32 or bfloat16, as all of these:
        out: [rows, heads, channels of a value], contiguous
        keys, values: [slots, key-value heads, channels], contiguous
        table: [requests, places] int32: the slot of each place of a request
        requests: [rows] int64: whose the query is, a row of the table
        positions: [rows] int64: a query sees the places up to its own
        window: and of those before it only so many

    Raises:
        MemoryError: none is left for the scores of one query.
    """
    assert query.dtype == out.dtype == keys.dtype == values.dtype
    assert table.dtype == torch.int32 and requests.dtype == positions.dtype == torch.int64
    assert table.stride(1) == 1 and keys.is_contiguous() and values.is_contiguous()
    assert out.is_contiguous()
    query, requests, positions = query.contiguous(), requests.contiguous(), positions.contiguous()
    rows, heads, channels = query.shape
    seen = int(positions.sum()) + rows
    products = heads * channels * (seen if window is None else min(seen, rows * (window + 1)))
    status = library().opo_attend(
        DTYPES[query.dtype],
        query.data_ptr(),
        out.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        requests.data_ptr(),
        positions.data_ptr(),
        rows,
        heads,
        keys.shape[1],
        channels,
        values.shape[2],
        scale,
        -1 if window is None else window,
        min(torch.get_num_threads(), math.ceil(products / PRODUCTS_PER_THREAD) or 1),
    )
    if status:
        raise MemoryError("no memory left for the attention of a query")


@cache
def best() -> Callable[..., None]:
    """`attend` or, without a compiler, a slower way of the same signature."""
    try:
        library()
    except KernelError as error:
        logging.getLogger(__name__).warning("attention is slow: %s", error)
        return attend_slowly
    return attend


def attend_slowly(query, out, keys, values, table, requests, positions, scale, window=None) -> None:
    """As `attend`, request by request."""
    ids, counts = requests.unique_consecutive(return_counts=True)
    start = 0
    for request, count in zip(ids.tolist(), counts.tolist(), strict=True):
        rows = slice(start, start := start + count)
        slots = table[request, : positions[rows].max() + 1]
        out[rows] = invariant.attention(
            query[None, rows],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            positions[None, rows],
            scale,
            window,
        )[0]
