"""Weights on disk into a Megatron model: each rank reads only its own slices."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_opo.errors import CheckpointError, WeightError
from megatron_opo.weights.checkpoint import Checkpoint, check_names, open_checkpoint
from megatron_opo.weights.families import EMBEDDING, OUTPUT, Architecture, Row
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_checkpoint import MegatronCheckpoint, open_megatron
from megatron_opo.weights.slices import (
    Place,
    local_kv_groups,
    local_parameters,
    merge,
    parameter_rows,
    part_bounds,
)


def this_place() -> Place:
    """Of this rank, in Megatron's parallel state."""
    return Place(
        rank=parallel_state.get_tensor_model_parallel_rank(),
        ranks=parallel_state.get_tensor_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_tensor_parallel_rank() or 0,
        expert_ranks=parallel_state.get_expert_tensor_parallel_world_size() or 1,
    )


def load_hf(model: Sequence[torch.nn.Module], directory: Path, hf_config: dict[str, Any]) -> None:
    """Fill every parameter from the safetensors files in `directory`.

    All ranks call it together; rows that pad the vocabulary become zero.

    Raises:
        WeightError: on every rank when any rank finds a tensor missing, unexpected, misshapen,
            not finite, or a file broken.
    """

    def load() -> None:
        with ExitStack() as stack:
            checkpoint = open_checkpoint(Path(directory), stack)
            architecture = read_architecture(hf_config)
            check_names(checkpoint, architecture.hf_shapes(), architecture.tied)
            _load(model, checkpoint, architecture)

    _fail_together(load)


def load_megatron(
    model: Sequence[torch.nn.Module], directory: Path, hf_config: dict[str, Any]
) -> None:
    """As `load_hf`, from a Megatron distributed checkpoint of any layout; its optimizer state, if
    it has one, is passed over."""

    def load() -> None:
        architecture = read_architecture(hf_config)
        _load(model, open_megatron(Path(directory), architecture), architecture)

    _fail_together(load)


def _fail_together(load: Callable[[], None]) -> None:
    problem = None
    try:
        load()
    except (WeightError, CheckpointError) as error:
        problem = str(error)
    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    # A rank that raised alone would leave the others waiting in their next collective.
    different = list(dict.fromkeys(p for p in problems if p))
    if different:
        raise WeightError("\n".join(different))


def _load(
    model: Sequence[torch.nn.Module],
    checkpoint: Checkpoint | MegatronCheckpoint,
    architecture: Architecture,
) -> None:
    place = this_place()
    parameters = local_parameters(model, architecture, place)
    for name, row in parameter_rows(architecture):
        if name not in parameters:
            continue
        parameter = parameters[name]
        parts = _read_parts(checkpoint, architecture, row, place, parameter.dtype)
        merged = merge(row, parts, local_kv_groups(architecture, place.ranks))
        with torch.no_grad():
            # Shorter than the parameter only where the vocabulary is padded.
            parameter[: len(merged)].copy_(merged)
            parameter[len(merged) :].zero_()


def _read_parts(
    checkpoint: Checkpoint | MegatronCheckpoint,
    architecture: Architecture,
    row: Row,
    place: Place,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    parts = []
    all_bounds = part_bounds(architecture, row, *place.of(row))
    for part, bounds in zip(row.parts, all_bounds, strict=True):
        name = part.name
        stored = checkpoint.read(name, row.split, *bounds)
        value = stored.to(dtype)
        if not torch.isfinite(value).all():
            how = "holds NaN or infinity"
            if torch.isfinite(stored).all():
                how = f"holds values that {dtype} cannot represent; use another model.dtype"
            raise WeightError(f"{checkpoint.directory}: `{name}` {how}")
        if row is EMBEDDING and architecture.tied:
            _check_tied(checkpoint, stored, bounds)
        parts.append(value)
    return parts


def _check_tied(
    checkpoint: Checkpoint | MegatronCheckpoint, embedding: torch.Tensor, bounds: tuple[int, int]
) -> None:
    head = OUTPUT.parts[0].name
    if head in checkpoint.tensors:
        stored = checkpoint.read(head, 0, *bounds)
        if not torch.equal(stored, embedding):
            raise WeightError(
                f"{checkpoint.directory}: config.json says tie_word_embeddings, but `{head}` "
                f"differs from `{EMBEDDING.parts[0].name}`; set it to false, or remove the head"
            )
