"""The C++ implementation, for tensors on the CPU: compiled on first use by the system's compiler.

One pass at the speed of memory. Padded rows are handled group by group, so that a group's rewards
and masks are read from memory once, and written while they are still in the cache.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from megatron_opo.errors import KernelError
from megatron_opo.kernel_build import load_cpp

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BYTES_PER_THREAD = 1 << 20  # less is not worth starting a thread for


@cache
def library() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        KernelError: there is no C++ compiler, or it fails.
    """
    loaded = load_cpp(Path(__file__).with_suffix(".cpp"), ["-pthread", "-fopenmp-simd"])
    pointer, int64, uint64, int32 = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_int,
    )
    loaded.opo_ragged.argtypes = [
        *(int32, pointer, pointer, pointer, pointer, int64, pointer, int64),
        *(pointer, int32, int32),
    ]
    loaded.opo_padded.argtypes = [
        *(int32, pointer, int64, int32, uint64, pointer, int64, int64, int64),
        *(pointer, pointer, pointer, pointer, int32, int32),
    ]
    return loaded


def unavailable(device: torch.device) -> str | None:
    """Why it cannot run on `device`, or None."""
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device.type}"
    try:
        library()
    except KernelError as error:
        return str(error)
    return None


def ragged_(
    buffer: torch.Tensor,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_offsets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    singleton_raw: bool,
) -> None:
    status = library().opo_ragged(
        ELEMENTS[buffer.dtype],
        buffer.data_ptr(),
        rewards.data_ptr(),
        weights.data_ptr(),
        group_offsets.data_ptr(),
        group_offsets.numel() - 1,
        cu_seqlens.data_ptr(),
        cu_seqlens.numel() - 1,
        None if mask is None else mask.data_ptr(),
        singleton_raw,
        _threads(buffer),
    )
    _check(status)


def padded_(
    token_rewards: torch.Tensor,
    mask_words: torch.Tensor,
    mask_keep: int,
    order: torch.Tensor,
    group_start: torch.Tensor,
    group_end: torch.Tensor,
    workspace: torch.Tensor,
    singleton_raw: bool,
) -> None:
    rows, width = token_rewards.shape
    status = library().opo_padded(
        ELEMENTS[token_rewards.dtype],
        token_rewards.data_ptr(),
        token_rewards.stride(0),
        mask_words.element_size(),
        mask_keep,
        mask_words.data_ptr(),
        mask_words.stride(0),
        rows,
        width,
        order.data_ptr(),
        group_start.data_ptr(),
        group_end.data_ptr(),
        workspace.data_ptr(),
        singleton_raw,
        _threads(token_rewards),
    )
    _check(status)


def _threads(tokens: torch.Tensor) -> int:
    worth = 1 + tokens.numel() * tokens.element_size() // BYTES_PER_THREAD
    return min(torch.get_num_threads(), worth)


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory left for the sequence-level advantages")
