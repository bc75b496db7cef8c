"""Rewards -> token-level advantages A_i = r_i - sum_j w_j r_j / sum_j w_j, fused and in place.

`group_advantages_` writes a flat, ragged buffer; `group_advantages_padded_` overwrites the padded
[N, T] token rewards of other trainers. Each is one torch.library operator (usable in torch.compile
and CUDA graphs) over four implementations of the same rules:

- advantages are computed in float64, relative to the group's first reward: equal rewards give
  exactly 0, and the buffer's dtype rounds once;
- a group whose weights sum to 0 gets 0;
- `singleton_raw`: a group of one keeps its reward (0 otherwise).

The device chooses the implementation: Triton, else CUDA C++, on a GPU; C++ on a CPU; vectorised
torch where neither is possible. MEGATRON_OPO_KERNEL=triton|cuda|cpp|torch forces one.
"""

import importlib
import logging
import os
from collections.abc import Hashable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from megatron_opo.errors import KernelError

VARIABLE = "MEGATRON_OPO_KERNEL"
MODULES = {"triton": "kernel_triton", "cuda": "kernel_cuda", "cpp": "kernel_cpu"}
MODULES["torch"] = "kernel_torch"
PREFERRED = {"cuda": ("triton", "cuda", "torch"), "cpu": ("cpp", "torch")}
BUFFER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)


def group_advantages_(
    buffer: torch.Tensor,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_offsets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    singleton_raw: bool = False,
) -> None:
    """Overwrite every token of sequence i, buffer[cu_seqlens[i]:cu_seqlens[i + 1]], with A_i.

    Moves each byte of the buffer (and mask) once; on CUDA one launch, no allocation and no wait.

    Args:
        buffer: [tokens] float32, bfloat16 or float16, contiguous; tokens outside every sequence
            keep their value.
        rewards: [N] of any real dtype, finite; other than float64 is converted first.
        weights: [N] likewise, not negative: the lengths, for OPO.
        group_offsets: [K+1] int64; group k is sequences group_offsets[k]:group_offsets[k+1].
        cu_seqlens: [N+1] int64.
        mask: [tokens] bool or uint8; tokens of a sequence where it is 0 get 0.
        singleton_raw: a group of one sequence of positive weight gets its reward.

    Raises:
        KernelError: an argument does not fit. What needs the values (offsets in order, weights not
            negative) is checked on the CPU only: on CUDA it would wait for the device. There, no
            value can make the kernel write outside of the buffer.
    """
    _check_buffer("buffer", buffer, 1)
    count = rewards.numel()
    _check_vector("rewards", rewards, None, buffer, "the buffer")
    _check_vector("weights", weights, count, buffer, "the buffer")
    _check_offsets("group_offsets", group_offsets, buffer)
    _check_offsets("cu_seqlens", cu_seqlens, buffer)
    if cu_seqlens.numel() != count + 1:
        raise KernelError(
            f"cu_seqlens has {cu_seqlens.numel()} entries for {count} rewards: it needs one more "
            f"than there are sequences, {count + 1}"
        )
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.uint8):
            raise KernelError(f"mask is {mask.dtype}: use torch.bool or torch.uint8")
        if mask.shape != buffer.shape or mask.device != buffer.device:
            raise KernelError(
                f"mask is {tuple(mask.shape)} on {mask.device}, the buffer "
                f"{tuple(buffer.shape)} on {buffer.device}: they must agree"
            )
        mask = mask.contiguous().view(torch.uint8)
    torch.ops.megatron_opo.group_advantages_(
        buffer, _float64(rewards), _float64(weights), group_offsets, cu_seqlens, mask, singleton_raw
    )


class GroupIndex(NamedTuple):
    """Which rows form a group; made by `group_index`. All [N] int64.

    Example: ids (b, a, b) give order (0, 2, 1), start (0, 0, 2) and end (2, 2, 3): at place p in
    `order`, the group is order[start[p]:end[p]].
    """

    order: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor


def group_index(group_ids: torch.Tensor | Sequence[Hashable], device: Any = None) -> GroupIndex:
    """Index rows by group: integers in a tensor, or a sequence (or array) of anything hashable,
    such as strings; any values in any order. A tensor is sorted where it lies, without waiting.

    Raises:
        KernelError: the ids are not one integer or one hashable for each row.
    """
    if not isinstance(group_ids, torch.Tensor):
        numbers: dict[Hashable, int] = {}
        if any(isinstance(name, torch.Tensor) for name in group_ids):
            raise KernelError("group_ids is a sequence of tensors: use one tensor of integers")
        try:
            places = [numbers.setdefault(name, len(numbers)) for name in group_ids]
        except TypeError as error:
            raise KernelError(f"group_ids has an id that cannot be a key: {error}") from None
        group_ids = torch.tensor(places, dtype=torch.int64)
    if group_ids.dim() != 1 or group_ids.is_floating_point() or group_ids.is_complex():
        raise KernelError(
            f"group_ids is {group_ids.dtype} of shape {tuple(group_ids.shape)}: it must be "
            "integers of shape [N]"
        )
    ids = group_ids.to(torch.int64)
    order = torch.argsort(ids, stable=True)
    in_order = ids[order]
    start = torch.searchsorted(in_order, in_order)
    end = torch.searchsorted(in_order, in_order, right=True)
    device = group_ids.device if device is None else device
    return GroupIndex(*(t.to(device, non_blocking=True) for t in (order, start, end)))


def group_advantages_padded_(
    token_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    groups: GroupIndex | torch.Tensor | Sequence[Hashable],
    *,
    singleton_raw: bool = False,
    workspace: torch.Tensor | None = None,
) -> None:
    """Overwrite token rewards [N, T] with OPO's advantages: (r_i - b) where the mask is true, else
    0; r_i is the sum of the row's rewards where the mask is true, its weight how many those are.

    On CUDA rewards and mask are read once and advantages written once where a row's mask is a run
    of true values and then false (a padded response); other rows read their mask a second time.
    What the mask leaves out counts nowhere, not even when it is NaN.

    Args:
        token_rewards: [N, T] float32, bfloat16 or float16, rows contiguous.
        response_mask: [N, T] of any dtype, rows contiguous; what is not 0 is true.
        groups: see `group_index`, which is called for what is not one; outside of the operator.
        workspace: [3, N] float64, overwritten; row 0 ends as the advantages of the sequences, row
            1 as their lengths. Allocated if not given (give it, and a GroupIndex, to allocate
            nothing).

    Raises:
        KernelError: an argument does not fit.
    """
    _check_buffer("token_rewards", token_rewards, 2)
    rows, width = token_rewards.shape
    if width > 2**27:
        raise KernelError(f"token_rewards has rows of {width} tokens: at most 2**27 are allowed")
    if response_mask.shape != token_rewards.shape or response_mask.device != token_rewards.device:
        raise KernelError(
            f"response_mask is {tuple(response_mask.shape)} on {response_mask.device}, "
            f"token_rewards {tuple(token_rewards.shape)} on {token_rewards.device}: they must agree"
        )
    if response_mask.is_complex() or not _rows_contiguous(response_mask):
        raise KernelError(
            f"response_mask is {response_mask.dtype} with strides {response_mask.stride()}: it "
            "must be real, and its rows contiguous (call .contiguous())"
        )
    if not isinstance(groups, GroupIndex):
        groups = group_index(groups, token_rewards.device)
    for name, part in zip(groups._fields, groups, strict=True):
        _check_vector(f"groups.{name}", part, rows, token_rewards, "token_rewards")
    if workspace is None:
        workspace = torch.empty(3, rows, dtype=torch.float64, device=token_rewards.device)
    elif (
        workspace.shape != (3, rows)
        or workspace.dtype != torch.float64
        or workspace.device != token_rewards.device
        or not workspace.is_contiguous()
    ):
        raise KernelError(
            f"workspace is {workspace.dtype} {tuple(workspace.shape)} on {workspace.device}: it "
            f"must be contiguous float64 of shape (3, {rows}) on {token_rewards.device}"
        )
    torch.ops.megatron_opo.group_advantages_padded_(
        token_rewards, *_mask_words(response_mask), *groups, workspace, singleton_raw
    )


@torch.library.custom_op("megatron_opo::group_advantages_", mutates_args=("buffer",))
def _ragged(
    buffer: torch.Tensor,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    group_offsets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    singleton_raw: bool,
) -> None:
    if not rewards.is_cuda:
        _check_order("group_offsets", group_offsets, 0, rewards.numel(), "the number of rewards")
        _check_order("cu_seqlens", cu_seqlens, None, buffer.numel(), "the size of the buffer")
        if (weights < 0).any() or weights.isnan().any():
            raise KernelError("weights has negative values or NaN: weights must be 0 or more")
    if buffer.numel() and rewards.numel():
        implementation(buffer.device).ragged_(
            buffer, rewards, weights, group_offsets, cu_seqlens, mask, singleton_raw
        )


@torch.library.custom_op(
    "megatron_opo::group_advantages_padded_", mutates_args=("token_rewards", "workspace")
)
def _padded(
    token_rewards: torch.Tensor,
    mask_words: torch.Tensor,
    mask_keep: int,
    order: torch.Tensor,
    group_start: torch.Tensor,
    group_end: torch.Tensor,
    workspace: torch.Tensor,
    singleton_raw: bool,
) -> None:
    rows = token_rewards.shape[0]
    if not token_rewards.is_cuda and rows:
        for name, part in (("order", order), ("start", group_start), ("end", group_end - 1)):
            if part.min() < 0 or part.max() >= rows:
                raise KernelError(f"groups.{name} leaves the {rows} rows: use group_index")
    if token_rewards.numel():
        implementation(token_rewards.device).padded_(
            token_rewards,
            mask_words,
            mask_keep,
            order,
            group_start,
            group_end,
            workspace,
            singleton_raw,
        )


@_ragged.register_fake
def _ragged_fake(
    buffer, rewards, weights, group_offsets, cu_seqlens, mask, singleton_raw
) -> None: ...


@_padded.register_fake
def _padded_fake(
    token_rewards, mask_words, mask_keep, order, group_start, group_end, workspace, singleton_raw
) -> None: ...


def implementation(device: torch.device) -> ModuleType:
    """The module that serves `device`: the one MEGATRON_OPO_KERNEL names, else the best.

    Raises:
        KernelError: the named one is unknown, or cannot run on this device or machine.
    """
    return _implementation(os.environ.get(VARIABLE, ""), device.type)


@cache
def _implementation(forced: str, device_type: str) -> ModuleType:
    if forced and forced not in MODULES:
        raise KernelError(
            f"{VARIABLE} is {forced!r}: use one of {', '.join(MODULES)}, or leave it unset"
        )
    device = torch.device(device_type)
    reasons = []
    for name in (forced,) if forced else PREFERRED.get(device_type, ("torch",)):
        module = importlib.import_module(f"megatron_opo.advantages.{MODULES[name]}")
        reason = module.unavailable(device)
        if reason is None:
            return module
        reasons.append(f"{name}: {reason}")
        log.warning("the %s kernel for advantages is not used: %s", name, reason)
    raise KernelError(f"{VARIABLE} is {forced!r}, which cannot be used. {reasons[0]}")


def _mask_words(mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The mask's bits as integers, and which of them make it true: not a float's sign, since -0.0
    is false. So one kernel a size serves every dtype."""
    size = mask.element_size()
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    keep = (1 << (8 * size - 1)) - 1 if mask.is_floating_point() else -1
    return mask.view(word), keep


def _float64(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).contiguous()


def _rows_contiguous(values: torch.Tensor) -> bool:
    return values.shape[1] <= 1 or values.stride(1) == 1


def _writable(buffer: torch.Tensor) -> bool:
    if buffer.dim() == 1:
        return buffer.is_contiguous()
    apart = buffer.shape[0] <= 1 or buffer.stride(0) >= buffer.shape[1]
    return apart and _rows_contiguous(buffer)


def _check_buffer(name: str, buffer: torch.Tensor, dimensions: int) -> None:
    if buffer.dtype not in BUFFER_DTYPES:
        raise KernelError(f"{name} is {buffer.dtype}: it must be float32, bfloat16 or float16")
    if buffer.dim() != dimensions:
        raise KernelError(
            f"{name} has shape {tuple(buffer.shape)}: it must have {dimensions} dimensions"
        )
    if not _writable(buffer):
        raise KernelError(
            f"{name} has strides {buffer.stride()}: it is overwritten in place, so it (or "
            "each of its rows) must be contiguous"
        )
    if buffer.requires_grad:
        raise KernelError(f"{name} requires a gradient: advantages are constants; detach() it")


def _check_vector(
    name: str, values: torch.Tensor, count: int | None, like: torch.Tensor, other: str
) -> None:
    if values.dim() != 1 or values.is_complex() or count not in (None, values.numel()):
        wanted = "[N]" if count is None else f"[{count}]"
        raise KernelError(
            f"{name} is {values.dtype} of shape {tuple(values.shape)}: it must be real numbers of "
            f"shape {wanted}"
        )
    if values.device != like.device:
        raise KernelError(
            f"{name} is on {values.device}, {other} on {like.device}: move it there first"
        )


def _check_offsets(name: str, offsets: torch.Tensor, buffer: torch.Tensor) -> None:
    _check_vector(name, offsets, None, buffer, "the buffer")
    if offsets.dtype != torch.int64 or offsets.numel() < 1 or not offsets.is_contiguous():
        raise KernelError(
            f"{name} is {offsets.dtype} of shape {tuple(offsets.shape)}: it must be contiguous "
            "int64 with one entry more than it bounds"
        )


def _check_order(
    name: str, offsets: torch.Tensor, first: int | None, last: int, of_what: str
) -> None:
    bounds = (int(offsets[0]), int(offsets[-1]))
    if first is not None and bounds != (first, last):
        raise KernelError(f"{name} runs from {bounds[0]} to {bounds[1]}: {of_what} is {last}")
    if bounds[0] < 0 or bounds[1] > last:
        raise KernelError(
            f"{name} runs from {bounds[0]} to {bounds[1]}, outside of 0 to {last}, {of_what}"
        )
    if (offsets.diff() < 0).any():
        raise KernelError(f"{name} goes down: offsets must not decrease")
