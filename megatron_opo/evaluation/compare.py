"""Two evaluations of the same prompts, prompt by prompt."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_opo.errors import LogError
from megatron_opo.evaluation.statistics import estimate_mean, sign_test
from megatron_opo.evaluation.summary import SAMPLES, SUMMARY
from megatron_opo.observe.files import read_json_lines
from megatron_opo.observe.text import number

SHOWN_PROMPTS = 10
SHOWN_CHARS = 60


@dataclass(frozen=True)
class Evaluation:
    """What a directory holds: `means` is each prompt's mean reward, by (id, text, right
    answer as JSON)."""

    directory: Path
    summary: Mapping[str, Any]
    means: Mapping[tuple[str, str, str], float]

    @property
    def samples_per_prompt(self) -> int:
        return self.summary["samples_per_prompt"]


def read_evaluation(directory: Path) -> Evaluation:
    """
    Raises:
        LogError: it holds no complete evaluation.
    """
    path = directory / SUMMARY
    try:
        summary = json.loads(path.read_text())
        k, prompts = int(summary["samples_per_prompt"]), int(summary["prompts"])
        dict(summary["settings"])
    except FileNotFoundError:
        raise LogError(
            f"{directory} holds no evaluation: it has no {SUMMARY}; give a directory that "
            "`megatron-opo eval` has written (its --out)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LogError(
            f"{path} cannot be used ({type(error).__name__}: {error}); evaluate again"
        ) from None
    rewards: dict[tuple[str, str, str], list[float]] = {}
    for record in read_json_lines(directory / SAMPLES):
        try:
            key = record["group_id"], record["prompt"], json.dumps(record["ground_truth"])
            rewards.setdefault(key, []).append(float(record["reward"] or 0.0))
        except (KeyError, TypeError, ValueError) as error:
            raise LogError(
                f"{directory / SAMPLES} holds a line that is no sample ({error!r}); evaluate again"
            ) from None
    if len(rewards) != prompts or any(len(each) != k for each in rewards.values()):
        raise LogError(
            f"{directory / SAMPLES} holds {sum(map(len, rewards.values())):,} samples of "
            f"{len(rewards):,} prompts, {SUMMARY} says {prompts:,} prompts x {k}: the file is not "
            "whole; evaluate again"
        )
    # fsum, so that the same rewards in another order are no change.
    means = {key: math.fsum(each) / k for key, each in rewards.items()}
    return Evaluation(directory, summary, means)


def compare(a: Evaluation, b: Evaluation) -> dict[str, Any]:
    """JSON-like: B against A. `wins` are prompts whose mean reward is higher in B.

    Raises:
        LogError: they have other prompts, or another number of samples.
    """
    _check_alike(a, b)
    differences = {key: b.means[key] - mean for key, mean in a.means.items()}
    wins = sum(each > 0 for each in differences.values())
    losses = sum(each < 0 for each in differences.values())
    changed = sorted(
        (key for key, each in differences.items() if each),
        key=lambda key: -abs(differences[key]),
    )
    k, settings = a.samples_per_prompt, [x.summary["settings"] for x in (a, b)]
    return {
        "a": _side(a),
        "b": _side(b),
        "prompts": len(differences),
        "samples_per_prompt": k,
        "difference": asdict(estimate_mean(list(differences.values()))),
        "wins": wins,
        "losses": losses,
        "ties": len(differences) - wins - losses,
        "sign_test_p": sign_test(wins, losses),
        "settings_that_differ": {
            name: [each.get(name) for each in settings]
            for name in sorted({*settings[0], *settings[1]})
            if settings[0].get(name) != settings[1].get(name)
        },
        "changed_most": [
            {"group_id": key[0], "prompt": key[1], "a": a.means[key], "b": b.means[key]}
            for key in changed[:SHOWN_PROMPTS]
        ],
    }


def _side(one: Evaluation) -> dict[str, Any]:
    return {
        "directory": str(one.directory),
        "checkpoint": one.summary.get("checkpoint"),
        "avg": math.fsum(one.means.values()) / len(one.means),
    }


def _check_alike(a: Evaluation, b: Evaluation) -> None:
    both = f"{a.directory} and {b.directory} cannot be compared"
    if a.samples_per_prompt != b.samples_per_prompt:
        raise LogError(
            f"{both}: they have {a.samples_per_prompt} and {b.samples_per_prompt} samples of each "
            "prompt; evaluate one of them again with the other's --samples"
        )
    if a.means.keys() != b.means.keys():
        only_a, only_b = a.means.keys() - b.means.keys(), b.means.keys() - a.means.keys()
        example = min(only_a or only_b)
        raise LogError(
            f"{both}: {len(a.means.keys() & b.means.keys()):,} prompts are in both, "
            f"{len(only_a):,} only in the first and {len(only_b):,} only in the second (row "
            f"{example[0]}: {_short(example[1])}); evaluate both on the same data.eval, rendered "
            "alike (chat template, system prompt)"
        )


def _short(text: str) -> str:
    line = " ".join(text.split())
    line = line if len(line) <= SHOWN_CHARS else "..." + line[-SHOWN_CHARS:]
    return ascii(line)[1:-1]


def comparison_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """For the terminal: label and value."""
    k, difference = found["samples_per_prompt"], found["difference"]
    shown = f"{difference['value']:+.4f}"
    if difference["interval"] is not None:
        shown += f"  95 %: {difference['low']:+.4f} to {difference['high']:+.4f} (paired bootstrap)"
    rows = [
        (name.upper(), f"{found[name]['directory']}: avg@{k} {number(found[name]['avg'])}")
        for name in ("a", "b")
    ]
    rows += [
        ("B - A", shown),
        (
            "prompts",
            f"{found['wins']:,} better in B, {found['losses']:,} worse, {found['ties']:,} the same "
            f"(sign test: p = {found['sign_test_p']:.2g})",
        ),
    ]
    for name, (first, second) in found["settings_that_differ"].items():
        rows.append(("differs", f"{name}: {first!r} in A, {second!r} in B"))
    for each in found["changed_most"]:
        change = f"{number(each['a'])} -> {number(each['b'])}"
        rows.append((f"row {each['group_id']}", f"{change:<16}  {_short(each['prompt'])}"))
    return rows
