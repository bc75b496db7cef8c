"""`megatron-opo train --rollout-only`: prompts, servers and rewards of a recipe, without training.

For a look at data, rewards and servers: what the weights of `model.path` answer, step for step, in
a run directory of its own, with every batch kept.
"""

import gc
from collections.abc import Callable

import torch

from megatron_opo.advantages import NEEDS_SCORES
from megatron_opo.checkpoint_files import Found
from megatron_opo.collect import collect, keep_batch, log_step, write_advantages
from megatron_opo.desk import open_desk
from megatron_opo.early import started_servers
from megatron_opo.errors import RecipeError
from megatron_opo.model_fit import check_model
from megatron_opo.observe.console import Console
from megatron_opo.observe.report import write_report
from megatron_opo.recipe import Recipe
from megatron_opo.replay import batch_path

SUFFIX = ".rollout_only"


def rollout_recipe(recipe: Recipe) -> Recipe:
    """The recipe with a run directory of its own, so that no training is mixed up with it.

    Raises:
        RecipeError: it samples from other weights than those of model.path.
    """
    for field, value in (
        ("model.megatron_checkpoint", recipe.model.megatron_checkpoint),
        ("rollout.urls", recipe.rollout.urls),
    ):
        if value:
            raise RecipeError(
                f"{field} is {value!r}, but --rollout-only samples from the weights of model.path "
                "by servers that it starts: drop the field for it (or convert the checkpoint and "
                "give that as model.path)"
            )
    return recipe.model_copy(update={"run_dir": recipe.run_dir + SUFFIX})


def rollout_only(
    recipe: Recipe, console: Console | None = None, on_begin: Callable[[], None] = lambda: None
) -> int:
    """Sample, score and log `train.steps` batches; the signal that asked it to stop, or 0.

    Args:
        console: what has spoken to the user already.
        on_begin: called when the run directory is this process's own.
    """
    hf_config = check_model(recipe)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (
        started_servers(recipe, device) as servers,
        open_desk(
            recipe, hf_config, device, Found(None), None, servers, console=console, trains=False
        ) as desk,
    ):
        on_begin()
        desk.wait_until_ready()
        gc.freeze()  # as in `train`
        for step in range(recipe.train.steps):
            batch = collect(desk, version=0)
            if batch is None:
                desk.log.last(f"stopped after step {step}, as asked", step=step)
                return desk.stop.signum or 0
            if recipe.algorithm.estimator in NEEDS_SCORES:
                batch.advantages.fill_(torch.nan)  # nobody is here who could tell
            else:
                write_advantages(desk, batch, None)
            log_step(desk, batch, {}, version=step)
            keep_batch(desk, batch, 0, batch_path(recipe.run_path, step + 1))
        report, steps = str(write_report(recipe.run_path)), recipe.train.steps
        desk.log.last(f"finished: {steps:,} steps; report: {report}", step=steps, report=report)
    return 0
