"""A plan as one screen of text, and as JSON."""

import dataclasses
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_opo.plan import assumptions
from megatron_opo.plan.hardware import GIB, Cluster
from megatron_opo.plan.memory import TrainerMemory
from megatron_opo.plan.planner import Plan
from megatron_opo.plan.search import Suggestion

LOG_WIDTH = 96
UPDATE_ROWS = (
    ("weights", "weights"),
    ("gradients", "gradients, float32"),
    ("optimizer", "optimizer state, float32"),
    ("activations", "activations of micro-batches in flight"),
    ("workspace", "logits, recomputation, gradients of a layer"),
    ("reserve", "CUDA, NCCL, fragmentation"),
    ("bucket", "two messages of weights for the node's servers"),
    ("server", "servers, which keep their memory"),
)


def print_plan(plan: Plan, suggestions: list[Suggestion], file: TextIO = sys.stdout) -> None:
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=LOG_WIDTH, no_color=True)
    _print_head(console, plan)
    _print_update_memory(console, plan)
    _print_generate_memory(console, plan)
    _print_step(console, plan)
    _print_verdict(console, plan, suggestions)
    _print_assumptions(console, plan.cluster)


def _print_head(console: Console, plan: Plan) -> None:
    recipe, cluster, layout = plan.recipe, plan.cluster, plan.memory.layout
    actor, rollout = recipe.actor, recipe.rollout
    place = "servers beside the trainers"
    if not cluster.colocated:
        place = f"servers on {cluster.rollout_nodes} of the nodes"
    console.print(
        f"[bold]{escape(recipe.name)}[/] on {cluster.nodes} x {cluster.gpus_per_node} "
        f"{escape(cluster.gpu.name)} ({escape(cluster.network.name)}), {place}"
    )
    architecture = plan.model.architecture
    console.print(
        f"model    {architecture.family.model_type}, {plan.model.parameters:,} parameters, "
        f"{recipe.model.dtype}"
    )
    parts = [f"tensor {layout.tensor}", f"pipeline {layout.pipeline}", f"data {layout.data}"]
    if layout.context > 1:
        parts.insert(1, f"context {layout.context}")
    if layout.virtual > 1:
        parts.append(f"{layout.virtual} chunks a stage")
    if plan.model.experts:
        parts.append(f"experts {layout.expert} x tensor {layout.expert_tensor}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    parts.append(f"recompute {actor.recompute}")
    console.print(f"trainer  {', '.join(parts)}")
    console.print(
        f"         micro-batches of {actor.micro_batch_tokens * layout.context:,} tokens; servers: "
        f"{rollout.servers} of {rollout.tensor_parallel} GPUs"
    )
    if actor.transformer_config:
        names = ", ".join(actor.transformer_config)
        console.print(f"         not planned for: actor.transformer_config ({escape(names)})")


def shown_stages(stages: list[TrainerMemory]) -> list[TrainerMemory]:
    """The first, the last and the fullest one, in order."""
    fullest = max(stages, key=lambda stage: stage.total)
    chosen = {stage.stage: stage for stage in (stages[0], fullest, stages[-1])}
    return [chosen[i] for i in sorted(chosen)]


def _print_update_memory(console: Console, plan: Plan) -> None:
    stages, capacity = plan.memory.trainers, plan.cluster.gpu.memory
    shown = shown_stages(stages)
    title = f"\nUpdate: GiB on each trainer GPU of {capacity / GIB:.1f}"
    table = _table(title, "")
    for stage in shown:
        name = "all" if len(stages) == 1 else f"stage {stage.stage + 1} of {len(stages)}"
        table.add_column(name, justify="right")
    for field, label in UPDATE_ROWS:
        sizes = [getattr(stage, field) for stage in shown]
        if any(sizes):
            table.add_row(label, *map(_gib, sizes))
    table.add_row("total", *(_total(stage.total, capacity) for stage in shown), style="bold")
    console.print(table)
    if plan.host_memory:
        size = plan.host_memory / GIB
        console.print(
            f"  optimizer state on the host while servers generate: {_tenths(size)} GiB a node"
        )


def _print_generate_memory(console: Console, plan: Plan) -> None:
    server, capacity = plan.memory.server, plan.cluster.gpu.memory
    table = _table(f"\nGenerate: GiB on each server GPU of {capacity / GIB:.1f}", "")
    table.add_column("all", justify="right")
    if plan.cluster.colocated:
        kept = "weights, CUDA, NCCL" if plan.recipe.rollout.hands_over("cuda") else "all it has"
        table.add_row(f"trainer: {kept}", _gib(server.trainer))
    table.add_row("weights", _gib(server.weights))
    table.add_row("SGLang's workspace, CUDA graphs, weights being sent", _gib(server.workspace))
    table.add_row("KV cache", _gib(server.kv_cache))
    used = server.trainer + server.weights + server.workspace + server.kv_cache
    table.add_row("total", _total(used, capacity), style="bold")
    console.print(table)
    recipe = plan.recipe
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    console.print(
        f"  cache of one server: {server.kv_tokens:,} tokens = {server.kv_tokens // longest:,} "
        f"samples of full length ({longest:,})"
    )
    console.print(f"  mem_fraction_static {server.fraction:.2f}; up to {server.allowed:.2f} fits")


def _print_step(console: Console, plan: Plan) -> None:
    work, generate, update = plan.work, plan.generate, plan.update
    total = plan.step_seconds
    table = _table("\nOne step, estimated", "")
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    table.add_column("")
    rows = [
        (
            "generate",
            generate.seconds,
            f"{generate.concurrency:.0f} samples a server (most {generate.most}); "
            f"memory busy {generate.bandwidth:.0%}, arithmetic {generate.compute:.0%}; the longest "
            f"alone {_tenths(generate.longest_seconds)} s",
        ),
        (
            "update",
            update.seconds,
            f"{update.micro_batches} micro-batches a replica, MFU {update.mfu:.0%}, "
            f"pipeline idle {update.bubble:.0%}",
        ),
        ("sync", plan.sync.seconds, "weights from rank 0 to the servers"),
    ]
    if plan.handover_seconds:
        rows.append(("hand-over", plan.handover_seconds, "optimizer state to the host and back"))
    for name, seconds, note in rows:
        table.add_row(name, _tenths(seconds), f"{seconds / total:.0%}", note)
    rate = work.tokens / total / plan.cluster.gpus
    table.add_row("step", _tenths(total), "", f"{rate:,.0f} tokens a second and GPU", style="bold")
    console.print(table)
    console.print(
        f"  {work.samples:,} samples of {work.prompt_tokens:,} + {work.mean_response:,} tokens "
        f"(prompt + mean response): {work.tokens / 1e6:.2f} M tokens, "
        f"{_figures(update.flops / 1e15)} PFLOP"
    )
    if not plan.cluster.colocated:
        trainers = 1 - update.seconds / total
        servers = 1 - generate.seconds / total
        console.print(f"  idle: trainers {trainers:.0%}, servers {servers:.0%} of the step")


def _print_verdict(console: Console, plan: Plan, suggestions: list[Suggestion]) -> None:
    console.print()
    if plan.fits:
        room = min(plan.cluster.gpu.memory - stage.total for stage in plan.memory.trainers)
        spare = f"{room / GIB:.1f} GiB to spare on the fullest trainer GPU"
        console.print(f"[bold green]It fits[/], with {spare}.")
    else:
        only_fraction = all(problem.fraction_only for problem in plan.memory.problems)
        verdict = "It fits with one change:" if only_fraction else "It does not fit:"
        console.print(f"[bold red]{verdict}[/]")
        for problem in plan.memory.problems:
            over = f", {problem.over / GIB:.1f} GiB too much" if problem.over else ""
            console.print(
                f"  {problem.phase}, {problem.where}{over}: {problem.text}", soft_wrap=True
            )
        console.print(
            "Change, the smallest change first (each planned, and fits):"
            if suggestions
            else "Nothing was found that fits, also not on more nodes."
        )
        for suggestion in suggestions:
            more = "" if suggestion.nodes == plan.cluster.nodes else f"--nodes {suggestion.nodes} "
            console.print(f"  {more}{' '.join(suggestion.words())}", soft_wrap=True)


def _print_assumptions(console: Console, cluster: Cluster) -> None:
    console.print("\nAssumed, not known:", style="dim")
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for each in assumptions.ALL:
        table.add_row(each.shown, each.meaning, style="dim")
    console.print(table)
    gpu, network = cluster.gpu, cluster.network
    console.print(
        f"Published: {gpu.flops / 1e12:,.0f} TFLOP/s dense bf16, memory {gpu.bandwidth / 1e9:,.0f} "
        f"GB/s, in a node {gpu.node_link / 1e9:,.0f} GB/s,\n"
        f"between nodes {network.link / 1e9:g} GB/s a GPU. "
        "Outside the KV cache servers leave what SGLang's own rule says.\n"
        "Not counted: rewards, evaluations, checkpoints.",
        style="dim",
    )


def _table(title: str, first: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1),
        header_style="",
    )
    table.add_column(first)
    return table


def _gib(size: float) -> str:
    return _tenths(size / GIB)


def _tenths(value: float) -> str:
    """To a tenth; what is not nothing is not shown as nothing."""
    return "<0.1" if 0 < value < 0.1 else f"{value:,.1f}"


def _total(size: float, capacity: float) -> str:
    text = _gib(size)
    return f"[red]{text} !![/]" if size > capacity else text


def _figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def plan_as_dict(plan: Plan, suggestions: list[Suggestion]) -> dict[str, Any]:
    """Every number, in bytes, FLOPs, tokens and seconds; for JSON."""
    architecture = plan.model.architecture
    memory = plan.memory
    server = dataclasses.asdict(memory.server) | {"kv_tokens": memory.server.kv_tokens}
    trainers = [dataclasses.asdict(each) | {"total": each.total} for each in memory.trainers]
    return {
        "recipe": plan.recipe.name,
        "fits": plan.fits,
        "problems": [dataclasses.asdict(each) for each in memory.problems],
        "suggestions": [{"nodes": each.nodes, "overrides": each.words()} for each in suggestions],
        "cluster": dataclasses.asdict(plan.cluster) | {"colocated": plan.cluster.colocated},
        "model": {
            "type": architecture.family.model_type,
            "parameters": plan.model.parameters,
        },
        "layout": dataclasses.asdict(memory.layout),
        "memory": {"update": trainers, "generate": server, "host": plan.host_memory},
        "work": dataclasses.asdict(plan.work) | {"tokens": plan.work.tokens},
        "generate": dataclasses.asdict(plan.generate),
        "update": dataclasses.asdict(plan.update),
        "sync": dataclasses.asdict(plan.sync),
        "handover": {"seconds": plan.handover_seconds},
        "step": {
            "seconds": plan.step_seconds,
            "tokens_per_second_per_gpu": plan.work.tokens / plan.step_seconds / plan.cluster.gpus,
        },
        "assumptions": [dataclasses.asdict(each) for each in assumptions.ALL],
    }
