"""Step time from 8 to 1,024 GPUs, calculated with the planner; nothing is run.

    python benchmarks/scaling.py [--quick] [--out benchmarks/results/scaling.md]

For each model, GPU and number of GPUs, all layouts of a space (tensor, pipeline, virtual pipeline,
context and expert parallel, recomputation; tensor parallel of the servers, and which share of the
nodes is theirs alone; size of a sync's messages) are held against the planner: of those that fit
and are within 2 % of the fastest step, the one of the smallest replicas is shown, with what limits
it. The batch is fixed (strong scaling), or
grows with the GPUs (weak scaling). --quick takes few sizes and one GPU.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_opo.errors import RecipeError
from megatron_opo.plan import assumptions
from megatron_opo.plan.flops import Flops
from megatron_opo.plan.hardware import GPUS, NETWORKS, Cluster
from megatron_opo.plan.layout import Layout, Model, layout_of, model_of
from megatron_opo.plan.memory import server_memory
from megatron_opo.plan.planner import Plan, find_config, plan_memory, plan_of
from megatron_opo.plan.search import apply
from megatron_opo.plan.timing import Workload, generate_time, step_flops, update_time, workload_of
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import load_recipe
from megatron_opo.weights.hf_config import read_architecture

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
PER_NODE = 8
NETWORK = NETWORKS["ib-ndr"]
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
QUICK_SIZES = (8, 128, 1024)
MODELS = {
    "7B": "DeepSeek-R1-Distill-Qwen-7B",
    "70B": "DeepSeek-R1-Distill-Llama-70B",
    "235B-A22B": "Qwen3-235B-A22B",
}
PROMPTS, SAMPLES = 512, 8
PROMPTS_PER_GPU = 4  # of weak scaling
BATCH = {
    "data.max_prompt_tokens": 1024,
    "rollout.samples_per_prompt": SAMPLES,
    "rollout.max_response_tokens": 8192,
    "actor.grad_bucket_mb": 256,
}
# The model's error is larger: within it, the simpler layout is the better choice.
SLACK = 0.02
BUCKETS_MB = (256, 1024, 4096)


@dataclass(frozen=True)
class Case:
    """A model and its batch; `recipe` has both and no layout yet."""

    recipe: Recipe
    config: dict[str, Any]
    config_path: Path
    model: Model
    work: Workload
    flops: Flops

    def with_prompts(self, prompts: int) -> "Case":
        recipe = _batch_of(self.recipe, prompts)
        work = workload_of(recipe, None)
        return replace(self, recipe=recipe, work=work, flops=step_flops(self.model, work))


def case_of(name: str) -> Case:
    """Of a model that has its config in recipes/models/."""
    path = RECIPES / "opo_7b.yaml"
    recipe = apply(load_recipe(path), {"model.path": f"models/{name}", **BATCH})
    recipe = _batch_of(recipe, PROMPTS)
    config_path, config = find_config(recipe, path, None)
    model = model_of(read_architecture(config))
    work = workload_of(recipe, None)
    return Case(recipe, config, config_path, model, work, step_flops(model, work))


def _batch_of(recipe: Recipe, prompts: int) -> Recipe:
    """No server waits for rank 0's leave: what it works on at once, its cache decides."""
    limits = {"rollout.max_concurrent_requests": prompts * recipe.rollout.samples_per_prompt}
    return apply(recipe, {"rollout.prompts_per_step": prompts, **limits})


@dataclass(frozen=True)
class Space:
    """Sizes that are tried; those that do not divide the model or the GPUs drop out. `apart` are
    shares of the nodes that only serve, 0: servers are on the trainers' GPUs."""

    tensor: tuple[int, ...] = (1, 2, 4, 8)
    pipeline: tuple[int, ...] = (1, 2, 4, 8, 16)
    context: tuple[int, ...] = (1, 2, 4)
    expert: tuple[int, ...] = (8, 16, 32, 64, 128)
    recompute: tuple[str, ...] = ("none", "full")
    server_tensor: tuple[int, ...] = (1, 2, 4, 8)
    apart: tuple[float, ...] = (0, 1 / 4, 1 / 2, 3 / 4)
    buckets_mb: tuple[int, ...] = BUCKETS_MB

    def trainers(self, case: Case) -> Iterator[dict[str, Any]]:
        """Overrides of `actor`. Micro-batches hold one sequence of full length."""
        layers, experts = case.model.architecture.layers, case.model.experts
        longest = case.recipe.data.max_prompt_tokens + case.recipe.rollout.max_response_tokens
        sizes = (self.tensor, self.pipeline, self.context, self.recompute)
        for tensor, pipeline, context, recompute in itertools.product(*sizes):
            for virtual in _virtual(layers, pipeline):
                for expert in self.expert if experts else (1,):
                    yield {
                        "actor.tensor_parallel": tensor,
                        "actor.sequence_parallel": tensor > 1,
                        "actor.pipeline_parallel": pipeline,
                        "actor.virtual_pipeline": virtual,
                        "actor.context_parallel": context,
                        "actor.expert_parallel": expert,
                        "actor.expert_tensor_parallel": 1,
                        "actor.recompute": recompute,
                        "actor.micro_batch_tokens": math.ceil(longest / context),
                    }


def _virtual(layers: int, pipeline: int) -> list[int]:
    """Chunks of layers on each stage: one, some, and as many as there are layers."""
    if layers % pipeline:
        return []
    own = layers // pipeline
    if pipeline == 1:
        return [1]
    return [n for n in range(1, own + 1) if own % n == 0 and (n <= 5 or n == own)]


@dataclass(frozen=True)
class Candidate:
    """A layout that divides everything; `bound` is below its step's seconds."""

    bound: float
    recipe: Recipe
    servers: dict[str, Any]
    cluster: Cluster
    trainer: int  # number of its trainer's layout on its share of the nodes


def candidates(case: Case, space: Space, gpu: str, gpus: int) -> Iterator[Candidate]:
    """All of them, without a look at memory."""
    nodes = gpus // PER_NODE
    number = 0
    for share in space.apart:
        apart = round(nodes * share)
        if (apart == 0) != (share == 0) or apart == nodes:
            continue
        cluster = Cluster(GPUS[gpu], NETWORK, nodes, PER_NODE, apart)
        served = [_served(case, cluster, tensor) for tensor in space.server_tensor]
        for actor in space.trainers(case):
            try:
                recipe = apply(case.recipe, actor | {"rollout.nodes": apart})
                layout = layout_of(recipe, cluster.trainer_gpus)
            except RecipeError:
                continue
            if not _divides(case, layout):
                continue
            number += 1
            update = update_time(case.model, recipe, cluster, layout, case.work, case.flops)
            for servers, least in served:
                yield Candidate(update.seconds + least, recipe, servers, cluster, number)


def _divides(case: Case, layout: Layout) -> bool:
    """Each replica has a sample, and each rank of a group of experts a part of them."""
    a = case.model.architecture
    return layout.data <= case.work.samples and a.heads % layout.tensor == 0


def _served(case: Case, cluster: Cluster, tensor: int) -> tuple[dict[str, Any], float]:
    """Overrides of `rollout`, and the seconds of generating with no trainer beside the servers."""
    servers = cluster.server_nodes * cluster.gpus_per_node // tensor
    overrides = {"rollout.tensor_parallel": tensor, "rollout.servers": servers}
    alone = apply(case.recipe, overrides | {"rollout.nodes": 1})
    memory = server_memory(case.model, alone, replace(cluster, rollout_nodes=1), [])
    return overrides, generate_time(case.model, alone, cluster, memory, case.work).seconds


def fastest(case: Case, space: Space, gpu: str, gpus: int, slack: float = SLACK) -> Plan | None:
    """Of the plans that fit and whose step is at most `slack` longer than the fastest one's, that
    of the smallest replicas; None if none fits.

    Candidates are looked at in the order of their bounds, until one's is above that.
    """
    found: list[Plan] = []
    limit, too_large = math.inf, set()
    for candidate in sorted(candidates(case, space, gpu, gpus), key=lambda each: each.bound):
        if candidate.bound > limit:
            break
        if candidate.trainer in too_large:
            continue
        plans = [fitted(case, candidate, bucket) for bucket in space.buckets_mb]
        if all(plan == "update" for plan in plans):
            too_large.add(candidate.trainer)
        found += [plan for plan in plans if isinstance(plan, Plan)]
        limit = min((plan.step_seconds for plan in found), default=math.inf) * (1 + slack)
    close = [plan for plan in found if plan.step_seconds <= limit]
    return min(close, key=_simplicity) if close else None


def _simplicity(plan: Plan) -> tuple:
    layout, rollout = plan.memory.layout, plan.recipe.rollout
    ranks = plan.recipe.actor.replica_size
    return rollout.nodes > 0, ranks, layout.expert, layout.virtual, plan.step_seconds


def fitted(case: Case, candidate: Candidate, bucket_mb: int) -> Plan | str:
    """Its plan, with the servers' share of memory that the trainer leaves; or the phase whose
    memory, or the sizes that, do not fit."""
    overrides = {"sync.bucket_mb": bucket_mb, "rollout.server_args": {}}
    recipe = apply(candidate.recipe, candidate.servers | overrides)

    def memory_of(recipe: Recipe):
        return plan_memory(
            recipe, case.config, case.config_path, case.model, candidate.cluster, case.work
        )

    try:
        memory = memory_of(recipe)
    except RecipeError:
        return "sizes"
    if memory.problems and all(problem.fraction_only for problem in memory.problems):
        share = math.floor(memory.server.allowed * 100) / 100
        recipe = apply(recipe, {"rollout.server_args": {"mem_fraction_static": share}})
        memory = memory_of(recipe)
    if memory.problems:
        return memory.problems[0].phase
    return plan_of(recipe, case.model, candidate.cluster, case.work, memory)


def parts(plan: Plan) -> dict[str, float]:
    """Seconds of the step by what they are spent on; they add up to it."""
    generate, update = plan.generate, plan.update
    busy = "memory" if generate.bandwidth >= generate.compute else "arithmetic"
    return {
        "longest response": generate.longest_seconds,
        f"decoding ({busy})": generate.seconds - generate.longest_seconds,
        "update's arithmetic": update.compute_seconds,
        "tensor parallel": update.tensor_seconds,
        "context parallel": update.context_seconds,
        "experts' all-to-all": update.expert_seconds,
        "stages' messages": update.stage_seconds,
        "starting messages": update.start_seconds,
        "pipeline bubble": update.bubble * update.seconds,
        "gradients": update.data_seconds,
        "sync": plan.sync.seconds,
        "hand-over": plan.handover_seconds,
    }


def limit(plan: Plan) -> str:
    name, seconds = max(parts(plan).items(), key=lambda part: part[1])
    return f"{name} {seconds / plan.step_seconds:.0%}"


def trainer_words(plan: Plan) -> str:
    layout = plan.memory.layout
    words = [f"TP{layout.tensor}"]
    if layout.context > 1:
        words.append(f"CP{layout.context}")
    if layout.pipeline > 1:
        chunks = f"x{layout.virtual}" if layout.virtual > 1 else ""
        words.append(f"PP{layout.pipeline}{chunks}")
    if plan.model.experts:
        words.append(f"EP{layout.expert}")
    words.append(f"DP{layout.data}")
    if plan.recipe.actor.recompute == "full":
        words.append("recompute")
    return " ".join(words)


def server_words(plan: Plan) -> str:
    rollout = plan.recipe.rollout
    apart = f" on {plan.cluster.rollout_nodes} nodes of their own" if rollout.nodes else ""
    return f"{rollout.servers} x TP{rollout.tensor_parallel}{apart}"


def rate(plan: Plan) -> float:
    """Prompt and response tokens a second and GPU."""
    return plan.work.tokens / plan.step_seconds / plan.cluster.gpus


HEAD = (
    "GPUs | trainer | servers | generate s | update s | sync s | hand-over s | step s "
    "| tokens/s/GPU | MFU of update | generate / update / rest | what limits, and its share"
)


def row(gpus: int, plan: Plan | None) -> str:
    if plan is None:
        return f"| {gpus:,} | nothing fits |" + " |" * 10
    generate, update, total = plan.generate.seconds, plan.update.seconds, plan.step_seconds
    rest = 1 - (generate + update) / total
    return (
        f"| {gpus:,} | {trainer_words(plan)} | {server_words(plan)} | {generate:.1f} "
        f"| {update:.1f} | {plan.sync.seconds:.1f} | {plan.handover_seconds:.1f} | {total:.1f} "
        f"| {rate(plan):,.0f} | {plan.update.mfu:.0%} "
        f"| {generate / total:.0%} / {update / total:.0%} / {rest:.0%} | {limit(plan)} |"
    )


def strong(case: Case, gpu: str, sizes: tuple[int, ...]) -> list[str]:
    found = [row(gpus, fastest(case, Space(), gpu, gpus)) for gpus in sizes]
    return [f"| {HEAD} |", "| --: | --- | --- |" + " --: |" * 7 + " --- | --- |", *found]


def weak(cases: dict[str, Case], gpu: str, sizes: tuple[int, ...]) -> list[str]:
    names = [f"{name}: step s | tokens/s/GPU | what limits" for name in cases]
    lines = [
        f"| GPUs | prompts | {' | '.join(names)} |",
        "| --: | --: |" + " --: | --: | --- |" * len(cases),
    ]
    for gpus in sizes:
        cells = []
        for case in cases.values():
            grown = case.with_prompts(PROMPTS_PER_GPU * gpus)
            plan = fastest(grown, Space(), gpu, gpus)
            cells += [f"{plan.step_seconds:.1f}", f"{rate(plan):,.0f}", limit(plan)] if plan else []
            cells += [] if plan else ["nothing fits", "", ""]
        lines.append(f"| {gpus:,} | {PROMPTS_PER_GPU * gpus:,} | {' | '.join(cells)} |")
    return lines


def syncs() -> list[str]:
    """Of recipes/opo_moe_30b_a3b.yaml, by the size of its messages and where servers are."""
    path = RECIPES / "opo_moe_30b_a3b.yaml"
    base = load_recipe(path)
    config_path, config = find_config(base, path, None)
    model = model_of(read_architecture(config))
    lines = ["| nodes | servers | bucket_mb | gather s | transfer s | load s | calls s | sync s |"]
    lines.append("| --- | --- |" + " --: |" * 6)
    for gpu, nodes, apart in (("h200", 1, 0), ("h100", 2, 0), ("h100", 4, 2)):
        servers = (apart or nodes) * 2
        cluster = Cluster(GPUS[gpu], NETWORK, nodes, PER_NODE, apart)
        place = f"{nodes} x 8 {gpu.upper()}" + (f", {apart} for servers alone" if apart else "")
        for bucket in BUCKETS_MB:
            sizes = {"rollout.servers": servers, "rollout.nodes": apart, "sync.bucket_mb": bucket}
            recipe = apply(base, sizes | {"rollout.server_args": {"mem_fraction_static": 0.5}})
            work = workload_of(recipe, None)
            memory = plan_memory(recipe, config, config_path, model, cluster, work)
            assert not memory.problems, memory.problems
            sync = plan_of(recipe, model, cluster, work, memory).sync
            lines.append(
                f"| {place} | {servers} x TP4 | {bucket:,} | {sync.gather_seconds:.2f} "
                f"| {sync.transfer_seconds:.2f} | {sync.load_seconds:.2f} "
                f"| {sync.call_seconds:.2f} | {sync.seconds:.2f} |"
            )
    return lines


def report(sizes: tuple[int, ...], gpus: tuple[str, ...], models: dict[str, str]) -> str:
    cases = {name: case_of(path) for name, path in models.items()}
    work = next(iter(cases.values())).work
    lines = [
        "# Scaling on paper",
        "",
        "Calculated, not run here: `python benchmarks/scaling.py` asks the planner (`megatron-opo "
        "plan`) for the",
        "smallest layout within 2 % of the fastest that fits. docs/performance.md explains the "
        "tables.",
        "",
        f"Nodes of {PER_NODE} GPUs; between nodes {NETWORK.link / 1e9:g} GB/s a GPU "
        f"({NETWORK.name}). Prompts of {work.prompt_tokens} tokens (mean),",
        f"responses of {work.mean_response:,} (mean, spread evenly up to "
        f"{work.longest_response:,}), {SAMPLES} samples a prompt, bfloat16, gradients",
        f"reduced in buckets of {BATCH['actor.grad_bucket_mb']} MB. Assumed:",
        "",
        *(f"- {each.shown}: {each.meaning}" for each in assumptions.ALL),
        "",
        "TP tensor, CP context, PP pipeline (x chunks a stage), EP expert, DP data parallel. Where "
        "servers have no nodes",
        "of their own they share the trainers' GPUs.",
    ]
    for name, case in cases.items():
        for gpu in gpus:
            lines += ["", f"## {name} on {gpu.upper()}, {PROMPTS} prompts", ""]
            lines += strong(case, gpu, sizes)
    for gpu in gpus:
        lines += [
            "",
            f"## {gpu.upper()}, {PROMPTS_PER_GPU} prompts for each GPU (weak scaling)",
            "",
        ]
        lines += weak(cases, gpu, sizes)
    lines += ["", "## A weight sync of Qwen3-30B-A3B", "", *syncs()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few sizes, one GPU")
    parser.add_argument("--out", type=Path, help="a Markdown file, beside what is printed")
    options = parser.parse_args()
    sizes, gpus = (QUICK_SIZES, ("h200",)) if options.quick else (SIZES, ("h100", "h200"))
    text = report(sizes, gpus, MODELS)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
