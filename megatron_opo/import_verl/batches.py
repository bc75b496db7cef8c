"""Batches, steps and intervals: where verl's counting and exact on-policy training differ.

verl counts both batches in prompts: a rollout samples data.train_batch_size prompts (rollout.n
responses each), an optimizer step trains actor.ppo_mini_batch_size of them (again times n). It is
exactly on-policy if the two are equal and ppo_epochs is 1. Otherwise the batch of an optimizer step
is kept, with its learning rate, and a rollout is made as small as that; all that verl counts in
rollouts is then multiplied by the optimizer steps that one took.
"""

from pathlib import Path
from typing import Any

from megatron_opo.import_verl.rules import Outcome, Script, flag, number, shown, whole

TRAIN, MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
EPOCHS = "actor_rollout_ref.actor.ppo_epochs"
GROUP, OPTIM = "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.optim"
DEFAULT_GROUP = 8


def train_batch(script: Script) -> int:
    return script.whole(TRAIN, 1024)


def mini_batch(script: Script) -> int:
    return min(script.whole(MINI, 256), train_batch(script))


def _unknown(script: Script) -> str:
    """The batch that a variable stands for which is not known here."""
    return next((key for key in (TRAIN, MINI) if "$" in shown(script.get(key))), "")


def steps_per_rollout(script: Script) -> int:
    """Optimizer steps that verl takes on one rollout, ppo_epochs aside; 1 where not known."""
    if _unknown(script):
        return 1
    return -(-train_batch(script) // mini_batch(script))


def group_size(script: Script) -> int:
    return script.whole(GROUP, 1)


def prompts(value: Any, script: Script, key: str) -> Outcome:
    """data.train_batch_size and actor.ppo_mini_batch_size."""
    whole(value)
    if unknown := _unknown(script):
        why = f"{unknown} cannot be known here, so nor can the optimizer steps of a rollout"
        fill = "the smaller of train_batch_size and ppo_mini_batch_size; if they differ, multiply "
        fill += "steps and intervals by train_batch_size / ppo_mini_batch_size"
        return Outcome("changed", why, {}, {"rollout.prompts_per_step": fill})
    train, mini, n = train_batch(script), mini_batch(script), group_size(script)
    fields = {"rollout.prompts_per_step": mini}
    steps = steps_per_rollout(script)
    if steps == 1:
        return Outcome(
            "taken over",
            f"train batch = mini batch = {mini} prompts (x rollout.n {n}): one optimizer step per "
            "rollout, exactly on-policy",
            fields,
        )
    if key == TRAIN:
        why = (
            f"a step samples the {mini} prompts of ppo_mini_batch_size, not {train}: it trains all "
            f"that it samples at once; steps and intervals x {steps} make up for it"
        )
    else:
        why = (
            f"verl samples {train} prompts and takes {steps} optimizer steps of {mini} prompts "
            f"(x rollout.n {n} = {mini * n} responses) on them, all but the first off-policy. Here "
            f"every step samples its own {mini} prompts: the batch of an update is the same, so "
            f"the learning rate stays. For steps of {train} prompts set rollout.prompts_per_step="
            f"{train}, divide steps and intervals by {steps}, and expect to raise the learning rate"
        )
    return Outcome("changed", why, fields)


def epochs_per_rollout(value: Any, script: Script, key: str) -> Outcome:
    if whole(value) == 1:
        return Outcome("taken over", "each rollout is trained once, exactly on-policy")
    return Outcome(
        "changed",
        f"1: every pass over a rollout after its first would be off-policy. A rollout gives 1/"
        f"{value} of the updates it gave; their batch and learning rate stay, so expect to need "
        "more train.steps",
    )


def responses(value: Any, script: Script, key: str) -> Outcome:
    if whole(value) >= 2:
        return Outcome(
            "taken over", "responses per prompt", {"rollout.samples_per_prompt": whole(value)}
        )
    return Outcome(
        "changed",
        f"{DEFAULT_GROUP}: a baseline from the group needs at least 2 responses",
        {"rollout.samples_per_prompt": DEFAULT_GROUP},
        {"rollout.samples_per_prompt": f"verl's rollout.n is {value}; say how many you want"},
    )


def _times(script: Script) -> str:
    steps = steps_per_rollout(script)
    return f"x {steps}, as verl counts in rollouts of {steps} optimizer steps" if steps > 1 else ""


def counted(script: Script, count: int, field: str) -> Outcome:
    """A number of verl's steps, as a number of ours."""
    why = _times(script)
    status = "changed" if why else "taken over"
    return Outcome(status, why, {field: count * steps_per_rollout(script)})


def total_steps(value: Any, script: Script, key: str) -> Outcome:
    if value is None or whole(value) < 1:
        return Outcome("taken over", "trainer.total_epochs decides")
    return counted(script, whole(value), "train.steps")


def _rows(script: Script) -> int | None:
    """Rows of the training files, if they are all there."""
    files = script.get("data.train_files")
    count = 0
    try:
        import pyarrow.parquet

        for file in files if isinstance(files, list) else [files]:
            path = Path(str(file).replace("~", script.home, 1))
            if not path.is_file():
                return None
            count += pyarrow.parquet.ParquetFile(path).metadata.num_rows
    except (ImportError, OSError, ValueError):
        return None
    return count


def known_steps(script: Script) -> int | None:
    """verl's number of rollouts, if it can be known."""
    if total := script.whole("trainer.total_training_steps", 0):
        return total
    rows = _rows(script)
    if rows is None:
        return None
    return rows // train_batch(script) * script.whole("trainer.total_epochs", 1) or None


def epochs(value: Any, script: Script, key: str) -> Outcome:
    if script.whole("trainer.total_training_steps", 0):
        return Outcome("taken over", "trainer.total_training_steps decides")
    count = whole(value)
    if known := known_steps(script):
        total = known * steps_per_rollout(script)
        why = f"{count} epochs of the training files, in steps of {mini_batch(script)} prompts"
        return Outcome("changed", why, {"train.steps": total})
    fill = f"{count} epochs are {count} x the rows of data.train / {mini_batch(script)} steps"
    return Outcome("changed", "steps are counted, not epochs", {}, {"train.steps": fill})


def warmup_steps(value: Any, script: Script, key: str) -> Outcome:
    if value is None or whole(value) < 0:
        return Outcome("taken over", "lr_warmup_steps_ratio decides")
    return counted(script, whole(value), "optimizer.warmup_steps")


def warmup_ratio(value: Any, script: Script, key: str) -> Outcome:
    steps = script.get(f"{OPTIM}.lr_warmup_steps")
    if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0:
        return Outcome("taken over", "lr_warmup_steps decides")
    ratio = number(value)
    if ratio == 0:
        return Outcome("taken over", "no warmup", {"optimizer.warmup_steps": 0})
    if not 0 < ratio <= 1:
        raise ValueError("must be from 0 to 1")
    if known := known_steps(script):
        return counted(script, int(ratio * known), "optimizer.warmup_steps")
    fill = {"optimizer.warmup_steps": f"{ratio} x train.steps"}
    return Outcome("changed", "warmup is counted in steps", {}, fill)


def save_every(value: Any, script: Script, key: str) -> Outcome:
    if value is None or whole(value) < 1:
        why = "no checkpoints on the way; one is written at the end"
        return Outcome("changed", why, {"checkpoint.every": 0})
    return counted(script, whole(value), "checkpoint.every")


def evaluate_every(value: Any, script: Script, key: str) -> Outcome:
    if value is None or whole(value) < 1:
        fields = {"eval.every": 0, "eval.at_end": False}
        return Outcome("taken over", "no evaluation during training", fields)
    return counted(script, whole(value), "eval.every")


def saved_contents(value: Any, script: Script, key: str) -> Outcome:
    if not isinstance(value, list) or "hf_model" not in value:
        return Outcome("changed", "a checkpoint is always whole, so that a run can be resumed")
    every = script.whole("trainer.save_freq", 0)
    why = "hf_model: a Hugging Face model with each checkpoint"
    return Outcome(
        "taken over", why, {"checkpoint.export_hf_every": every * steps_per_rollout(script)}
    )


def before_training(value: Any, script: Script, key: str) -> Outcome:
    return Outcome("taken over", "", {"eval.at_start": flag(value)})
