"""Checkpoints of a run: Megatron's sharded format for weights and optimizer, JSON for the rest.

A checkpoint is written into `step_N.partial`, and renamed to `step_N` when every rank is done; so a
directory with the final name is complete. It loads under another tensor, pipeline or data layout.
"""

import json
import os
import queue
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megatron_opo.actor.step import Actor
from megatron_opo.errors import CheckpointError
from megatron_opo.recipe import Recipe
from megatron_opo.runs import (
    CHECKPOINTS,
    STATE_FILE,
    Checkpoint,
    check_attempt,
    complete_checkpoints,
)
from megatron_opo.spmd import Driver
from megatron_opo.weights.torch_dist import read_metadata

# The form of the optimizer state that loads under any layout.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save_checkpoint(
    actor: Actor, recipe: Recipe, driver: Driver, cursor_state: Callable[[], dict[str, Any]]
) -> None:
    """Write `checkpoints/step_N` of the run, then drop all but the newest `checkpoint.keep`."""
    root = recipe.run_path / CHECKPOINTS
    final = root / f"step_{actor.version}"
    partial = root / f"step_{actor.version}.partial"

    def prepare() -> None:
        check_attempt(recipe.run_path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish() -> None:
        state = {
            "version": actor.version,
            "cursor": cursor_state(),
            "recipe": recipe.to_show(),
        }
        with open(partial / STATE_FILE, "w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        for old in complete_checkpoints(recipe.run_path)[: -recipe.checkpoint.keep]:
            shutil.rmtree(old)

    # Megatron would start a process only to hold this queue, which outlives a killed rank and which
    # a signal to all processes of the job ends. Its writers report to this process as it is.
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        driver.run(prepare)
        dist_checkpointing.save(
            _sharded_state(actor, is_loading=False), str(partial), content_metadata=_METADATA
        )
        dist.barrier(group=actor.parallel.control)
        driver.run(finish)
    except (OSError, CheckpointException) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        # The writer's own words do not always say that the disk is full.
        free_mb = shutil.disk_usage(recipe.run_path).free / 1e6
        if driver.is_here:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {partial}: cannot be written ({reason}; {free_mb:,.0f} MB were free "
            "there); earlier checkpoints are untouched. Free space or change run_dir, and start "
            "again"
        ) from error


def load_checkpoint(actor: Actor, checkpoint: Checkpoint) -> None:
    """Restore weights, optimizer state and version, whatever layout they were saved under.

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
        state = _sharded_state(actor, is_loading=True)
        loaded: Any = dist_checkpointing.load(state, str(directory))
        for i, module in enumerate(actor.modules):
            module.load_state_dict(loaded[f"model{i}"], strict=True)
        _load_optimizer(actor, loaded["optimizer"], checkpoint.version)
    # The latter is no Exception; torch raises it on all ranks when one cannot read its part.
    except (Exception, CheckpointException) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise CheckpointError(
            f"checkpoint {directory} cannot be loaded ({type(error).__name__}: {reason}); if it is "
            "damaged, move the directory away to resume from the one before it"
        ) from error
    actor.version = checkpoint.version


def _sharded_state(actor: Actor, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for i, module in enumerate(actor.modules):
        state[f"model{i}"] = module.sharded_state_dict(metadata=_METADATA)
    models = state["model0"] if len(actor.modules) == 1 else state
    state["optimizer"] = actor.optimizer.sharded_state_dict(
        models, is_loading=is_loading, metadata=_METADATA
    )
    return state


def _parts(actor: Actor) -> list[MegatronOptimizer]:
    optimizer = actor.optimizer
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _states(actor: Actor) -> Iterator[tuple[torch.optim.Optimizer, torch.nn.Parameter]]:
    for part in _parts(actor):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield part.optimizer, parameter


def _initialize_optimizer_state(actor: Actor) -> None:
    """Megatron loads into existing state, which Adam creates only in its first step."""
    for optimizer, parameter in _states(actor):
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
    for optimizer, parameter in _states(actor):
        optimizer.state[parameter]["step"] = torch.tensor(float(steps))
