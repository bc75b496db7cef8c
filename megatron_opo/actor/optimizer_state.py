"""The whole state of a sharded optimizer, for a checkpoint, with as few copies as there can be.

Megatron's own way makes five copies of everything on every data-parallel rank, all of which stand
still meanwhile; the first of them writes it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer

KEYS = ("param", "exp_avg", "exp_avg_sq")
# Elements that the first rank receives at once, on its device.
CHUNK = 2**26


class _Spans:
    """Flat parameters of a buffer, by where they begin in it."""

    def __init__(self, tensors: dict[int, torch.Tensor]):
        self._tensors = tensors

    def __getitem__(self, span: slice) -> torch.Tensor:
        return self._tensors[span.start]


@contextmanager
def gathered_by_first_rank(parts: Sequence[MegatronOptimizer]) -> Iterator[None]:
    """Sharded state dicts of these optimizers, if made within the block, hold whole tensors on the
    first rank of each data-parallel group only, and there the live ones if it is alone."""
    sharded: list[Any] = [part for part in parts if isinstance(part, DistributedOptimizer)]
    for part in sharded:
        part.get_parameter_state_dp_zero = partial(_whole_state, part)
    try:
        yield
    finally:
        for part in sharded:
            del part.get_parameter_state_dp_zero


def _whole_state(optimizer: Any, **_: Any) -> dict[int, dict[Any, dict[str, _Spans]]]:
    """In the form of the method it stands for: by number and dtype of a buffer."""
    state = {}
    for index, (buffer, ranges) in enumerate(
        zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)
    ):
        dtype, buckets = next(iter(ranges.items()))
        if optimizer.data_parallel_group.size() == 1:
            spans = _own(optimizer, buffer)
        else:
            spans = _gathered(optimizer, buffer, buckets)
        state[index] = {dtype: spans}
    return state


def _own(optimizer: Any, buffer: Any) -> dict[str, _Spans]:
    spans: dict[str, dict[int, torch.Tensor]] = {key: {} for key in KEYS}
    for parameter, (start, _, _) in buffer.param_index_map.items():
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for key in KEYS:
            spans[key][start] = tensors[key].detach()
    return {key: _Spans(tensors) for key, tensors in spans.items()}


def _gathered(optimizer: Any, buffer: Any, buckets: list[dict]) -> dict[str, _Spans]:
    group = optimizer.data_parallel_group
    is_first = group.rank() == 0
    size = sum(bucket.grad_data.numel() for bucket in buffer.buckets)
    device = "cpu" if is_first else "meta"
    whole = {key: torch.empty(size, dtype=torch.float32, device=device) for key in KEYS}
    for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
        shard = bucket.grad_data.numel() // group.size()
        own = {key: torch.zeros(shard, dtype=torch.float32) for key in KEYS}
        for parameter, places in ranges["param_map"].items():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            place = slice(places["gbuf_local"].start, places["gbuf_local"].end)
            for key in KEYS:
                own[key][place].copy_(tensors[key].detach())
        for key in KEYS:
            shares = whole[key][bucket.offset :][: group.size() * shard].view(group.size(), shard)
            _gather(own.pop(key), shares if is_first else None, group)
    return {
        key: _Spans(
            {
                start: _separate(whole[key], start, end)
                for start, end, _ in buffer.param_index_map.values()
            }
        )
        for key in KEYS
    }


def _gather(own: torch.Tensor, shares: torch.Tensor | None, group: dist.ProcessGroup) -> None:
    """Fill rank i's row of `shares` [ranks, N] on the first rank with its `own` [N]."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    step = max(1, CHUNK // group.size())
    for start in range(0, own.numel(), step):
        sent = own[start : start + step].to(device)
        if shares is None:
            dist.gather(sent, group=group, group_dst=0)
            continue
        received = [torch.empty_like(sent) for _ in shares]
        dist.gather(sent, received, group=group, group_dst=0)
        for share, chunk in zip(shares, received, strict=True):
            share[start : start + step].copy_(chunk)


def _separate(whole: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Part of a flat tensor that does not look like a part of another one: Megatron would copy
    that."""
    if whole.is_meta:
        return whole[start:end]
    return torch.frombuffer(
        whole.numpy(), dtype=whole.dtype, count=end - start, offset=start * whole.element_size()
    )
