"""One plan: memory, operations and seconds of a recipe on a cluster, and whether it fits."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_opo.errors import RecipeError
from megatron_opo.model_fit import check_sizes
from megatron_opo.plan.hardware import Cluster, Gpu, Network
from megatron_opo.plan.layout import Layout, Model, layout_of, model_of
from megatron_opo.plan.memory import (
    ServerMemory,
    TrainerMemory,
    gib,
    host_memory,
    server_memory,
    trainer_memory,
)
from megatron_opo.plan.sync import Sync, handover_time, sync_time
from megatron_opo.plan.timing import (
    Generate,
    Update,
    Workload,
    generate_time,
    micro_batches,
    step_flops,
    update_time,
    workload_of,
)
from megatron_opo.recipe import Recipe
from megatron_opo.weights.hf_config import read_architecture

DEFAULT_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Problem:
    """What does not fit. `over` is how many bytes are missing on each of these GPUs; with
    `fraction_only` a smaller mem_fraction_static is all that it takes."""

    phase: Literal["generate", "update"]
    where: str
    over: float
    text: str
    fraction_only: bool = False


@dataclass(frozen=True)
class Memory:
    """What fits and what does not, without an estimate of seconds."""

    layout: Layout
    micro_batches: int
    trainers: list[TrainerMemory]
    server: ServerMemory
    problems: list[Problem]


@dataclass(frozen=True)
class Plan:
    """Everything that is known before a GPU is touched. Bytes, FLOPs and seconds."""

    recipe: Recipe
    model: Model
    cluster: Cluster
    work: Workload
    memory: Memory
    host_memory: float
    generate: Generate
    update: Update
    sync: Sync
    handover_seconds: float

    @property
    def fits(self) -> bool:
        return not self.memory.problems

    @property
    def step_seconds(self) -> float:
        phases = self.generate.seconds + self.update.seconds
        return phases + self.sync.seconds + self.handover_seconds


def find_config(recipe: Recipe, recipe_path: Path, given: Path | None) -> tuple[Path, dict]:
    """The model's config.json: the file that was given, the model directory's own, or
    models/<name of the model directory>.json beside the recipe.

    Raises:
        RecipeError: none of them is there, or it cannot be read.
    """
    name = Path(recipe.model.path).name
    places = [
        Path(recipe.model.path) / "config.json",
        recipe_path.parent / "models" / f"{name}.json",
    ]
    places = [given] if given else places
    for path in places:
        if path.is_file():
            break
    else:
        raise RecipeError(
            f"no config of the model: looked for {' and '.join(map(str, places))}. The planner "
            "needs nothing else of it: give the file with --model-config"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise RecipeError(f"{path} must hold an object, got {config!r:.60}")
    return path, config


def cluster_of(
    recipe: Recipe,
    gpu: Gpu,
    network: Network,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
) -> Cluster:
    """A cluster of the given size; without one, the smallest that holds the recipe's replicas and
    servers. `rollout.nodes` of its nodes are for servers alone.

    Raises:
        RecipeError: sizes that contradict each other, or servers that run elsewhere.
    """
    per_node = gpus_per_node or DEFAULT_GPUS_PER_NODE
    apart = recipe.rollout.nodes
    if recipe.rollout.urls:
        raise RecipeError(
            "rollout.urls names servers that run somewhere else, which cannot be planned for: plan "
            "with rollout.urls=[] and the number of servers in rollout.servers"
        )
    for option, size in (("gpus", gpus), ("nodes", nodes), ("gpus-per-node", gpus_per_node)):
        if size is not None and size < 1:
            raise RecipeError(f"--{option}: {size}; it must be 1 or more")
    if gpus is not None and nodes is not None:
        raise RecipeError("--gpus and --nodes: give one of them")
    if nodes is None:
        needed = _needed_gpus(recipe, per_node) if gpus is None else gpus
        per_node = min(per_node, needed)
        if gpus is not None and gpus % per_node:
            raise RecipeError(f"--gpus: {gpus} are not whole nodes of {per_node} (--gpus-per-node)")
        nodes = -(-needed // per_node)
    if apart >= nodes:
        raise RecipeError(
            f"rollout.nodes: {apart} for servers alone leaves none of {nodes} to train: give more "
            "--nodes or lower it"
        )
    return Cluster(gpu, network, nodes, per_node, apart)


def _needed_gpus(recipe: Recipe, per_node: int) -> int:
    rollout = recipe.rollout
    replicas = recipe.actor.replica_size * (recipe.actor.data_parallel or 1)
    training = max(recipe.actor.smallest_world, replicas)
    if rollout.nodes:
        return _round_up(training, per_node) + rollout.nodes * per_node
    return max(training, rollout.servers * rollout.tensor_parallel)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def plan_memory(
    recipe: Recipe,
    config: dict[str, Any],
    config_path: Path,
    model: Model,
    cluster: Cluster,
    work: Workload,
) -> Memory:
    """Raises RecipeError if the sizes do not divide."""
    check_sizes(recipe, config, config_path)
    layout = layout_of(recipe, cluster.trainer_gpus)
    batches = micro_batches(recipe, layout, work)
    trainers = trainer_memory(model, recipe, layout, batches, cluster.gpus_per_node)
    server = server_memory(model, recipe, cluster, trainers)
    if cluster.colocated and not recipe.rollout.hands_over("cuda"):
        trainers = [replace(stage, server=server.total) for stage in trainers]
    problems = _problems(recipe, cluster, layout, trainers, server)
    return Memory(layout, batches, trainers, server, problems)


def _problems(
    recipe: Recipe,
    cluster: Cluster,
    layout: Layout,
    trainers: list[TrainerMemory],
    server: ServerMemory,
) -> list[Problem]:
    capacity, rollout = cluster.gpu.memory, recipe.rollout
    problems = []
    for stage in trainers:
        over = stage.total - capacity
        if over > 1:  # byte: a server may take exactly what is left
            where = _stage_name(layout, stage.stage)
            text = f"needs {gib(stage.total):.1f} GiB of {gib(capacity):.1f}"
            problems.append(Problem("update", where, over, text))
    where = f"a server of {rollout.tensor_parallel} GPUs"
    text = _server_places(recipe, cluster)
    if text:
        problems.append(Problem("generate", "the servers", 0.0, text))
    longest = recipe.data.max_prompt_tokens + rollout.max_response_tokens
    least = longest * server.kv_per_token
    if server.kv_cache < least:
        left = max(0.0, gib(server.kv_cache))
        text = f"{left:.1f} GiB are left for the KV cache, but one sample of full length "
        text += f"({longest:,} tokens) takes {gib(least):.1f} GiB"
        problems.append(Problem("generate", where, least - server.kv_cache, text))
    elif server.fraction > server.allowed + 0.005:
        over = (server.fraction - server.allowed) * capacity
        given = "mem_fraction_static" in rollout.server_args
        says = "is" if given else "is not set: by SGLang's rule for this GPU a server takes"
        text = f"rollout.server_args.mem_fraction_static {says} {server.fraction:.2f}, but the "
        text += f"trainer beside it leaves {server.allowed:.2f}"
        problems.append(Problem("generate", where, over, text, fraction_only=True))
    return problems


def _server_places(recipe: Recipe, cluster: Cluster) -> str:
    """Why the servers cannot stand on the nodes, or nothing."""
    rollout, hosts = recipe.rollout, cluster.server_nodes
    if rollout.servers % hosts:
        return f"rollout.servers: {rollout.servers} do not spread evenly over {hosts} nodes"
    wanted = rollout.servers // hosts * rollout.tensor_parallel
    if wanted > cluster.gpus_per_node:
        return (
            f"rollout.servers: {rollout.servers // hosts} on each node x rollout.tensor_parallel "
            f"{rollout.tensor_parallel} need {wanted} GPUs, a node has {cluster.gpus_per_node}"
        )
    return ""


def _stage_name(layout: Layout, stage: int) -> str:
    if layout.pipeline == 1:
        return "every trainer GPU"
    return f"pipeline stage {stage + 1} of {layout.pipeline}"


def make_plan(
    recipe: Recipe,
    config: dict[str, Any],
    config_path: Path,
    cluster: Cluster,
    mean_response: int | None = None,
) -> Plan:
    """Raises RecipeError for a model, layout or cluster that cannot go together at all; one that
    only needs more memory than there is has `Plan.memory.problems`."""
    model = model_of(read_architecture(config))
    work = workload_of(recipe, mean_response)
    memory = plan_memory(recipe, config, config_path, model, cluster, work)
    return plan_of(recipe, model, cluster, work, memory)


def plan_of(recipe: Recipe, model: Model, cluster: Cluster, work: Workload, memory: Memory) -> Plan:
    """With the seconds, where it is known what fits."""
    return Plan(
        recipe=recipe,
        model=model,
        cluster=cluster,
        work=work,
        memory=memory,
        host_memory=host_memory(recipe, memory.trainers, cluster),
        generate=generate_time(model, recipe, cluster, memory.server, work),
        update=update_time(model, recipe, cluster, memory.layout, work, step_flops(model, work)),
        sync=sync_time(model, recipe, cluster, memory.layout),
        handover_seconds=handover_time(recipe, memory.trainers),
    )
