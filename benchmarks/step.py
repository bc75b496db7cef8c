"""Where the time of a step goes, and how it grows with batch, response length and ranks.

    python benchmarks/step.py [--quick] [--steps 6] [--rounds 2] [--out table.md]

`megatron-opo train` on a 1M-parameter model (random weights, float32) and a real SGLang server,
which all runs share; every response has exactly the given length. Each row changes one thing of the
first: more prompts, longer responses, or two ranks instead of one. In turns, in one run; the first
steps of each do not count. Phases are the medians that the run's own metrics.jsonl says; `rest` is
what they leave. There is no bar: the rows are to be compared.
"""

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from training_runs import (
    WARM_UP,
    Step,
    make_task,
    median_phases,
    median_seconds,
    read_metrics,
    train,
    write_recipe,
)
from versus_task import PROMPT_WORDS

from megatron_opo.recipe import ModelConfig, RolloutConfig
from megatron_opo.redaction import API_KEY_VARIABLE
from megatron_opo.rollout import launch_servers, wait_healthy

SAMPLES = 8


@dataclass(frozen=True)
class Case:
    name: str
    prompts: int = 32
    length: int = 32
    overrides: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.prompts * SAMPLES * (PROMPT_WORDS + self.length)


CASES = [
    Case("32 prompts x 8 samples, 32 tokens, 1 rank"),
    Case("8 prompts", prompts=8),
    Case("128 prompts", prompts=128),
    Case("128 tokens", length=128),
    Case("TP 2", overrides=("actor.tensor_parallel=2",)),
    Case("DP 2", overrides=("actor.data_parallel=2",)),
    Case("CP 2", overrides=("actor.context_parallel=2",)),
]
QUICK = [Case("4 prompts x 8 samples, 8 tokens, 1 rank", 4, 8), Case("16 tokens", 4, 16)]


@contextmanager
def shared_server(task: Path) -> Iterator[str]:
    """The URL of a server that several runs use one after the other."""
    os.environ.setdefault(API_KEY_VARIABLE, secrets.token_hex(32))
    config = RolloutConfig()
    model = ModelConfig(path=str(task / "model"), dtype="float32")
    (server,) = launch_servers(config, model, task / "logs", "cpu")
    with closing(server):
        wait_healthy([server], config.start_timeout_s)
        # As a run does with servers of its own: each sync would search it all for garbage.
        request = Request(server.url + "/freeze_gc", b"{}", server.headers, method="POST")
        urlopen(request).close()
        yield server.url


def run(case: Case, task: Path, url: str, steps: int) -> list[Step]:
    with tempfile.TemporaryDirectory(prefix="step-run-") as directory:
        path = Path(directory) / "recipe.yaml"
        write_recipe(
            path,
            task,
            prompts=case.prompts,
            samples=SAMPLES,
            length=case.length,
            steps=steps,
            lr=1e-3,
        )
        train(path, [f"rollout.urls=[{url}]", *case.overrides])
        return read_metrics(path.parent / "run")[WARM_UP:]


def table(found: dict[Case, list[Step]]) -> str:
    phases = {case: median_phases(steps) for case, steps in found.items()}
    names = list(dict.fromkeys(name for each in phases.values() for name in each))
    names = [n for n in names if any(abs(each.get(n, 0.0)) >= 0.005 for each in phases.values())]
    lines = [
        f"| what | tokens a step | s a step | tokens/s | {' | '.join(f'{n}, s' for n in names)} |",
        f"|---|{'--:|' * (3 + len(names))}",
    ]
    for case, steps in found.items():
        seconds = median_seconds(steps)
        shown = " | ".join(f"{phases[case].get(name, 0.0):.2f}" for name in names)
        lines.append(
            f"| {case.name} | {case.tokens:,} | {seconds:.2f} | {case.tokens / seconds:,.0f} "
            f"| {shown} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Phases and tokens/s of whole steps.")
    parser.add_argument("--steps", type=int, default=6, help=f"{WARM_UP} of them do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two tiny cases, 3 steps, 1 round")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    cases = CASES
    if options.quick:
        cases, options.steps, options.rounds = QUICK, 3, 1
    found: dict[Case, list[Step]] = {case: [] for case in cases}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="step-") as name:
        task = Path(name)
        size = make_task(task)
        with shared_server(task) as url:
            for _ in range(options.rounds):
                for case in cases:
                    found[case] += run(case, task, url, options.steps)
    text = (
        f"A Qwen3 of {size:,} parameters, float32, prompts of {PROMPT_WORDS} tokens, one server.\n"
        f"Cores: {len(os.sched_getaffinity(0))}; threads: the trainer's own choice; "
        f"torch {torch.__version__}; load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}."
        f"\n\n    python benchmarks/step.py --steps {options.steps} --rounds {options.rounds}\n\n"
        f"{table(found)}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
