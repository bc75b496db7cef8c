"""What a run is about to do, in a few lines: model, layout, placement, batch, and what is kept."""

import textwrap

from megatron_opo.observe.text import amount
from megatron_opo.plan.layout import model_of
from megatron_opo.prompts import PromptSet
from megatron_opo.recipe import Recipe
from megatron_opo.weights.hf_config import read_architecture

# With labels it fits a terminal of 100 columns.
VALUE_WIDTH = 86
LAYOUT = (
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "expert_parallel",
)


def summary_rows(
    recipe: Recipe,
    hf_config: dict,
    train_prompts: PromptSet,
    eval_prompts: PromptSet | None,
    *,
    world_size: int,
    device: str,
    trains: bool = True,
) -> list[tuple[str, str]]:
    """(label, value); values of several lines where one would be too long.

    Args:
        world_size: trainer processes.
        device: "cpu" or "cuda", theirs and the servers'.
        trains: false when only prompts are sampled.
    """
    rollout, model = recipe.rollout, model_of(read_architecture(hf_config))
    rows = [
        (
            "model",
            f"{recipe.model.path}: {hf_config['model_type']}, {amount(model.parameters)} "
            f"parameters, {recipe.model.dtype}",
        ),
        ("data", _data(train_prompts, eval_prompts)),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples, up to "
            f"{rollout.max_response_tokens:,} tokens, temperature {rollout.temperature:g}; reward "
            f"{recipe.reward.function}",
        ),
    ]
    if trains:
        rows += [("update", _update(recipe)), ("trainer", _trainer(recipe, world_size, device))]
    rows.append(("servers", _servers(recipe, device, trains)))
    if trains and eval_prompts is not None and recipe.eval.runs:
        rows.append(("eval", _evaluation(recipe, len(eval_prompts))))
    rows += [("saved", _saved(recipe, trains)), ("run", _run(recipe, trains))]
    return [(label, _wrapped(value)) for label, value in rows]


def _data(train_prompts: PromptSet, eval_prompts: PromptSet | None) -> str:
    both = [train_prompts, *([] if eval_prompts is None else [eval_prompts])]
    return "; ".join(prompts.summary() for prompts in both)


def _update(recipe: Recipe) -> str:
    optimizer, algorithm = recipe.optimizer, recipe.algorithm
    return (
        f"{algorithm.estimator}, {algorithm.loss_aggregation}, lr {optimizer.lr:g} "
        f"({optimizer.schedule}), micro-batches of {recipe.actor.micro_batch_tokens:,} tokens"
    )


def _trainer(recipe: Recipe, world_size: int, device: str) -> str:
    actor = recipe.actor
    sizes = {name: getattr(actor, name) for name in LAYOUT}
    sizes["data_parallel"] = world_size // actor.replica_size
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    return f"{processes} on {_places(device, world_size)}" + (f": {layout}" if layout else "")


def _places(device: str, count: int) -> str:
    if device == "cpu":
        return "the CPU"
    return "a GPU" if count == 1 else "a GPU each"


def _servers(recipe: Recipe, device: str, trains: bool) -> str:
    rollout = recipe.rollout
    if rollout.urls:
        shown = f"{len(rollout.urls)} given by URL"
    else:
        shown = f"{rollout.servers} x tensor_parallel {rollout.tensor_parallel}"
        if rollout.nodes:
            shown += f", on {rollout.nodes} nodes of their own"
        elif device == "cpu":
            shown += ", on the CPU"
        elif not trains:
            shown += ", on GPUs"
        elif rollout.hands_over(device):
            shown += ", on the trainers' GPUs (colocated): memory is handed over"
        else:
            shown += ", on the trainers' GPUs (colocated), each side keeps its memory"
    if not trains:
        return shown
    ways = {"distributed": "a process group", "shared_memory": "shared memory", "disk": "disk"}
    return f"{shown}; weights by {ways[recipe.transport(device)]}"


def _evaluation(recipe: Recipe, prompts: int) -> str:
    evaluation, when = recipe.eval, []
    if evaluation.every:
        when.append(_every(evaluation.every))
    when += ["at the start"] if evaluation.at_start else []
    when += ["at the end"] if evaluation.at_end else []
    return f"{', '.join(when)}: {prompts:,} prompts x {evaluation.samples_per_prompt} samples"


def _saved(recipe: Recipe, trains: bool) -> str:
    config, where = recipe.checkpoint, recipe.run_path
    logs = f"metrics, {recipe.log.samples_per_step} samples a step, TensorBoard, run.log, logs/"
    if not trains:
        return f"{where}: batches, {logs}; report.html at the end"
    when = f"{_every(config.every)} and at the end" if config.every else "at the end"
    kept = [f"newest {config.keep} kept"]
    kept += [f"those of {_every(config.keep_every)}"] if config.keep_every else []
    kept += ["the best"] if config.keep_best else []
    exports = [_every(config.export_hf_every)] if config.export_hf_every else []
    exports += ["at the end"] if config.export_hf else []
    shown = f"{where}: checkpoints {when} ({', '.join(kept)})"
    if exports:
        shown += f"; Hugging Face model {' and '.join(exports)}"
    return f"{shown}; {logs}; report.html at the end"


def _run(recipe: Recipe, trains: bool) -> str:
    steps = "1 step" if recipe.train.steps == 1 else f"{recipe.train.steps:,} steps"
    if not trains:
        return f"{steps}, without training; ctrl-c stops it"
    return f"{steps}; ctrl-c stops it after a checkpoint, the same command goes on from there"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _wrapped(text: str) -> str:
    return "\n".join(
        textwrap.wrap(text, VALUE_WIDTH, break_long_words=False, break_on_hyphens=False)
    )
