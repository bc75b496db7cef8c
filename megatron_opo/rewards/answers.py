"""What a response answers, apart from how it says so: for a vote of several responses."""

import re
from typing import Any

from megatron_opo.batch import Sample
from megatron_opo.recipe import RewardConfig
from megatron_opo.rewards.verifiers import (
    ANSWER_TAG,
    LATEX_FRACTION,
    NUMBER,
    last_match,
    last_number,
)

# The key under which verl's reward functions return what they have compared.
OWN_ANSWER = "pred"
BOXED = re.compile(r"\\boxed\s*\{")


def answer_of(sample: Sample, reward: RewardConfig) -> str | None:
    """The answer of a scored sample; None when it has none, or could not be scored.

    What the reward function itself has compared, where that is known: `pred` of the dict that it
    returned, else what `exact`, `numeric` and `reasoning_gym` extract. Of other functions, `math`
    among them: what the last \\boxed{} holds, else the last number, else the last line. Numbers are
    equal by value.
    """
    if sample.reward is None:
        return None
    if OWN_ANSWER in sample.reward_info:
        return _own(sample.reward_info[OWN_ANSWER])
    text = sample.text
    match reward.function:
        case "exact" | "reasoning_gym" if (extract := reward.kwargs.get("extract")) is not None:
            return last_match(extract, text)
        case "reasoning_gym":
            tagged = last_match(ANSWER_TAG, text)
            return text.strip() if tagged is None else tagged
        case "exact":
            return text.strip()
        case "numeric":
            return _last_number(text)
        case _:
            return _found(text)


def _own(value: Any) -> str | None:
    return None if value is None else str(value).strip()


def _last_number(text: str) -> str | None:
    number = last_number(text)
    return None if number is None else str(number)


def _found(text: str) -> str | None:
    boxed = _last_boxed(text)
    if boxed is not None:
        return _as_number(boxed) or "".join(boxed.split())
    lines = text.strip().splitlines()
    return _last_number(text) or (lines[-1].strip() if lines else None)


def _as_number(text: str) -> str | None:
    """The value of a text that is a number and nothing else."""
    text = text.strip().strip("$")
    is_number = NUMBER.fullmatch(text) or LATEX_FRACTION.fullmatch(text)
    return _last_number(text) if is_number else None


def _last_boxed(text: str) -> str | None:
    start = None
    for found in BOXED.finditer(text):
        start = found.end()
    if start is None:
        return None
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None
