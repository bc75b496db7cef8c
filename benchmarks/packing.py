"""An update on responses of unequal lengths: packed, against padded to the longest.

    python benchmarks/packing.py [--quick] [--responses 256] [--rounds 3] [--out table.md]

One rank trains a 1M-parameter model (random weights) on a rollout whose responses are as long as
those of a model that reasons: log-normal, the median a quarter of the longest allowed. "Padded" is
the same rollout with every sequence filled up to the longest one, by tokens that are computed and
not scored: both give the same loss, which is checked, and the same scored tokens. Micro-batches
have the same number of tokens. In turns; the first round does not count, of the others the best
does. The bar: per token computed, packed takes at most 1.15 times as long as padded, so that what
is not computed is won. Exits with 1 when it is missed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from training_runs import make_task, write_recipe
from update import open_actor
from versus_task import PROMPT_WORDS

from megatron_opo.actor.parallel import initialize
from megatron_opo.actor.step import Actor
from megatron_opo.advantages import group_advantages_
from megatron_opo.batch import Group, PackedBatch, Prompt, Sample, pack
from megatron_opo.recipe_file import load_recipe

GROUP = 8
MICRO_BATCH = 8192
BAR = 1.15
PACKED, PADDED = "packed", "padded to the longest"


def response_lengths(count: int, longest: int) -> list[int]:
    draw = np.random.default_rng(0).lognormal(np.log(longest / 4), 0.8, count)
    return [int(each) for each in np.clip(draw, 1, longest)]


def make_rollout(lengths: list[int], vocabulary: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())

    groups = []
    for k in range(0, len(lengths), GROUP):
        samples = tuple(
            Sample(str(k), i, ids(n), (-1.0,) * n, (0,) * n, "stop", "", reward=float(i % 2))
            for i, n in enumerate(lengths[k : k + GROUP])
        )
        groups.append(Group(Prompt(str(k), ids(PROMPT_WORDS), "", "random", None), samples))
    batch = pack(groups)
    group_advantages_(batch)
    return batch


def padded(batch: PackedBatch) -> PackedBatch:
    """Every sequence as long as the longest; what is added is not scored."""
    lengths = batch.sequence_lengths
    longest = int(lengths.max())
    real = (torch.arange(longest) < lengths[:, None]).flatten()

    def spread(flat: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(real), dtype=flat.dtype).masked_scatter(real, flat)

    names = ("tokens", "loss_mask", "advantages", "rollout_logprobs")
    return replace(
        batch,
        **{name: spread(getattr(batch, name)) for name in names},
        cu_seqlens=torch.arange(len(lengths) + 1, dtype=batch.cu_seqlens.dtype) * longest,
    )


def measure(
    actor: Actor, batches: dict[str, PackedBatch], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every round after one that does not count, and the loss of that one.

    The learning rate is zero: all updates are of the same weights.
    """
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    norms = {}
    for turn in range(1 + rounds):
        for name, batch in batches.items():
            start = time.perf_counter()
            metrics = actor.update(batch, actor.version)
            if turn:
                seconds[name].append(time.perf_counter() - start)
            norms[name] = metrics["actor/grad_norm"]
    return seconds, norms


def check_equal(norms: dict[str, float]) -> None:
    """Both are the same update.

    Raises:
        SystemExit: their gradients differ by more than rounding.
    """
    if abs(norms[PADDED] / norms[PACKED] - 1) > 1e-4:
        raise SystemExit(f"the gradient's norm depends on padding: {norms}")


def table(batches: dict[str, PackedBatch], seconds: dict[str, list[float]]) -> tuple[str, bool]:
    best = {name: min(values) for name, values in seconds.items()}
    tokens = {name: batch.tokens.numel() for name, batch in batches.items()}
    lines = [
        "| what | tokens computed | of them scored | best s | us a token | all rounds, s |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, batch in batches.items():
        rounds = ", ".join(f"{each:.2f}" for each in seconds[name])
        lines.append(
            f"| {name} | {tokens[name]:,} | {int(batch.loss_mask.sum()) / tokens[name]:.0%} "
            f"| {best[name]:.2f} | {best[name] / tokens[name] * 1e6:.1f} | {rounds} |"
        )
    per_token = best[PACKED] / tokens[PACKED] / (best[PADDED] / tokens[PADDED])
    lines += [
        "",
        f"Padded computes {tokens[PADDED] / tokens[PACKED]:.2f} times the tokens and takes "
        f"{best[PADDED] / best[PACKED]:.2f} times as long.",
        f"Bar: per token packed takes at most {BAR} times as long: {per_token:.2f}, "
        f"{'met' if per_token <= BAR else 'MISSED'}.",
    ]
    return "\n".join(lines), per_token <= BAR


def main() -> int:
    parser = argparse.ArgumentParser(description="Updates of packed and of padded rollouts.")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="32 responses of up to 128 tokens")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if options.quick:
        options.responses, options.longest, options.rounds = 32, 128, 2
    with tempfile.TemporaryDirectory(prefix="packing-") as name:
        task = Path(name)
        size = make_task(task)
        path = task / "recipe.yaml"
        write_recipe(
            path, task, prompts=1, samples=GROUP, length=options.longest, steps=1000, lr=0.0
        )
        changes = ["max_logprob_gap=1000", "mean_logprob_gap=1000"]
        overrides = [f"algorithm.{change}" for change in changes]
        recipe = load_recipe(path, [*overrides, f"actor.micro_batch_tokens={MICRO_BATCH}"])
        config = json.loads((task / "model" / "config.json").read_text())
        actor = open_actor(recipe, config, initialize(recipe.actor, seed=0))
        lengths = response_lengths(options.responses, options.longest)
        batch = make_rollout(lengths, config["vocab_size"])
        batches = {PACKED: batch, PADDED: padded(batch)}
        seconds, norms = measure(actor, batches, options.rounds)
    check_equal(norms)
    result, met = table(batches, seconds)
    quartiles = ", ".join(f"{q:.0f}" for q in np.percentile(lengths, [25, 50, 75, 100]))
    text = (
        f"A Qwen3 of {size:,} parameters, float32; {options.responses} responses, quartiles of "
        f"their lengths {quartiles}; micro-batches of {MICRO_BATCH:,} tokens.\n"
        f"Cores: {len(os.sched_getaffinity(0))}, threads of torch: {torch.get_num_threads()}; "
        f"torch {torch.__version__}.\n\n"
        f"    python benchmarks/packing.py --responses {options.responses} --longest "
        f"{options.longest} --rounds {options.rounds}\n\n{result}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
