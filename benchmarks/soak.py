"""Kill something at random every few seconds while a recipe trains, and see what is lost.

    python benchmarks/soak.py [--minutes 15] [--seed 0] [--every 12] [--recipe recipes/...yaml]
                              [--out table.md] [section.field=value ...]

Each fault hits one process of a real run: rank 0, a server, its scheduler or its detokenizer, a
reward worker (all by kill -9), a server that stops to answer (SIGSTOP), the trainer asked to end
(SIGTERM). A trainer
that has ended is started again by the same command. Then the same recipe runs undisturbed for as
many steps, and the two are compared: which prompts each step trained on (in order: none lost, none
twice), and all metrics but times and counts of faults. Exits with 1 where they differ.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_opo.prompts import PromptCursor, load_prompts, load_tokenizer
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import load_recipe

ROOT = Path(__file__).parents[1]
END_SECONDS = 120.0
# What an undisturbed run has otherwise, too.
UNLIKE = (
    "start_s/",
    "timing_s/",
    "perf/",
    "rollout/retries",
    "rollout/restarts",
    "rollout/servers",
    "rollout/tail",
    "rollout/cached",
    "sync/",
    "checkpoint/",
)


@dataclass(frozen=True)
class Fault:
    """`find` gives the processes of a run that it can hit."""

    name: str
    signum: int
    find: Callable[[psutil.Process], list[psutil.Process]]
    weight: int = 1


def children_with(words: str) -> Callable[[psutil.Process], list[psutil.Process]]:
    def find(trainer: psutil.Process) -> list[psutil.Process]:
        found = []
        for process in trainer.children(recursive=True):
            try:
                command = " ".join(process.cmdline()) or process.name()
            except psutil.Error:
                continue
            if words in command and "guard.py" not in command:
                found.append(process)
        return found

    return find


def of_servers(first: bool) -> Callable[[psutil.Process], list[psutil.Process]]:
    """The first process of each server, which a guard runs, or its children: these have its command
    line, too."""

    def find(trainer: psutil.Process) -> list[psutil.Process]:
        found = []
        for process in children_with("sglang.launch_server")(trainer):
            try:
                parent = process.parent()
                if parent and any("guard.py" in word for word in parent.cmdline()) == first:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    return find


def itself(trainer: psutil.Process) -> list[psutil.Process]:
    return [trainer]


FAULTS = (
    Fault("kill -9 trainer", signal.SIGKILL, itself),
    Fault("SIGTERM trainer", signal.SIGTERM, itself),
    Fault("kill -9 server", signal.SIGKILL, of_servers(first=True)),
    Fault("kill -9 child of a server", signal.SIGKILL, of_servers(first=False), 2),
    Fault("SIGSTOP server", signal.SIGSTOP, children_with("sglang.launch_server")),
    Fault("kill -9 reward worker", signal.SIGKILL, children_with("rewards.worker"), 2),
)


@dataclass
class Soak:
    recipe: str
    overrides: list[str]
    directory: Path
    faults: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    codes: Counter[int] = field(default_factory=Counter)

    def command(self, name: str, steps: int) -> list[str]:
        """A run that lasts until it is ended; every sample is kept."""
        own = [
            f"run_dir={self.directory / name}",
            f"train.steps={steps}",
            "optimizer.schedule=constant",
            f"log.samples_per_step={10**9}",
            "eval.at_start=false",
            "eval.every=0",
            "eval.at_end=false",
            "checkpoint.export_hf=false",
            # A stopped server costs this long; and it is not the budget that is tried.
            "rollout.health_timeout_s=10",
            "rollout.max_restarts=1000",
        ]
        words = [sys.executable, "-m", "megatron_opo", "train", self.recipe]
        return [*words, "checkpoint.every=2", *self.overrides, *own]

    def start(self) -> subprocess.Popen:
        self.starts += 1
        log = (self.directory / "output.log").open("a")
        return subprocess.Popen(self.command("disturbed", 10**6), cwd=ROOT, stdout=log, stderr=log)

    def disturb(self, seconds: float, every: float, rng: random.Random) -> None:
        deadline = time.monotonic() + seconds
        run = self.start()
        while time.monotonic() < deadline:
            pause = time.monotonic() + rng.expovariate(1 / every)
            while time.monotonic() < min(pause, deadline) and run.poll() is None:
                time.sleep(0.1)
            if run.poll() is not None:
                self.codes[run.returncode] += 1
                run = self.start()
                continue
            self.hit(run, rng)
        run.send_signal(signal.SIGTERM)
        try:
            run.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
        self.codes[run.wait()] += 1

    def hit(self, run: subprocess.Popen, rng: random.Random) -> None:
        fault = rng.choices(FAULTS, [fault.weight for fault in FAULTS])[0]
        try:
            targets = fault.find(psutil.Process(run.pid))
            if targets:
                rng.choice(targets).send_signal(fault.signum)
                self.faults[fault.name] += 1
        except psutil.Error:
            return  # it ended in that moment


def steps_of(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def prompts_of(run: Path, step: int) -> list[str]:
    """In the order of the step."""
    lines = (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["group_id"] for line in lines))


def expected_prompts(recipe: Recipe, steps: int) -> list[set[str]]:
    """What the recipe's own order of prompts gives each step."""
    prompts = load_prompts(recipe.data.train, recipe.data, load_tokenizer(recipe.model.path), "t")
    cursor = PromptCursor(prompts, shuffle=recipe.data.shuffle, seed=recipe.seed)
    each = recipe.rollout.prompts_per_step
    return [{prompt.id for prompt in cursor.next(each)} for _ in range(steps)]


def comparable(record: dict) -> dict:
    skipped = ("time", "elapsed_s")
    return {k: v for k, v in record.items() if k not in skipped and not k.startswith(UNLIKE)}


def compare(soak: Soak, recipe: Recipe) -> list[str]:
    """One line for each thing that was lost, doubled or changed."""
    problems = []
    disturbed = steps_of(soak.directory / "disturbed")
    done = [record["step"] for record in disturbed]
    if done != list(range(1, len(done) + 1)):
        problems.append(f"steps are not each there once: {done}")
    for step, expected in enumerate(expected_prompts(recipe, len(done)), start=1):
        found = prompts_of(soak.directory / "disturbed", step)
        if set(found) != expected or len(found) != len(expected):
            problems.append(f"step {step} trained on other prompts than it should have")
    subprocess.run(soak.command("undisturbed", len(done)), cwd=ROOT, check=True)
    for was, should in zip(disturbed, steps_of(soak.directory / "undisturbed"), strict=True):
        unlike = {
            name
            for name in {*comparable(was), *comparable(should)}
            if was.get(name) != should.get(name)
        }
        if unlike:
            problems.append(f"step {was['step']} differs in {', '.join(sorted(unlike))}")
    return problems


def table(soak: Soak, seconds: float, steps: int, restarts: int, problems: list[str]) -> str:
    rows = [
        ("minutes", f"{seconds / 60:.0f}"),
        ("faults", str(sum(soak.faults.values()))),
        *((f"- {name}", str(count)) for name, count in sorted(soak.faults.items())),
        ("starts of the trainer", str(soak.starts)),
        ("restarts of servers, since the last of these", str(restarts)),
        ("steps trained", str(steps)),
        ("steps, prompts or metrics that differ from an undisturbed run", str(len(problems))),
    ]
    return "\n".join(["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=12.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="recipes/quickstart_cpu.yaml")
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="opo_soak_"))
    soak = Soak(arguments.recipe, arguments.overrides, directory)
    try:
        soak.disturb(arguments.minutes * 60, arguments.every, random.Random(arguments.seed))
        recipe = load_recipe(ROOT / arguments.recipe, arguments.overrides)
        records = steps_of(directory / "disturbed")
        problems = compare(soak, recipe)
    except BaseException:
        print(f"what was written is in {directory}", file=sys.stderr)
        raise
    restarts = int(records[-1].get("rollout/restarts") or 0) if records else 0
    text = table(soak, arguments.minutes * 60, len(records), restarts, problems)
    print(text)
    print(f"exit codes of the trainer: {dict(soak.codes)}")
    if arguments.out:
        arguments.out.write_text(text + "\n")
    if problems:
        print("\n".join(problems), f"what was written is in {directory}", sep="\n", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
