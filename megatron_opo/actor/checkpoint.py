"""Checkpoints of a run: Megatron's sharded format for weights and optimizer, JSON for the rest.

A checkpoint loads under any other layout. Before that every file is held against its checksum; one
that is damaged is passed over for the one before it.
"""

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_opo.actor.optimizer_state import gathered_by_first_rank
from megatron_opo.actor.parallel import Parallel
from megatron_opo.actor.random_state import restore_random_state
from megatron_opo.actor.step import Actor
from megatron_opo.checkpoint_files import Found, problem_with, read_checksums, split_by_size
from megatron_opo.errors import CheckpointError
from megatron_opo.runs import Checkpoint, complete_checkpoints, read_checkpoint
from megatron_opo.weights.chunk_file import read_chunk
from megatron_opo.weights.torch_dist import read_metadata

# The form of the optimizer state that loads under any layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def find_whole_checkpoint(run_path: Path, parallel: Parallel) -> Found:
    """The newest checkpoint of a run all of whose files are as they were written. All ranks call it
    together, and share the reading.

    Raises:
        CheckpointError: there are checkpoints, but none is whole.
    """
    damaged: dict[Path, str] = {}
    for directory in _agreed(lambda: complete_checkpoints(run_path)[::-1], parallel):
        problems, unverified = verify_checkpoint(directory, parallel)
        if not problems:
            return Found(read_checkpoint(directory), damaged, unverified)
        damaged[directory] = "; ".join(problems)
    if damaged:
        raise CheckpointError(
            f"{run_path}: no checkpoint is whole:\n"
            + "\n".join(f"  {path.name}: {problem}" for path, problem in damaged.items())
            + "\nrestore their files from a copy, or add --fresh to start anew"
        )
    return Found(None)


def verify_checkpoint(directory: Path, parallel: Parallel) -> tuple[list[str], bool]:
    """By all ranks together: its problems, and whether there were no checksums to find them by."""

    def plan() -> tuple[dict[str, str], list[list[str]], list[str]]:
        try:
            digests = read_checksums(directory)
            if digests is None:
                read_metadata(directory)
            shares = split_by_size(directory, digests or (), parallel.world_size)
            read_checkpoint(directory)
            return digests or {}, shares, []
        except CheckpointError as error:
            return {}, [[]] * parallel.world_size, [str(error)]

    digests, shares, problems = _agreed(plan, parallel)
    found = [problem_with(directory / name, digests[name]) for name in shares[parallel.rank]]
    everywhere: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(everywhere, found, group=parallel.control)
    problems += [problem for each in everywhere for problem in each if problem]
    return problems, not digests


def _agreed(look: Callable[[], Any], parallel: Parallel) -> Any:
    """What rank 0 sees, on all ranks: not every file system shows all of them the same."""
    seen = [look() if parallel.rank == 0 else None]
    dist.broadcast_object_list(seen, 0, group=parallel.control)
    return seen[0]


def load_checkpoint(actor: Actor, checkpoint: Checkpoint) -> None:
    """Restore weights, optimizer state and version, whatever layout they were saved under; and the
    random numbers of each rank, if it was the same.

    Raises:
        CheckpointError: the files are damaged or belong to another model.
    """
    directory = checkpoint.directory
    distributed = actor.recipe.optimizer.distributed
    if checkpoint.recipe.get("optimizer", {}).get("distributed", distributed) != distributed:
        raise CheckpointError(
            f"checkpoint {directory} was written with optimizer.distributed={not distributed}, "
            f"the recipe has {distributed}: the optimizer's state has another form; set it back"
        )
    _initialize_optimizer_state(actor)
    try:
        read_metadata(directory)  # Megatron runs what it finds in there: only if it is harmless
        state = sharded_state(actor, is_loading=True)
        with without_deprecations():
            loaded: Any = dist_checkpointing.load(state, str(directory))
        for i, module in enumerate(actor.modules):
            module.load_state_dict(loaded[f"model{i}"], strict=True)
        _load_optimizer(actor, loaded["optimizer"], checkpoint.version)
        if checkpoint.layout == layout_of(actor):
            path = directory / random_state_file(actor.parallel.rank)
            restore_random_state(json.loads(path.read_text()))
    # The latter is no Exception; torch raises it on all ranks when one cannot read its part.
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {directory} cannot be loaded ({_reason(directory, error)}); if it is "
            "damaged, move the directory away to resume from the one before it"
        ) from error
    actor.version = checkpoint.version


def layout_of(actor: Actor) -> dict[str, Any]:
    """Where it is the same, a rank is what the rank of its number was."""
    parallel = actor.parallel
    names = ("world_size", "tp_size", "cp_size", "pp_size", "dp_size", "ep_size", "expert_tp_size")
    return {name: getattr(parallel, name) for name in names} | {
        "virtual_pipeline": actor.recipe.actor.virtual_pipeline,
        "device": parallel.device.type,
    }


def random_state_file(rank: int) -> str:
    return f"random_{rank:05d}.json"


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Megatron builds on a class of torch's that warns whenever it is used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


def _reason(directory: Path, error: BaseException) -> str:
    """In one line. What torch says of a damaged file is advice to run what is in it."""
    text = (str(error).strip() or repr(error)).splitlines()[-1]
    causes = [exc for exc, _ in getattr(error, "failures", {}).values()] or [error]
    if any(isinstance(cause, pickle.UnpicklingError) for cause in causes):
        text = next(_unreadable_files(directory), "what describes a tensor cannot be read")
    return f"{type(error).__name__}: {text}"


def _unreadable_files(directory: Path) -> Iterator[str]:
    metadata = read_metadata(directory)
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        for chunk in entry.chunks:
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            nothing = torch.empty([0] * len(chunk.sizes), dtype=entry.properties.dtype)
            try:
                path = directory / place.relative_path
                read_chunk(path, (place.offset, place.length), [0] * nothing.dim(), nothing)
            except (OSError, ValueError) as error:
                yield f"{place.relative_path} is damaged at `{key}`: {error}"


def sharded_state(actor: Actor, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for i, module in enumerate(actor.modules):
        state[f"model{i}"] = module.sharded_state_dict(metadata=METADATA)
    models = state["model0"] if len(actor.modules) == 1 else state
    with nullcontext() if is_loading else gathered_by_first_rank(_parts(actor)):
        state["optimizer"] = actor.optimizer.sharded_state_dict(
            models, is_loading=is_loading, metadata=METADATA
        )
    return state


def _parts(actor: Actor) -> list[MegatronOptimizer]:
    optimizer = actor.optimizer
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def optimizer_states(actor: Actor) -> Iterator[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    for part in _parts(actor):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield part.optimizer, parameter


def _initialize_optimizer_state(actor: Actor) -> None:
    """Megatron loads into existing state, which Adam creates only in its first step."""
    for optimizer, parameter in optimizer_states(actor):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter.data),
            "exp_avg_sq": torch.zeros_like(parameter.data),
        }


def _load_optimizer(actor: Actor, state: dict[str, Any], steps: int) -> None:
    """Megatron's own loading of sharded state trips over torch Adam's step count. So its moments
    are loaded without one, and the count, which is the version, is set after."""
    parts = _parts(actor)
    moments = [
        part_state.pop("param_state", None)
        for part_state in ([state] if len(parts) == 1 else state.values())
    ]
    actor.optimizer.load_state_dict(state)
    for part, part_moments in zip(parts, moments, strict=True):
        if part_moments is not None:
            for parameter_state in part.optimizer.state.values():
                parameter_state.pop("step", None)
            # Only a DistributedOptimizer has moments of its own to load.
            part.load_parameter_state_from_fully_reshardable(part_moments)  # pyright: ignore[reportAttributeAccessIssue]
    for optimizer, parameter in optimizer_states(actor):
        optimizer.state[parameter]["step"] = torch.tensor(float(steps))
