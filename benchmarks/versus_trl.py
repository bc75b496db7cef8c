"""Steps of GRPO on a tiny model: TRL's GRPOTrainer and megatron_opo, one after the other.

    python benchmarks/versus_trl.py [--quick] [--trl-python PATH] [--lengths 32 128] [--out FILE]

Both train the same 1M-parameter model (random weights) on the same prompts with the same reward: 32
prompts x 8 samples a step, float32, one optimizer step on each sampled batch, advantages without a
division by the standard deviation, loss averaged over tokens, AdamW with the same settings. No
response ends early, so every sample has exactly the asked length. In turns, in one run, each side
starts as a user starts it, `megatron-opo train RECIPE` and a script with a GRPOTrainer; the first
steps of each do not count. TRL runs in an environment of its own: that of --trl-python, or one that
is made in the user's cache directory, once.

"TRL" has what was fastest on a CPU: micro-batches of 64 samples, no gradient checkpointing, its KV
cache, float32 (there is no vLLM without a GPU). "TRL, its defaults" is told only that there is no
GPU and how many samples a step has. Seconds are each side's own, from the end of one step to the
end of the next; processor seconds and memory (PSS, of all processes together) are read from /proc.
The bar is the ratio of samples per second to TRL's. Exits with 1 when it is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from process_tree import Usage
from training_runs import (
    HERE,
    WARM_UP,
    Step,
    make_task,
    median_phases,
    median_seconds,
    read_metrics,
    run_watched,
    train,
    write_recipe,
)
from versus_task import PROMPT_WORDS, score

TRL = "trl==1.16.0"
BAR = 5.0
PROMPTS, GROUP = 32, 8
LEARNING_RATE = 3e-3
OURS, OURS_WIDE = "megatron_opo", "megatron_opo, a server a core"
THEIRS, THEIR_DEFAULTS = "TRL", "TRL, its defaults"
TUNED = {
    "per_device_train_batch_size": 64,
    "gradient_checkpointing": False,
    "bf16": False,
}
# GRPOTrainer's methods whose time is known apart; the first is a part of none of the others.
TRL_PHASES = {"generate": "_generate_single_turn", "reward": "_calculate_rewards"}


@dataclass(frozen=True)
class Run:
    """One start of one side. `scored` are texts with the rewards that it gave them."""

    steps: list[Step]
    scored: list[tuple[str, float]]
    peak_bytes: int
    cpu_seconds: list[float]

    @property
    def steady(self) -> list[Step]:
        return self.steps[WARM_UP:]


def trl_config(length: int, steps: int, tuned: bool) -> dict[str, Any]:
    config = {"per_device_train_batch_size": 8} | (TUNED if tuned else {})
    return config | {
        "use_cpu": True,
        "gradient_accumulation_steps": PROMPTS * GROUP // config["per_device_train_batch_size"],
        "num_generations": GROUP,
        "max_completion_length": length,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": "dapo",
        "scale_rewards": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def cpu_of_steps(usage: Usage) -> list[float]:
    return [after[1] - before[1] for before, after in pairwise(usage.marks)][WARM_UP - 1 :]


def run_ours(directory: Path, task: Path, length: int, steps: int, servers: int, threads) -> Run:
    path, run = directory / "recipe.yaml", directory / "run"
    write_recipe(
        path, task, prompts=PROMPTS, samples=GROUP, length=length, steps=steps, lr=LEARNING_RATE
    )
    usage = train(path, [f"rollout.servers={servers}"], threads)
    return Run(
        read_metrics(run), read_samples(run / "samples"), usage.peak_bytes, cpu_of_steps(usage)
    )


def read_samples(directory: Path) -> list[tuple[str, float]]:
    lines = max(directory.glob("step_*.jsonl")).read_text().splitlines()
    return [(each["response"], each["reward"]) for each in map(json.loads, lines)]


def run_trl(
    directory: Path, task: Path, length: int, steps: int, tuned: bool, threads, python: Path
) -> Run:
    out = directory / "run"
    out.mkdir()
    settings = {
        "out": str(out),
        "model": str(task / "model"),
        "data": str(task / "prompts.jsonl"),
        "config": trl_config(length, steps, tuned),
        "phases": TRL_PHASES,
    }
    path = directory / "settings.json"
    path.write_text(json.dumps(settings))
    command = [str(python), str(HERE / "versus_trl_side.py"), str(path)]
    usage = run_watched(command, out / "steps.jsonl", threads)
    scored = [tuple(each) for each in json.loads((out / "scored.json").read_text())]
    return Run(read_trl_steps(out / "steps.jsonl"), scored, usage.peak_bytes, cpu_of_steps(usage))


def read_trl_steps(path: Path) -> list[Step]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Step(
            record["seconds"],
            record["phases"],
            record["logged"]["completions/mean_length"],
            record["logged"]["reward"],
            record["logged"]["grad_norm"],
        )
        for record in records
    ]


def check(name: str, run: Run, length: int) -> None:
    """Every response has the asked length, and its text the reward that this function gives it.

    Raises:
        SystemExit: one has not.
    """
    if any(step.length != length for step in run.steps):
        raise SystemExit(
            f"{name}: mean lengths {[step.length for step in run.steps]}, not {length}"
        )
    for text, reward in run.scored:
        if len(text.split()) != length or abs(score(text) - reward) > 1e-6:
            raise SystemExit(f"{name}: reward {reward} for {text!r}, should be {score(text)}")


def table(runs: dict[str, list[Run]]) -> list[str]:
    lines = [
        "| what | samples/s | s a step | processor s a step | peak memory, GB | "
        "reward, first and last step | gradient norm, first step | rounds, s a step |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, rounds in runs.items():
        seconds, first, last = seconds_of(rounds), rounds[0].steps[0], rounds[0].steps[-1]
        each = ", ".join(f"{seconds_of([run]):.2f}" for run in rounds)
        cpu = statistics.median(s for run in rounds for s in run.cpu_seconds)
        memory = max(run.peak_bytes for run in rounds) / 1e9
        lines.append(
            f"| {name} | {PROMPTS * GROUP / seconds:.0f} | {seconds:.2f} | {cpu:.2f} "
            f"| {memory:.2f} | {first.reward:.3f}, {last.reward:.3f} | {first.grad_norm:.3f} "
            f"| {each} |"
        )
    return lines


def phase_table(runs: dict[str, list[Run]]) -> list[str]:
    lines = ["| what | seconds of a step, by phase |", "|---|---|"]
    for name, rounds in runs.items():
        phases = median_phases([step for run in rounds for step in run.steady])
        shown = ", ".join(f"{phase} {s:.2f}" for phase, s in phases.items() if abs(s) >= 0.005)
        lines.append(f"| {name} | {shown} |")
    return lines


def seconds_of(rounds: list[Run]) -> float:
    return median_seconds(step for run in rounds for step in run.steady)


def verdict(runs: dict[str, list[Run]]) -> tuple[list[str], bool]:
    ours = seconds_of(runs[OURS])
    ratio = seconds_of(runs[THEIRS]) / ours
    met = ratio >= BAR
    lines = [
        f"Bar: {OURS} has at least {BAR:g} times the samples/s of {THEIRS}: "
        f"{ratio:.2f}, {'met' if met else 'MISSED'}."
    ]
    if THEIR_DEFAULTS in runs:
        lines.append(f"Of {THEIR_DEFAULTS}: {seconds_of(runs[THEIR_DEFAULTS]) / ours:.2f}.")
    return lines, met


def trl_environment(given: Path | None) -> Path:
    """The Python of an environment that has TRL; made the first time."""
    if given is not None:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    directory = cache / "megatron_opo" / TRL.replace("==", "-")
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        print(f"{TRL} is installed to {directory}", flush=True)
        version = torch.__version__.partition("+")[0]
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", f"torch=={version}", TRL], check=True)
        (directory / "complete").touch()
    return python


def contenders(options: argparse.Namespace, python: Path, task: Path, length: int) -> dict:
    def ours(servers: int):
        return lambda directory: run_ours(
            directory, task, length, options.steps, servers, options.threads
        )

    def theirs(tuned: bool):
        return lambda directory: run_trl(
            directory, task, length, options.steps, tuned, options.threads, python
        )

    found = {OURS: ours(1), THEIRS: theirs(True)}
    if not options.quick:
        found[OURS_WIDE] = ours(len(os.sched_getaffinity(0)))
        found[THEIR_DEFAULTS] = theirs(False)
    return found


def take_turns(options: argparse.Namespace, length: int, python: Path, task: Path) -> dict:
    runs: dict[str, list[Run]] = {}
    for turn in range(options.rounds):
        for name, run in contenders(options, python, task, length).items():
            with tempfile.TemporaryDirectory(prefix="versus-run-") as directory:
                found = run(Path(directory))
            check(name, found, length)
            runs.setdefault(name, []).append(found)
            print(
                f"{length} tokens, round {turn + 1}, {name}: {seconds_of([found]):.2f} s a step, "
                f"load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description="Steps of GRPO by TRL and by megatron_opo.")
    parser.add_argument("--trl-python", type=Path, help="an environment's Python that has TRL")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--steps", type=int, default=6, help=f"{WARM_UP} of them do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both sides; default: unset")
    parser.add_argument("--quick", action="store_true", help="32 tokens, 4 steps, 1 round")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.steps, options.rounds = [32], 4, 1
    python = trl_environment(options.trl_python)
    load = os.getloadavg()[0]
    parts, all_met = [], True
    with tempfile.TemporaryDirectory(prefix="versus-") as name:
        task = Path(name)
        size = make_task(task)
        for length in options.lengths:
            runs = take_turns(options, length, python, task)
            lines, met = verdict(runs)
            all_met &= met
            parts += [f"## {length} tokens a response", "", *table(runs), "", *phase_table(runs)]
            parts += ["", *lines, ""]
    threads = "each side's own choice" if options.threads is None else options.threads
    flags = "" if options.threads is None else f" --threads {options.threads}"
    text = (
        f"A Qwen3 of {size:,} parameters, float32; {PROMPTS} prompts of {PROMPT_WORDS} tokens x "
        f"{GROUP} samples a step; {TRL}.\n"
        f"Cores: {len(os.sched_getaffinity(0))}; threads: {threads}; torch {torch.__version__}; "
        f"load before and after: {load:.1f}, {os.getloadavg()[0]:.1f}.\n\n"
        f"    python benchmarks/versus_trl.py --lengths {' '.join(map(str, options.lengths))} "
        f"--steps {options.steps} --rounds {options.rounds}{flags}\n\n" + "\n".join(parts)
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
