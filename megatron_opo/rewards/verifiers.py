"""The built-in verifiers, each with verl's signature: 1.0 is right, 0.0 is wrong.

A verifier raises only where the sample cannot be judged (say, an unusable ground truth); a
malformed response is a wrong answer.
"""

import difflib
import re
import threading
from fractions import Fraction
from typing import Any

from megatron_opo import procedural
from megatron_opo.errors import RewardError
from megatron_opo.user_code import LoadError, resolve

NUMBER = re.compile(
    r"""(?:(?<![\d)\]}])[+-])?                # a sign, unless it subtracts: 12-5 ends in 5
        (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)
        (?:[eE][+-]?\d{1,3}(?!\d|\.\d))?
        (?:\s*/\s*\d+(?!\d|\.\d))?           # a fraction""",
    re.VERBOSE,
)
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{\s*([+-]?\d+)\s*\}\{\s*(\d+)\s*\}")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_match(pattern: re.Pattern[str] | str, text: str) -> str | None:
    """Group 1 (the whole match, without groups) of the last match, stripped."""
    match = None
    for match in re.finditer(pattern, text):  # noqa: B007
        pass
    if match is None:
        return None
    return ((match[1] if match.re.groups else match[0]) or "").strip()


def exact(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    extract: str | None = None,
) -> float:
    """Equal text, surrounding space aside. With the regular expression `extract`, the last match
    in the response (its group 1, if it has one) is compared, and none at all is wrong."""
    if isinstance(ground_truth, list | dict) or ground_truth is None:
        raise ValueError(f"the ground truth of `exact` must be text, got {ground_truth!r}")
    answer = solution_str.strip() if extract is None else last_match(extract, solution_str)
    return float(answer == str(ground_truth).strip())


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly: "so 1,234.5" -> 2469/2, "-3/4" -> -3/4.

    None without a number, and for one that is no finite value (1/0, thousands of digits).
    """
    text = text.replace("\u2212", "-").replace("{,}", ",")
    text = LATEX_FRACTION.sub(r"\1/\2", text)
    found = last_match(NUMBER, text)
    if found is None:
        return None
    numerator, _, denominator = found.replace(",", "").partition("/")
    try:
        return Fraction(numerator.strip()) / Fraction(denominator.strip() or 1)
    except (ValueError, ZeroDivisionError):
        return None


def numeric(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """The last number of the response equals the last number of the ground truth, exactly."""
    expected = last_number(str(ground_truth))
    if expected is None:
        raise ValueError(f"the ground truth of `numeric` has no number: {ground_truth!r}")
    return float(last_number(solution_str) == expected)


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Mathematically equal to the ground truth, by math-verify. Its time limits are alarm
    signals: what exceeds them raises its TimeoutException, and the sample cannot be judged."""
    from math_verify import parse, verify

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify's time limits work in the main thread of a process only")
    gold_text = str(ground_truth)
    if "$" not in gold_text and "\\boxed" not in gold_text:
        gold_text = f"\\boxed{{{gold_text}}}"
    gold = parse(gold_text, raise_on_error=True)
    if not gold:
        raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")
    try:
        answer = parse(solution_str, raise_on_error=True)
        return float(verify(gold, answer, raise_on_error=True))
    except Exception:  # what neither parses nor compares is no right answer
        return 0.0


def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    extract: str | None = None,
) -> float | dict[str, Any]:
    """The score of the task that made the question, 0 to 1, for what the last <answer> tag of the
    response holds, or for the whole response without one. With the regular expression `extract`,
    its last match is scored, and none at all is no answer."""
    if not {"task", "seed", "size", "config", "index"} <= set(extra_info):
        raise ValueError(
            "reward.function `reasoning_gym` scores only questions of a procedural dataset "
            f"(data.train.procedural), this one is of {data_source!r}"
        )
    if extract is not None:
        answer = last_match(extract, solution_str)
    else:
        tagged = last_match(ANSWER_TAG, solution_str)
        answer = solution_str.strip() if tagged is None else tagged
    dataset, entry = procedural.rebuild(extra_info, ground_truth)
    try:
        return dataset.score_answer(answer, entry)
    except Exception as error:  # a few scorers raise on an answer that is not of their format
        return {"score": 0.0, "scorer_error": f"{type(error).__name__}: {error}"}


BUILTIN = {f.__name__: f for f in (exact, numeric, math, reasoning_gym)}


def resolve_function(function: str) -> str:
    """A built-in's name as it is, a file's path made absolute.

    Raises:
        RewardError: no such built-in or file.
    """
    if ":" not in function:
        if function in BUILTIN:
            return function
        near = difflib.get_close_matches(function, BUILTIN, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        raise RewardError(
            f"reward.function: no verifier is called `{function}`; {hint}allowed: "
            f"{', '.join(BUILTIN)}, or path/to/file.py:function"
        )
    try:
        return resolve(function)
    except LoadError as error:
        raise RewardError(f"reward.function: {error}") from None
