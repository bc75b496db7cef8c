"""`megatron-opo train --replay`: updates on batches that were kept, without servers or prompts.

Nothing is sent, and nothing is written: what the update says of itself goes to the terminal. With
the layout of the run, on CPUs, that is what the run said, to the bit.
"""

from pathlib import Path
from typing import Any

from megatron_opo.actor.checkpoint import load_checkpoint, verify_checkpoint
from megatron_opo.actor.parallel import Parallel
from megatron_opo.actor.step import Actor
from megatron_opo.advantages import NEEDS_SCORES, group_advantages_
from megatron_opo.errors import CheckpointError, DataError
from megatron_opo.model_fit import check_model
from megatron_opo.recipe import Recipe
from megatron_opo.replay import BATCHES, KeptBatch, read_batch
from megatron_opo.runs import Checkpoint, changed_fields, complete_checkpoints
from megatron_opo.spmd import Driver
from megatron_opo.train import load_start
from megatron_opo.update import score_energies


def replay(recipe: Recipe, files: list[Path], parallel: Parallel) -> list[dict[str, float]]:
    """Take the updates of these batches in turn; their metrics, on rank 0.

    The first starts from the weights and the optimizer's state of the version that sampled it: the
    run's checkpoint of that version, or what training starts from for version 0.

    Raises:
        DataError: a file cannot be read, or they are not of consecutive steps.
        CheckpointError: there is no checkpoint of that version.
        OpoError: whatever the update itself raises.
    """
    driver = Driver(parallel.rank, parallel.control)
    hf_config = check_model(recipe)
    kept: list[Any] = [None] * len(files)
    kept = driver.run(lambda: read_batches(files, hf_config["vocab_size"])) or kept
    directory = driver.say(driver.run(lambda: find_start(recipe, kept[0])))
    actor = Actor(recipe, hf_config, parallel, driver)
    load_start(actor)
    actor.weights_loaded()
    if directory:
        problems, _ = verify_checkpoint(Path(directory), parallel)
        if problems:
            raise CheckpointError(f"checkpoint {directory} is damaged: {'; '.join(problems)}")
        version = int(Path(directory).name.removeprefix("step_"))
        load_checkpoint(actor, Checkpoint(Path(directory), version, cursor={}, recipe={}))
    driver.run(lambda: show_start(recipe, kept[0], directory))
    return [take_step(each, actor, driver) for each in kept]


def take_step(kept: KeptBatch, actor: Actor, driver: Driver) -> dict[str, float]:
    """As the run did; `kept` is None elsewhere than on rank 0."""
    batch = kept and kept.batch
    algorithm = actor.recipe.algorithm
    driver.run(lambda: show_batch(kept))
    energies = score_energies(actor, batch) if algorithm.estimator in NEEDS_SCORES else None

    def set_advantages() -> None:
        before = batch.advantages.clone()
        group_advantages_(batch, algorithm.estimator, algorithm.singleton, energies)
        if not before.equal(batch.advantages):
            largest = (before - batch.advantages).abs().max()
            print(f"  advantages are not those of the file: they differ by up to {largest:.3g}")

    driver.run(set_advantages)
    metrics = actor.update(batch, actor.version)
    if driver.is_here:
        width = max(map(len, metrics))
        print("\n".join(f"  {name:<{width}}  {value!r}" for name, value in metrics.items()))
    return metrics


def read_batches(files: list[Path], vocab_size: int) -> list[KeptBatch]:
    """Raises DataError: one cannot be read, belongs to another model or does not follow."""
    found: list[KeptBatch] = []
    for path in files:
        kept = read_batch(path)
        largest = int(kept.batch.tokens.max())
        if largest >= vocab_size:
            raise DataError(
                f"batch {path}: has token {largest}, but the vocabulary of model.path ends at "
                f"{vocab_size - 1}: give the recipe of the run that it comes from"
            )
        if found and kept.version != found[-1].version + 1:
            raise DataError(
                f"batch {path}: is of step {kept.step}, after one of step {found[-1].step} "
                f"({found[-1].path}): give the batches of consecutive steps in their order, or one"
            )
        found.append(kept)
    return found


def find_start(recipe: Recipe, kept: KeptBatch) -> str:
    """The directory of the checkpoint to start from; "" for what training starts from."""
    if kept.version == 0:
        return ""
    place = kept.path.absolute().parent
    run_path = place.parent if place.name == BATCHES else recipe.run_path
    there = {int(path.name.removeprefix("step_")): path for path in complete_checkpoints(run_path)}
    if kept.version in there:
        return str(there[kept.version])
    before = max((version for version in there if version < kept.version), default=0)
    has = ", ".join(map(str, there)) or "none"
    raise CheckpointError(
        f"batch {kept.path}: policy version {kept.version} sampled it, but {run_path} has no "
        f"checkpoint of that version (it has: {has}; version 0 needs none). Give the batches of "
        f"steps {before + 1} to {kept.step} together, or run the recipe anew with "
        "checkpoint.every=1 and log.batches_every=1"
    )


def show_start(recipe: Recipe, kept: KeptBatch, directory: str) -> None:
    print(f"starting from {directory or 'the weights that training starts from'}")
    for change in changed_fields(kept.recipe, recipe) if kept.recipe else ():
        print(f"the recipe is another one than the batch's: {change}")


def show_batch(kept: KeptBatch) -> None:
    batch = kept.batch
    print(
        f"step {kept.step}, from {kept.path}: {batch.num_sequences} samples, "
        f"{int(batch.loss_mask.sum())} tokens to train on, mean reward "
        f"{batch.rewards.mean().item():.4g}"
    )
