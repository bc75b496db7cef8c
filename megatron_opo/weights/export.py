"""A Megatron model, whatever its layout, as Hugging Face tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_opo.errors import WeightError
from megatron_opo.weights.families import Architecture, Row, read_architecture
from megatron_opo.weights.slices import local_parameters, unmerge


def export_hf(
    model: Sequence[torch.nn.Module], hf_config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the whole model on global rank 0, in Hugging Face order.

    A collective over the tensor- and pipeline-parallel ranks of data-parallel replica 0: each of
    them must run the iterator to its end, together, and all but rank 0 get nothing from it; whoever
    consumes it on rank 0 and fails must still exhaust it. The other replicas hold the same weights
    and take no part: their iterator is empty at once.

    Tensors are in `dtype`, on rank 0's device, contiguous, and never share memory with the model.
    One parameter is gathered at a time.

    Raises:
        WeightError: the model is not the one that `hf_config` describes; checked before the first
            tensor, on all ranks of the replica alike.
    """
    if parallel_state.get_data_parallel_rank() != 0:
        return
    architecture = read_architecture(hf_config)
    parameters, owners = _agree(model, architecture)
    pipeline: Any = parallel_state.get_pipeline_model_parallel_group()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    device = next(iter(parameters.values())).device
    for row in architecture.rows():
        owner = owners[row.megatron]
        if stage == owner:
            parameter = parameters[row.megatron].detach().to(dtype)
            gathered = _gather(row, parameter)
        for i, part in enumerate(row.parts):
            if tp_rank != 0 or stage not in (0, owner):
                continue
            name, shape = part.name, architecture.shape(part)
            if stage == owner:
                tensor = _whole_part(architecture, row, gathered, i)
                _check_shape(name, tensor, shape)
                if owner != 0:
                    dist.send(tensor, group=pipeline, group_dst=0)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(tensor, group=pipeline, group_src=owner)
            if stage == 0:
                yield name, tensor


def _agree(
    model: Sequence[torch.nn.Module], architecture: Architecture
) -> tuple[dict[str, torch.nn.Parameter], dict[str, int]]:
    """This rank's parameters, and which pipeline stage holds each of the model's (the first one,
    where several do)."""
    parameters, problem = {}, None
    try:
        parameters = local_parameters(
            model, architecture, parallel_state.get_tensor_model_parallel_world_size()
        )
    except WeightError as error:
        problem = str(error)
    stages: list = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.all_gather_object(stages, (sorted(parameters), problem), group=group)
    problems = [problem for _, problem in stages if problem]
    if problems:
        raise WeightError("\n".join(problems))
    owners: dict[str, int] = {}
    for stage, (names, _) in enumerate(stages):
        for name in names:
            owners.setdefault(name, stage)
    return parameters, owners


def _gather(row: Row, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor-parallel rank's slice, on the first of them; elsewhere nothing."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or row.split is None:
        return [parameter]
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    slices = [torch.empty_like(parameter) for _ in range(size)] if first else None
    group: Any = parallel_state.get_tensor_model_parallel_group()
    dist.gather(parameter.contiguous(), slices, group=group, group_dst=0)
    return slices or []


def _whole_part(
    architecture: Architecture, row: Row, gathered: list[torch.Tensor], index: int
) -> torch.Tensor:
    """Part `index` over all ranks, without the rows that pad the vocabulary."""
    ranks = len(gathered)
    heights = [architecture.shape(part)[0] // ranks for part in row.parts]
    groups = architecture.kv_heads // ranks
    slices = [unmerge(row, tensor, heights, groups, index) for tensor in gathered]
    whole = torch.cat(slices, dim=row.split or 0)
    if row.parts[index].shape[0] == "vocab" and len(whole) > architecture.vocab:
        # A copy, so that the padding is not sent along in the tensor's storage.
        return whole[: architecture.vocab].clone()
    return whole


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise WeightError(
            f"export of `{name}`: the model holds {list(tensor.shape)}, its config.json says "
            f"{list(shape)}; nothing with a wrong shape may leave the trainer"
        )
