"""What an evaluation found: every sample in a file, and numbers with their uncertainty."""

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_opo.batch import Group
from megatron_opo.errors import RewardError
from megatron_opo.evaluation.statistics import Estimate, estimate_mean
from megatron_opo.observe.files import replace_text, to_json_line
from megatron_opo.observe.metrics import is_correct, mean_reward, pass_at, tries_of
from megatron_opo.observe.samples import finite, sample_record
from megatron_opo.observe.text import number
from megatron_opo.recipe import Recipe, RewardConfig
from megatron_opo.rewards.answers import answer_of

SUMMARY = "summary.json"
SAMPLES = "samples.jsonl"
SHOWN_REASONS = 5
SHARE = (0.0, 1.0)


def majority(group: Group, reward: RewardConfig) -> float:
    """Whether the answer that most samples give is right: 1, 0, or with a tie the mean over those
    in it. Samples without an answer do not vote; without any answer it is 0. Should samples of one
    answer be judged differently, the share of correct ones counts."""
    correct: Counter[str] = Counter()
    votes: Counter[str] = Counter()
    for sample in group.samples:
        answer = answer_of(sample, reward)
        if answer is not None:
            votes[answer] += 1
            correct[answer] += is_correct(sample)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    if not winners:
        return 0.0
    return math.fsum(correct[answer] / most for answer in winners) / len(winners)


def estimates(groups: list[Group], reward: RewardConfig) -> dict[str, Estimate]:
    """avg@k, pass@j, maj@k, response_length/mean (tokens) and response_length/clip_ratio (share cut
    at the limit) of groups of k samples. A sample that could not be scored has reward 0 and is
    wrong.

    Raises:
        RewardError: no sample at all could be scored.
    """
    samples = [sample for group in groups for sample in group.samples]
    if all(sample.reward is None for sample in samples):
        reasons = sorted({str(sample.reward_error) for sample in samples})
        raise RewardError(
            f"none of the {len(samples)} samples could be scored:\n"
            + "\n".join(reasons[:SHOWN_REASONS])
        )
    k = len(groups[0].samples)
    # Rewards of other values may leave these bounds.
    bounds = SHARE if {sample.reward or 0.0 for sample in samples} <= set(SHARE) else None
    found = {f"avg@{k}": estimate_mean([mean_reward(group) for group in groups], bounds)}
    for tries in tries_of(k):
        found[f"pass@{tries}"] = estimate_mean([pass_at(group, tries) for group in groups], SHARE)
    found[f"maj@{k}"] = estimate_mean([majority(group, reward) for group in groups], SHARE)
    found["response_length/mean"] = estimate_mean(
        [sum(sample.length for sample in group.samples) / k for group in groups]
    )
    found["response_length/clip_ratio"] = estimate_mean(
        [sum(s.finish_reason == "length" for s in group.samples) / k for group in groups], SHARE
    )
    return found


def write_samples(out: Path, groups: list[Group], reward: RewardConfig) -> None:
    """Every sample, as in a run's samples/, and the `answer` that it votes for.

    Raises:
        LogError: the file cannot be written.
    """
    lines = []
    for group in groups:
        for sample in group.samples:
            record = sample_record(0, group, sample, None)
            lines.append(to_json_line(record | {"answer": answer_of(sample, reward)}))
    replace_text(out / SAMPLES, "".join(lines))


def summarize(
    groups: list[Group], found: dict[str, Estimate], recipe: Recipe, checkpoint: Path
) -> dict[str, Any]:
    """JSON-like: everything about the evaluation but its samples."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        "checkpoint": str(checkpoint),
        "name": recipe.name,
        "prompts": len(groups),
        "samples_per_prompt": recipe.eval.samples_per_prompt,
        "unscorable": sum(sample.reward is None for sample in samples),
        "metrics": {
            name: {key: finite(v) if key != "interval" else v for key, v in asdict(each).items()}
            for name, each in found.items()
        },
        "settings": {
            "seed": recipe.seed,
            "eval.temperature": recipe.eval.temperature,
            "eval.top_p": recipe.eval.top_p,
            "rollout.max_response_tokens": recipe.rollout.max_response_tokens,
            "rollout.stop_token_ids": list(recipe.rollout.stop_token_ids),
            "rollout.function": recipe.rollout.function,
            "reward.function": recipe.reward.function,
            "reward.kwargs": recipe.to_show()["reward"]["kwargs"],
        },
    }


def short_result(summary: dict[str, Any]) -> str:
    """In a line: "avg@4 0.373, pass@4 0.836"."""
    metrics = summary["metrics"].items()
    return ", ".join(f"{name} {number(metric['value'])}" for name, metric in metrics if "@" in name)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """For the terminal: label and value."""
    rows = []
    for name, metric in summary["metrics"].items():
        value = number(metric["value"])
        if metric["interval"] is None:
            rows.append((name, f"{value:>8}"))
        else:
            span = f"{number(metric['low'])} to {number(metric['high'])}"
            rows.append((name, f"{value:>8}  95 %: {span} ({metric['interval']})"))
    count, prompts = summary["samples_per_prompt"], summary["prompts"]
    rows.append(("samples", f"{prompts * count:>8,}  {prompts:,} prompts x {count}"))
    if unscorable := summary["unscorable"]:
        rows.append(
            ("unscorable", f"{unscorable:>8,}  counted as wrong; {SAMPLES} says why of each")
        )
    return rows
