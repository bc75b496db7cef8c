"""Procedural questions from reasoning-gym, the same in every run and on every machine.

Some of its tasks (word_ladder, knight_swap and others) iterate over sets of strings, so the same
seed gives other questions under another hash seed of Python. Questions are therefore generated,
and rebuilt for scoring, only in child processes whose hash seed is fixed.
"""

import difflib
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_opo.errors import RecipeError
from megatron_opo.redaction import API_KEY_VARIABLE


def child_environment() -> dict[str, str]:
    """Environment in which a child imports this package and generates the same questions."""
    package_parent = str(Path(__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([package_parent, inherited] if inherited else [package_parent])
    # Code of the user's has no business with the servers.
    environment = {k: v for k, v in os.environ.items() if k != API_KEY_VARIABLE}
    return {**environment, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def generate(
    task: str, size: int, seed: int, config: dict[str, Any], field: str = "procedural"
) -> list[tuple[str, str | None]]:
    """`size` pairs of question and answer; the answer is None where only the scorer can judge.

    Example: generate("chain_sum", 2, 0, {"max_digits": 1}) ->
    [("State the final answer ...: 4 + 3 =", "7"), ("State ...: 2 - 5 =", "-3")].

    Raises:
        RecipeError: an unknown task, or options that the task refuses; `field` is named in it.
    """
    try:
        request = json.dumps({"task": task, "size": size, "seed": seed, "config": config})
    except TypeError as error:
        raise RecipeError(f"{field}.config: must be JSON-like data: {error}") from None
    child = subprocess.run(
        [sys.executable, "-P", "-m", "megatron_opo.procedural"],
        input=request.encode(),
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    if child.returncode:
        raise RecipeError(
            f"{field}: generating {size} questions of `{task}` ended with exit code "
            f"{child.returncode}; the reason stands above"
        )
    reply = json.loads(child.stdout)
    if "error" in reply:
        raise RecipeError(f"{field}{reply['error']}")
    return [(question, answer) for question, answer in reply["pairs"]]


@lru_cache(maxsize=16)
def _dataset(task: str, size: int, seed: int, config_json: str):
    import reasoning_gym

    config = json.loads(config_json)
    return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)


@lru_cache(maxsize=4096)
def _entry(task: str, size: int, seed: int, config_json: str, index: int) -> dict[str, Any]:
    return _dataset(task, size, seed, config_json)[index]


def rebuild(extra_info: dict[str, Any], ground_truth: str | None) -> tuple[Any, dict[str, Any]]:
    """The reasoning-gym dataset and entry of the question that `extra_info` describes.

    It is generated anew, since scorers rely on tuples and integer keys, which an entry kept as
    JSON would lose. To be called in a child with `child_environment`.

    Raises:
        ValueError: the question generated now is not the one that was asked.
    """
    config_json = json.dumps(extra_info["config"], sort_keys=True)
    key = (extra_info["task"], extra_info["size"], extra_info["seed"], config_json)
    entry = _entry(*key, extra_info["index"])
    if entry["answer"] != ground_truth:
        raise ValueError(
            f"question {extra_info['index']} of {key[0]} has the answer {entry['answer']!r} here, "
            f"but {ground_truth!r} in the dataset: was it made by another reasoning-gym version?"
        )
    return _dataset(*key), entry


def _reply_to(request: dict[str, Any]) -> dict[str, Any]:
    from reasoning_gym.factory import DATASETS

    task, size, config = request["task"], request["size"], request["config"]
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.5)
        allowed = close or sorted(DATASETS)
        return {
            "error": f".task: reasoning-gym has no task `{task}`; "
            f"{'nearest' if close else 'it has'}: {', '.join(allowed)}"
        }
    reserved = sorted({"size", "seed"} & set(config))
    if reserved:
        return {"error": f".config: {', '.join(reserved)} must be given beside `config`, not in it"}
    dataset = None
    try:
        dataset = _dataset(task, size, request["seed"], json.dumps(config, sort_keys=True))
        return {"pairs": [(entry["question"], entry["answer"]) for entry in dataset]}
    except Exception as error:
        # Tasks check their options with bare asserts and type errors, some of them lazily.
        if dataset is None:
            fields = ", ".join(
                sorted(set(DATASETS[task][1].__dataclass_fields__) - {"size", "seed"})
            )
            allowed = f"; options of {task}: {fields}"
        else:
            allowed = " while a question was generated"
        return {"error": f".config: {config}: {type(error).__name__}: {error}{allowed}"}


def main() -> None:
    reply_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints must not end up in the reply
    json.dump(_reply_to(json.load(sys.stdin)), reply_file)
    reply_file.close()


if __name__ == "__main__":
    main()
