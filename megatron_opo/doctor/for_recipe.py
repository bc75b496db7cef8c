"""What a recipe needs of this machine: files, GPUs, memory, disk, ports."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_opo.doctor.findings import Finding, gib, judged
from megatron_opo.doctor.machine import available_memory
from megatron_opo.doctor.storage import existing
from megatron_opo.errors import OpoError, RecipeError
from megatron_opo.model_fit import check_model
from megatron_opo.observe.loggers import check_loggers
from megatron_opo.observe.prometheus import claim_metrics_port
from megatron_opo.plan.hardware import NETWORKS, Cluster, Gpu
from megatron_opo.plan.layout import BYTES, Model, layout_of, model_of
from megatron_opo.plan.memory import trainer_memory
from megatron_opo.plan.planner import cluster_of, plan_memory
from megatron_opo.plan.timing import micro_batches, workload_of
from megatron_opo.recipe import Recipe
from megatron_opo.rewards.verifiers import resolve_function
from megatron_opo.rows import check_files
from megatron_opo.runs import latest_checkpoint
from megatron_opo.user_code import LoadError, resolve
from megatron_opo.weights.hf_config import read_architecture

# Of what is allocated beside the exact sizes; so much must be left for a note not to come.
ROOM_BESIDE = 1.2


def check_recipe(
    recipe: Recipe, recipe_path: Path, imports: dict[str, dict[str, Any]]
) -> list[Finding]:
    findings = [_data(recipe), *_functions(recipe), _run(recipe), _log(recipe)]
    findings += _server_ports(recipe)
    try:
        config = check_model(recipe)
        model = model_of(read_architecture(config))
    except (RecipeError, OSError) as error:
        cure = f"change it in {recipe_path}, or put the model's files where it says"
        return [Finding("model", str(error), "problem", cure), *findings]
    parameters = f"{recipe.model.path}, {model.parameters:,} parameters"
    findings = [Finding("model", parameters), *findings, _disk(recipe, model)]
    gpus = imports.get("gpus", {})
    if not gpus.get("gpus"):
        return [*findings, _on_cpus(recipe, model)]
    return [*findings, *_on_gpus(recipe, config, model, gpus)]


def _data(recipe: Recipe) -> Finding:
    sets = {"train": recipe.data.train, "eval": recipe.data.eval}

    def files() -> str:
        for split, dataset in sets.items():
            if dataset is not None and dataset.procedural is None:
                check_files(dataset, split)
        names = [file for dataset in sets.values() if dataset for file in dataset.files]
        return ", ".join(names) or "generated, no files"

    return _checked("data", files, "make the file, or name the right one")


def _functions(recipe: Recipe) -> list[Finding]:
    """They are looked for, not imported."""
    reward = _checked(
        "reward",
        lambda: resolve_function(recipe.reward.function),
        "name one that is there in reward.function",
    )
    own = recipe.rollout.function
    if own is None:
        return [reward]
    cure = "name one that is there in rollout.function"
    return [reward, _checked("rollout function", lambda: resolve(own), cure)]


def _run(recipe: Recipe) -> Finding:
    def state() -> str:
        checkpoint = latest_checkpoint(recipe.run_path)
        if checkpoint is None:
            return f"{recipe.run_path}, which has no checkpoint yet"
        return f"{recipe.run_path} would go on after step {checkpoint.version}"

    return _checked("run", state, "restore it, or begin anew with --fresh")


def _log(recipe: Recipe) -> Finding:
    config = recipe.log

    def loggers() -> str:
        check_loggers(config.loggers)
        with claim_metrics_port(config.prometheus_host, config.prometheus_port):
            return ", ".join(config.loggers) or "metrics.jsonl only"

    return _checked("loggers", loggers, "install what is missing, or leave it out")


def _checked(name: str, check: Callable[[], str], what_to_do: str) -> Finding:
    try:
        return Finding(name, check())
    except (OpoError, LoadError, OSError) as error:
        return Finding(name, str(error), "problem", what_to_do)


def _server_ports(recipe: Recipe) -> list[Finding]:
    """Of servers that have fixed ones."""
    rollout = recipe.rollout
    if not rollout.port or rollout.urls:
        return []
    taken = []
    for port in range(rollout.port, rollout.port + rollout.servers):
        try:
            socket.create_server((rollout.host, port)).close()
        except OSError as error:
            taken.append(f"{port}: {error.strerror or error}")
    return [
        judged(
            "servers' ports",
            "; ".join(taken) or f"{rollout.port} and on are free",
            "problem" if taken else "ok",
            "end what listens there (`ss -ltnp`), or take free ports: rollout.port=0",
        )
    ]


def _disk(recipe: Recipe, model: Model) -> Finding:
    """Weights, float32 master weights and two moments of each parameter are in a checkpoint."""
    width = BYTES[recipe.model.dtype]
    each = model.parameters * (width + 12)
    needed = each * (recipe.checkpoint.keep + 1) + model.parameters * width
    free = shutil.disk_usage(existing(recipe.run_path)).free
    return judged(
        "disk",
        f"about {gib(needed)} for checkpoints, {gib(free)} are free",
        "problem" if free < each else "note" if free < needed else "ok",
        "make room, give another run_dir=, or keep fewer: checkpoint.keep",
    )


def _on_cpus(recipe: Recipe, model: Model) -> Finding:
    """The exact sizes of what stays in memory, against what is free."""
    actor, rollout = recipe.actor, recipe.rollout
    world = max(actor.replica_size * (actor.data_parallel or 1), actor.smallest_world)
    name = "memory"
    try:
        layout = layout_of(recipe, world)
        batches = micro_batches(recipe, layout, workload_of(recipe, None))
        stages = trainer_memory(model, recipe, layout, batches, world)
    except RecipeError as error:
        return Finding(name, str(error), "problem", "change the layout in `actor`")
    held = sum(stage.weights + stage.gradients + stage.optimizer for stage in stages)
    servers = 0 if rollout.urls else rollout.servers
    needed = held * world / len(stages) + servers * model.parameters * BYTES[recipe.model.dtype]
    free = available_memory()
    found = f"no GPU: on the CPU trainer ({world}) and servers ({servers}) hold {gib(needed)}"
    if free is None:
        return Finding(name, found)
    return judged(
        name,
        f"{found}, {gib(free)} are free",
        "problem" if needed > free else "note" if needed * ROOM_BESIDE > free else "ok",
        "take a machine or nodes with GPUs (`megatron-opo plan` says which), or a smaller model",
    )


def _on_gpus(recipe: Recipe, config: dict, model: Model, gpus: dict[str, Any]) -> list[Finding]:
    here = len(gpus["gpus"])
    gpu = Gpu(gpus["gpus"][0], float(min(gpus["memory"])), 1.0, 1.0, 1.0)
    if recipe.rollout.urls:
        return [Finding("GPUs", f"{here} here; memory is not planned beside rollout.urls")]
    try:
        cluster = cluster_of(recipe, gpu, NETWORKS["ib-ndr"], gpus_per_node=here)
        config_path = Path(recipe.model.path) / "config.json"
        work = workload_of(recipe, None)
        memory = plan_memory(recipe, config, config_path, model, cluster, work)
    except RecipeError as error:
        return [Finding("GPUs", str(error), "problem", "change the layout, or take other nodes")]
    fits = "; ".join(f"{problem.where}: {problem.text}" for problem in memory.problems)
    return [
        _nodes(cluster),
        judged(
            "GPU memory",
            fits or "the recipe fits, by the planner",
            "problem" if fits else "ok",
            "`megatron-opo plan` says what to change",
        ),
    ]


def _nodes(cluster: Cluster) -> Finding:
    found = f"{cluster.gpus} of {cluster.gpus_per_node} here"
    return judged(
        "GPUs",
        found if cluster.nodes == 1 else f"{cluster.gpus} on {cluster.nodes} nodes like this one",
        "ok" if cluster.nodes == 1 else "note",
        f"start it as a job of {cluster.nodes} nodes, with slurm/*.sbatch",
    )
