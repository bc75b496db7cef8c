"""Process groups: torch.distributed, Megatron's parallel state and random numbers, in one call."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_opo.actor.cpu import enable_cpu
from megatron_opo.errors import RecipeError, TrainingError, UnfitEnvironmentError
from megatron_opo.recipe import ActorConfig
from megatron_opo.spmd import Driver

SHOWN = 5
CONTROL_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Parallel:
    """Where this process stands in the layout.

    Example, rank 3 of 8 with tensor_parallel 2 and pipeline_parallel 2: tp_rank 1 of 2,
    dp_rank 1 of 2, pp_rank 0 of 2 (tensor ranks vary fastest, then context, data and pipeline).
    The experts of a stage are shared out over its ranks anew: ep_size ranks hold different ones,
    expert_tp_size ranks a slice of each.
    `control` is a gloo group over all ranks, for CPU tensors and Python objects on any backend.
    """

    world_size: int
    rank: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    expert_tp_rank: int
    expert_tp_size: int
    device: torch.device
    backend: str
    control: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def data_parallel_size(actor: ActorConfig, world_size: int) -> int:
    """How many replicas of the model `world_size` processes hold.

    Raises:
        RecipeError: the processes do not fit the layout.
    """
    pipeline, data = actor.pipeline_parallel, actor.data_parallel
    replica, shape = actor.replica_size, actor.replica_shape
    if data is not None and replica * data != world_size:
        raise RecipeError(
            f"{shape} x actor.data_parallel {data} = {replica * data} processes, but {world_size} "
            f"were started: start {replica * data} (torchrun --nproc-per-node {replica * data} on "
            "one machine), or set actor.data_parallel=null to take what is there"
        )
    if world_size % replica:
        raise RecipeError(
            f"{shape} = {replica} processes per replica of the model, which does not divide the "
            f"{world_size} that were started: start {_fitting(world_size, replica)} "
            "(torchrun --nproc-per-node)"
        )
    fewest = actor.smallest_world
    if world_size % fewest:
        experts = f"actor.expert_parallel {actor.expert_parallel}"
        if actor.expert_tensor_size > 1:
            experts += f" x actor.expert_tensor_parallel {actor.expert_tensor_size}"
        raise RecipeError(
            f"{experts} on each of actor.pipeline_parallel {pipeline} stages needs a multiple of "
            f"{fewest} processes, but {world_size} were started: start "
            f"{_fitting(world_size, fewest)} (torchrun --nproc-per-node), or lower expert_parallel"
        )
    return world_size // replica


def _fitting(world_size: int, multiple_of: int) -> str:
    below = world_size // multiple_of * multiple_of
    return f"{below} or {below + multiple_of}" if below else str(multiple_of)


def initialize(
    actor: ActorConfig,
    *,
    seed: int,
    timeout_s: float = 1800.0,
    facts: Mapping[str, object] | None = None,
) -> Parallel:
    """Join the job that torchrun (or srun) started, or be a job of one process without it.

    Args:
        seed: of every generator; the same on all ranks.
        timeout_s: how long a collective of the model waits for its peers before the job fails.
            The control group waits for generation, however long that takes.
        facts: what must be the same on all ranks, by name: fields of the recipe, say.

    Raises:
        TrainingError: a fact is not the same on all ranks.
        RecipeError: the number of processes does not fit the layout.
        UnfitEnvironmentError: the launcher's environment is incomplete, or a GPU is missing.
    """
    world_size, rank, local_rank = _launcher_environment()
    data_parallel_size(actor, world_size)
    on_cpu = enable_cpu()
    if on_cpu:
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = _cuda_device(local_rank), "nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    alone = "RANK" not in os.environ
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        # A store in memory needs no port, so jobs of one process never collide.
        store=dist.HashStore() if alone else None,
        timeout=timeout,
        device_id=None if on_cpu else device,
    )
    control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    # Before Megatron's groups: ranks of different layouts would wait for each other there.
    _compare(facts or {}, Driver(rank, control))  # pyright: ignore[reportArgumentType]
    _initialize_megatron(actor, seed, timeout_s, on_cpu)
    return _describe(device, backend, control)  # pyright: ignore[reportArgumentType]


def _compare(facts: Mapping[str, object], driver: Driver) -> None:
    mine = {name: repr(value) for name, value in facts.items()}
    said = driver.share([torch.tensor(list(json.dumps(mine).encode()))])[0]
    first = json.loads(bytes(said.tolist()))
    differing = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
    lines = [
        f"{name} is {mine.get(name, 'missing')}, on rank 0 {first.get(name, 'missing')}"
        for name in differing[:SHOWN]
    ]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more fields")
    reports = driver.gather("; ".join(lines))
    odd = [f"  rank {rank}: {text}" for rank, text in enumerate(reports) if text]
    if odd:
        more = [f"  and {len(odd) - SHOWN} more ranks"] if len(odd) > SHOWN else []
        raise TrainingError(
            "the ranks were not started alike:\n"
            + "\n".join(odd[:SHOWN] + more)
            + "\nGive all of them the same files and the same command"
        )


def shutdown() -> None:
    """Leave the job; `initialize` may be called again."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _initialize_megatron(actor: ActorConfig, seed: int, timeout_s: float, on_cpu: bool) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=actor.tensor_parallel,
        pipeline_model_parallel_size=actor.pipeline_parallel,
        virtual_pipeline_model_parallel_size=(
            actor.virtual_pipeline if actor.virtual_pipeline > 1 else None
        ),
        context_parallel_size=actor.context_parallel,
        expert_model_parallel_size=actor.expert_parallel,
        expert_tensor_parallel_size=actor.expert_tensor_size,
        distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
    )
    torch.manual_seed(seed)
    # The inference tracker forks nothing: there is no CUDA generator to fork, and no dropout.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=on_cpu, force_reset_rng=True)


def _launcher_environment() -> tuple[int, int, int]:
    """World size, rank and local rank."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if name in os.environ]
    if "RANK" not in given and os.environ.get("WORLD_SIZE", "1") == "1":
        return 1, 0, 0
    missing = [name for name in names if name not in given]
    if missing:
        raise UnfitEnvironmentError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}: start the job "
            "with torchrun (or export all four per rank), or unset them to run one process"
        )
    values = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdigit():
            raise UnfitEnvironmentError(
                f"the environment variable {name} is {os.environ[name]!r}, not a whole number: "
                "start the job with torchrun"
            )
        values[name] = int(os.environ[name])
    rank, world_size = values["RANK"], values["WORLD_SIZE"]
    if rank >= world_size:
        raise UnfitEnvironmentError(
            f"RANK is {rank} but WORLD_SIZE is {world_size}: ranks are 0 to {world_size - 1}"
        )
    return world_size, rank, int(os.environ.get("LOCAL_RANK", str(rank)))


def _cuda_device(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    # srun may show each task only its own GPU.
    if count > 1 and local_rank >= count:
        raise UnfitEnvironmentError(
            f"local rank {local_rank} has no GPU: this machine shows {count} "
            "(check CUDA_VISIBLE_DEVICES, or start at most one process per GPU)"
        )
    return torch.device("cuda", local_rank if count > 1 else 0)


def _describe(device: torch.device, backend: str, control: dist.ProcessGroup) -> Parallel:
    from megatron.core import parallel_state as state

    return Parallel(
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
        expert_tp_rank=state.get_expert_tensor_parallel_rank() or 0,
        expert_tp_size=state.get_expert_tensor_parallel_world_size() or 1,
        device=device,
        backend=backend,
        control=control,
    )
