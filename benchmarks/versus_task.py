"""The task of versus_trl.py, the same for both sides: prompts, and a reward of a response."""

import json
import random
from pathlib import Path

WORDS = 2046  # with the padding and the end token a vocabulary of 2,048
PROMPT_WORDS = 16
PROMPTS = 4096


def word(number: int) -> str:
    return f"w{number}"


def score(text: str) -> float:
    """Share of even numbers among the words of a response."""
    words = text.split()
    return sum(int(each[1:]) % 2 == 0 for each in words) / max(1, len(words))


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """The reward as a recipe names it."""
    return score(solution_str)


def write_prompts(path: Path) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(PROMPTS):
            numbers = [draw.randrange(WORDS) for _ in range(PROMPT_WORDS)]
            row = {"prompt": " ".join(map(word, numbers)), "answer": ""}
            file.write(json.dumps(row) + "\n")
