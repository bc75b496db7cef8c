"""TRL's side of versus_trl.py. It runs in TRL's environment, which has no megatron_opo.

Writes to the directory `out` of its settings: steps.jsonl, a line a step; scored.json, texts of the
last step and their rewards; facts.json, versions.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
import trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from versus_task import score


class StepLog(TrainerCallback):
    """The seconds of each step from the end of the one before, those of its phases, what is logged.

    TRL logs, with logging_steps=1, at the end of a step.
    """

    def __init__(self, path: Path):
        self.path = path
        self.phases: dict[str, float] = {}
        self.ended = 0.0

    def on_train_begin(self, args, state, control, **_):
        self.ended = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" not in (logs or {}):
            return  # the summary at the end
        now = time.perf_counter()
        line = {"step": state.global_step, "seconds": now - self.ended, "phases": self.phases}
        with self.path.open("a") as file:
            file.write(json.dumps(line | {"logged": logs}) + "\n")
        self.ended, self.phases = now, {}

    def timed(self, name: str, function: Callable) -> Callable:
        def run(*arguments, **options):
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

        return run


def main(settings: dict) -> None:
    out = Path(settings["out"])
    log = StepLog(out / "steps.jsonl")
    scored: list[tuple[str, float]] = []

    def reward(completions, **_):
        rewards = [score(text) for text in completions]
        scored[:] = zip(completions, rewards, strict=True)
        return rewards

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(out / "trl"), **settings["config"]),
        train_dataset=load_dataset("json", data_files=settings["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[log],
    )
    for phase, method in settings["phases"].items():
        setattr(trainer, method, log.timed(phase, getattr(trainer, method)))
    trainer.train()
    facts = {each.__name__: each.__version__ for each in (trl, transformers, torch)}
    (out / "facts.json").write_text(json.dumps(facts))
    (out / "scored.json").write_text(json.dumps(scored[:64]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
