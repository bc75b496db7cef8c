"""The CUDA C++ implementation, for NVIDIA GPUs: compiled on first use by nvcc, for the GPU at hand.

It needs CUDA's compiler but not Triton, and no headers of torch: the library has a C interface and
is handed addresses and a stream.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

from megatron_opo.errors import KernelError
from megatron_opo.kernel_build import build, cuda_compiler

SOURCE = Path(__file__).with_suffix(".cu")
FLAGS = ["-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def library(device_index: int) -> ctypes.CDLL:
    """Compiled for that GPU.

    Raises:
        KernelError: there is no nvcc, or it fails.
    """
    major, minor = torch.cuda.get_device_capability(device_index)
    return load(build(SOURCE, [cuda_compiler(), *FLAGS, f"-arch=sm_{major}{minor}"]))


def load(path: Path) -> ctypes.CDLL:
    """The library's functions with the types of their arguments."""
    loaded = ctypes.CDLL(str(path))
    pointer, int64, uint64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int
    loaded.opo_error.restype = ctypes.c_char_p
    loaded.opo_ragged.argtypes = [
        *(int32, int32, pointer, int64, pointer, pointer, pointer, int64, pointer, int64),
        *(pointer, int32, pointer),
    ]
    loaded.opo_padded.argtypes = [
        *(int32, int32, pointer, int64, int32, uint64, pointer, int64, int64, int64),
        *(pointer, pointer, pointer, pointer, int32, pointer),
    ]
    return loaded


def unavailable(device: torch.device) -> str | None:
    """Why it cannot run on `device`, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "an AMD GPU" if device.type == "cuda" else device.type
        return f"it runs on NVIDIA GPUs, not on {kind}"
    try:
        library(torch.cuda.current_device())
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
    with torch.cuda.device_of(buffer):
        loaded, device, stream = _here(buffer)
        status = loaded.opo_ragged(
            device,
            ELEMENTS[buffer.dtype],
            buffer.data_ptr(),
            buffer.numel(),
            rewards.data_ptr(),
            weights.data_ptr(),
            group_offsets.data_ptr(),
            group_offsets.numel() - 1,
            cu_seqlens.data_ptr(),
            cu_seqlens.numel() - 1,
            None if mask is None else mask.data_ptr(),
            singleton_raw,
            stream,
        )
    _check(loaded, status)


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
    with torch.cuda.device_of(token_rewards):
        loaded, device, stream = _here(token_rewards)
        status = loaded.opo_padded(
            device,
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
            stream,
        )
    _check(loaded, status)


def _here(tokens: torch.Tensor) -> tuple[ctypes.CDLL, int, int]:
    """The library for the GPU that holds `tokens`, its number, the stream to queue work on."""
    index = tokens.device.index
    return library(index), index, torch.cuda.current_stream(index).cuda_stream


def _check(loaded: ctypes.CDLL, status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA refused the launch: {loaded.opo_error(status).decode()}")
