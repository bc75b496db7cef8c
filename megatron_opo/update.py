"""One update of a run: advantages, the optimizer step, and what becomes of a batch when it fails.

As in `train`: all ranks call these together; `desk` and `batch` are None elsewhere than on rank 0.
"""

import torch

from megatron_opo.actor.shift import PolicyShift
from megatron_opo.actor.step import Actor, Scores
from megatron_opo.advantages import NEEDS_SCORES, token_energies
from megatron_opo.batch import Group, PackedBatch
from megatron_opo.collect import keep_batch, write_advantages
from megatron_opo.desk import Desk, phase
from megatron_opo.errors import LogError, NonFiniteError, OnPolicyError
from megatron_opo.gap_report import describe_gap
from megatron_opo.replay import failed_batch_path, replay_command
from megatron_opo.spmd import Driver

MOST_SKIPS = 3


def take_step(
    batch: PackedBatch,
    actor: Actor,
    desk: Desk,
    driver: Driver,
    shift: PolicyShift | None = None,
) -> dict[str, float]:
    """Metrics of one update, those of `shift` among them; the actor's version is one more then.

    The version stays when numbers are not finite and the recipe says to skip such a batch.

    Raises:
        NonFiniteError: numbers are not finite, and the run shall stop.
        OnPolicyError: servers and actor disagree about the batch.
        TrainingError: the weights are lost.
    """
    version = actor.version
    try:
        set_advantages(batch, actor, desk, driver)
        with phase(desk, driver, "update"):
            metrics = actor.update(batch, version)
    except NonFiniteError as error:  # on all ranks
        problem = error
        driver.run(lambda: skip_or_stop(desk, batch, version, problem))
        return {}
    except OnPolicyError:
        if not driver.is_here:
            raise
        assert actor.scores is not None, "it is by them that the batch was refused"
        said = explain_gap(batch, actor.scores, desk.drawn.groups, desk)
        raise OnPolicyError(f"{said}\n{keep_failed(desk, batch, version)}") from None
    if shift is not None:
        with phase(desk, driver, "policy_shift"):
            metrics |= shift.measure(batch)
    if desk:
        metrics["actor/skipped_updates"] = float(desk.skipped_updates)
        desk.skipped_updates = 0
    return metrics


def set_advantages(batch: PackedBatch, actor: Actor, desk: Desk, driver: Driver) -> None:
    """Token-level advantages. Some estimators weight by the policy's own probabilities: for these,
    one more forward pass."""
    energies = None
    if actor.recipe.algorithm.estimator in NEEDS_SCORES:
        with phase(desk, driver, "score"):
            energies = score_energies(actor, batch)
    driver.run(lambda: write_advantages(desk, batch, energies))


def score_energies(actor: Actor, batch: PackedBatch) -> torch.Tensor | None:
    """[T] on rank 0."""
    scores = actor.score(batch)
    return scores and token_energies(scores.logprobs, scores.sum_squared_probs)


def skip_or_stop(desk: Desk, batch: PackedBatch, version: int, error: NonFiniteError) -> None:
    """Keep the batch; raise `error` again, unless the recipe says to go on."""
    kept = keep_failed(desk, batch, version)
    may_skip = desk.recipe.train.on_nonfinite == "skip"
    if may_skip and desk.skipped_updates < MOST_SKIPS:
        desk.skipped_updates += 1
        desk.log.warn(
            f"{error}. Skipped, {desk.skipped_updates} of at most {MOST_SKIPS} in a row: version "
            f"{version} goes on with the next prompts. {kept}"
        )
        return
    after = f", after {MOST_SKIPS} that were skipped" if may_skip else ""
    raise NonFiniteError(f"{error}{after}.\n{kept}") from None


def explain_gap(batch: PackedBatch, scores: Scores, groups: list[Group], desk: Desk) -> str:
    """What is said where servers and actor disagree on a batch that was packed of `groups`."""
    return describe_gap(
        batch,
        scores,
        groups,
        desk.recipe,
        desk.log.decode,
        desk.rollout.differing_weights(),
    )


def keep_failed(desk: Desk, batch: PackedBatch, version: int) -> str:
    """Where the batch is and how to look at it, or why it is lost."""
    path = failed_batch_path(desk.recipe.run_path, version + 1)
    try:
        keep_batch(desk, batch, version, path)
    except LogError as error:
        return str(error)
    return f"Its batch is kept; this takes the step again: {replay_command(path)}"
