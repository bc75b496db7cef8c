"""Which responses of a step are kept, and how they look in samples/*.jsonl."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_opo.batch import Group, Sample
from megatron_opo.observe.files import read_json_lines, replace_text, to_json_line

Kind = Literal["train", "eval"]


def choose_groups(groups: list[Group], limit: int, kind: Kind) -> list[int]:
    """Indices of the groups to keep: whole ones, together at most `limit` samples.

    A group's members can only be judged against each other, so none is cut; one group is kept
    even when it is larger than `limit` (unless that is 0). Of a training step: the group whose
    rewards differ most, the worst and the best, the next of each, and so on. Of an evaluation:
    the first ones, so that the same prompts can be followed through the run.
    """
    if limit == 0:
        return []
    order = list(range(len(groups))) if kind == "eval" else _most_telling_first(groups)
    chosen, total = [], 0
    for index in order:
        size = len(groups[index].samples)
        if not chosen or total + size <= limit:
            chosen.append(index)
            total += size
    return chosen


def _most_telling_first(groups: list[Group]) -> list[int]:
    means, spreads = [], []
    for group in groups:
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else -math.inf
        means.append(mean)
        spreads.append(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards)))
    indices = range(len(groups))
    rankings = (
        sorted(indices, key=lambda i: -spreads[i]),
        sorted(indices, key=lambda i: means[i]),
        sorted(indices, key=lambda i: -means[i]),
    )
    # A dict keeps the first place of each index.
    return list(dict.fromkeys(index for triple in zip(*rankings, strict=True) for index in triple))


def sample_record(
    step: int, group: Group, sample: Sample, advantage: float | None
) -> dict[str, Any]:
    """One line of a samples file. `logprob` is the sum over the response's tokens, in nats."""
    return {
        "step": step,
        "group_id": sample.group_id,
        "index": sample.index,
        "prompt": group.prompt.text,
        "response": sample.text,
        "ground_truth": group.prompt.ground_truth,
        "reward": finite(sample.reward),
        "advantage": finite(advantage),
        "length": sample.length,
        "finish_reason": sample.finish_reason,
        "logprob": finite(sum(sample.logprobs)),
        "reward_error": sample.reward_error,
    }


def finite(value: float | None) -> float | None:
    """The value as JSON can hold it: NaN and infinities become None."""
    return None if value is None or not math.isfinite(value) else float(value)


def samples_path(run_path: Path, step: int, kind: Kind) -> Path:
    prefix = "eval_step" if kind == "eval" else "step"
    return run_path / "samples" / f"{prefix}_{step:06d}.jsonl"


def write_samples(
    run_path: Path,
    step: int,
    groups: list[Group],
    advantages: Sequence[Sequence[float | None]] | None,
    kind: Kind,
    limit: int,
) -> Path | None:
    """Keep the telling groups of a step; None when `limit` is 0.

    `advantages` runs parallel to the groups and their samples; None (or NaN) stands for a sample
    that does not train.
    """
    lines = []
    for index in choose_groups(groups, limit, kind):
        group = groups[index]
        values = advantages[index] if advantages is not None else [None] * len(group.samples)
        for sample, advantage in zip(group.samples, values, strict=True):
            lines.append(to_json_line(sample_record(step, group, sample, advantage)))
    if not lines:
        return None
    path = samples_path(run_path, step, kind)
    replace_text(path, "".join(lines))
    return path


def list_samples(run_path: Path, kind: Kind) -> list[tuple[int, Path]]:
    """(step, file) of every samples file of that kind, in the order of steps."""
    prefix = "eval_step_" if kind == "eval" else "step_"
    found = []
    for path in (run_path / "samples").glob(f"{prefix}*.jsonl"):
        digits = path.stem.removeprefix(prefix)
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def read_samples(path: Path) -> list[list[dict[str, Any]]]:
    """The groups of a samples file, each a list of its records."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in read_json_lines(path):
        groups.setdefault(str(record.get("group_id")), []).append(record)
    return list(groups.values())
