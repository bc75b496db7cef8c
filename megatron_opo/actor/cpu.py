"""Stand-ins that let Megatron-Core run where there is no CUDA. The one place for all of them.

Megatron-Core asks for CUDA in four ways even when every tensor lives on the CPU: it creates
tensors with device="cuda" (schedules, gradient clipping, optimizer), it compares `Tensor.type()`
with "torch.cuda.*" (distributed optimizer), it calls a few `torch.cuda` functions (pipeline
sends, data-parallel buffers, checkpoints, activation recompute), and it copies from GPU to CPU on
a stream of its own (experts). Each gets the CPU's answer here.
"""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_thread = threading.local()


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Stream:
    """What torch.cuda.current_stream answers, and an event of it: work on the CPU is done when the
    call returns."""

    def wait_stream(self, stream: object) -> None:
        pass

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


def enable_cpu() -> bool:
    """Make Megatron-Core usable on the CPU; returns whether the stand-ins are in place.

    Does nothing where CUDA is available. Call it in every thread that runs Megatron (torch keeps
    function modes per thread); calling it again is free.
    """
    if torch.cuda.is_available():
        return False
    if getattr(_thread, "mode", None) is None:
        _replace_functions()
        _thread.mode = _CudaMeansCpu()
        _thread.mode.__enter__()
    return True


def _to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Megatron copies sizes of messages from GPU to CPU as what torch takes for sizes; it leaves
    those that lie on the CPU the tensors they are, which torch refuses."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Megatron's, also where ranks have different numbers of rows, which gloo does not gather."""
    del use_global_buffer
    if group.size() == 1:
        return rows
    sizes = sizes or [len(rows)] * group.size()
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def _sum_and_scatter_rows(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Megatron's, also into different numbers of rows, which gloo does not scatter."""
    del use_global_buffer
    if group.size() == 1:
        return rows
    total = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.split(sizes or len(rows) // group.size())[group.rank()].clone()


def _replace_functions() -> None:
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    stream = _Stream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.default_stream = lambda device=None: stream
    # Recompute saves and restores CUDA's random state beside the CPU's; there is none here.
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    # Experts: the dispatcher of tokens copies on a stream of its own.
    dispatcher: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = stream
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    mappings._gather_along_first_dim = _gather_rows
    mappings._reduce_scatter_along_first_dim = _sum_and_scatter_rows
