"""Short runs of the real trainer on a tiny model, and what their logs say about each step."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from process_tree import Usage, Watch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from versus_task import PROMPT_WORDS, WORDS, word, write_prompts

HERE = Path(__file__).resolve().parent
WARM_UP = 2  # steps that do not count


@dataclass(frozen=True)
class Step:
    """`seconds` from the end of the step before to its own; `phases` are parts of them."""

    seconds: float
    phases: dict[str, float]
    length: float
    reward: float
    grad_norm: float


def make_task(directory: Path) -> int:
    """A model (`model`) and prompts (`prompts.jsonl`); the number of parameters."""
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", *map(word, range(WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.05,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # Words point one way along the first channel, padding and end the other: neither of these
        # is ever sampled, and all responses have the same length.
        rows = model.model.embed_tokens.weight
        rows[:2] = rows[2:4]
        rows[:, 0] = 3.0
        rows[:2, 0] = -3.0
    model.save_pretrained(directory / "model")
    write_prompts(directory / "prompts.jsonl")
    return sum(each.numel() for each in model.parameters())


def write_recipe(
    path: Path, task: Path, *, prompts: int, samples: int, length: int, steps: int, lr: float
) -> None:
    """Of a run in the directory `run` beside `path`."""
    recipe = {
        "name": "benchmark",
        "run_dir": str(path.parent / "run"),
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {
            "apply_chat_template": False,
            "max_prompt_tokens": PROMPT_WORDS,
            "train": {"files": [str(task / "prompts.jsonl")]},
        },
        "reward": {"function": f"{HERE / 'versus_task.py'}:compute_score"},
        "rollout": {
            "prompts_per_step": prompts,
            "samples_per_prompt": samples,
            "max_response_tokens": length,
        },
        "algorithm": {"estimator": "dr_grpo", "loss_aggregation": "token-mean"},
        "optimizer": {"lr": lr, "betas": [0.9, 0.999]},
        "train": {"steps": steps},
        "checkpoint": {"export_hf": False},
    }
    path.write_text(yaml.safe_dump(recipe))


def train(recipe: Path, overrides: Sequence[str], threads: int | None = None) -> Usage:
    """Run it as a user does."""
    command = [sys.executable, "-m", "megatron_opo", "train", str(recipe), *overrides]
    return run_watched(command, recipe.parent / "run" / "metrics.jsonl", threads)


def run_watched(command: list[str], lines_of: Path, threads: int | None) -> Usage:
    """Run a command whose steps are lines of a file.

    Args:
        threads: OMP_NUM_THREADS; None leaves the choice to the command.

    Raises:
        SystemExit: it fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    log = lines_of.parent.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            with Watch(process.pid, lines_of) as usage:
                code = process.wait()
        finally:
            process.terminate()
            process.wait()
    if code:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-4000:]}")
    return usage


def read_metrics(run: Path) -> list[Step]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    start = records[0]["elapsed_s"] - records[0]["timing_s/step"]
    ends = [start, *(record["elapsed_s"] for record in records)]
    return [
        Step(
            end - before,
            _phases(record),
            record["response_length/mean"],
            record["critic/rewards/mean"],
            record["actor/grad_norm"],
        )
        for record, (before, end) in zip(records, pairwise(ends), strict=True)
    ]


def _phases(record: dict[str, Any]) -> dict[str, float]:
    names = {name: name.removeprefix("timing_s/") for name in record if name[:9] == "timing_s/"}
    return {
        short: record[name]
        for name, short in names.items()
        if "/" not in short and short not in ("step", "start", "unaccounted")
    }


def median_seconds(steps: Iterable[Step]) -> float:
    return statistics.median(step.seconds for step in steps)


def median_phases(steps: Sequence[Step]) -> dict[str, float]:
    """Of each phase; `rest` is what they leave of `median_seconds`."""
    names = dict.fromkeys(name for step in steps for name in step.phases)
    found = {
        name: statistics.median(step.phases.get(name, 0.0) for step in steps) for name in names
    }
    return found | {"rest": median_seconds(steps) - sum(found.values())}
