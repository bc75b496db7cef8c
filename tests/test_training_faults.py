"""A real run in which an update goes wrong, what it leaves, and the same without training."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_opo.replay import read_batch
from tests.test_end_to_end import make_project

ROOT = Path(__file__).parents[1]
OFF = ["eval.at_start=false", "eval.at_end=false", "checkpoint.export_hf=false"]
OFF += ["checkpoint.export_hf_every=0"]
# Python imports it first of all; the second update of the trainer has no loss then.
FAULT = """
import sys
if "megatron_opo" in sys.orig_argv and "--replay" not in sys.orig_argv:
    from megatron_opo.actor.step import Actor
    from megatron_opo.actor import step

    def update(self, *arguments, update=Actor.update, calls=[], **named):
        calls.append(1)
        step.policy_gradient_loss = nan if len(calls) == 2 else true_loss
        return update(self, *arguments, **named)

    true_loss = step.policy_gradient_loss
    nan = lambda *arguments: true_loss(*arguments) * float("nan")
    Actor.update = update
"""


def train(directory: Path, *arguments: str) -> str:
    outcome = subprocess.run(
        [sys.executable, "-m", "megatron_opo", "train", "recipe.yaml", *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": f"{directory}:{ROOT}", "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert outcome.returncode == 0, outcome.stdout
    return outcome.stdout


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    directory = make_project(tmp_path_factory.mktemp("project"))
    (directory / "sitecustomize.py").write_text(FAULT)
    return directory


@pytest.fixture(scope="module")
def skipped(project):
    """A run of two steps whose second update fails at first."""
    faults = ["train.on_nonfinite=skip", "log.batches_every=1", "train.steps=2"]
    return train(project, *OFF, *faults)


def test_a_batch_whose_update_is_not_finite_is_skipped_and_counted(project, skipped):
    run = project / "runs" / "letters"
    said = " ".join(skipped.split())
    assert "warning: step 2: the gradient is not finite (rank 0: " in said
    assert "Skipped, 1 of at most 3 in a row: version 1 goes on with the next prompts" in said
    failed = run / "batches" / "step_2.failed.safetensors"
    relative = failed.relative_to(project)
    assert f"megatron-opo train runs/letters/recipe.yaml --replay {relative}" in said
    steps = read_metrics(run)
    assert [record["step"] for record in steps] == [1, 2]
    assert [record["actor/skipped_updates"] for record in steps] == [0, 1]
    kept = [read_batch(run / "batches" / f"step_{i}.safetensors") for i in (1, 2)]
    kept.append(read_batch(failed))
    assert [batch.version for batch in kept] == [0, 1, 1]
    prompts = [record["prompt_id"] for batch in kept for record in batch.samples]
    assert len(prompts) == len(set(prompts)) == 3 * 8, "no prompt was drawn twice"


def test_its_steps_are_replayed_to_the_bit(project, skipped):
    run = project / "runs" / "letters"
    files = [f"runs/letters/batches/step_{i}.safetensors" for i in (1, 2)]
    said = train(project, "--replay", *files, *OFF, "train.steps=2").split("step 2, from")
    for text, record in zip(said, read_metrics(run), strict=True):
        shown = dict(line.split() for line in text.splitlines() if line.startswith("  "))
        assert {"actor/pg_loss", "actor/grad_norm", "on_policy/logprob_gap_max"} <= shown.keys()
        for name, value in shown.items():
            assert name.startswith("perf/") or float(value) == record[name], name


def test_rollout_only_samples_scores_and_keeps_without_training(project):
    said = train(project, "--rollout-only", *OFF, "train.steps=1", "algorithm.estimator=otb")
    run = project / "runs" / "letters.rollout_only"
    assert not (run / "checkpoints").exists()
    (record,) = read_metrics(run)
    assert record["rollout/samples"] == 64
    assert "actor/grad_norm" not in record
    kept = read_batch(run / "batches" / "step_1.safetensors")
    assert kept.version == 0
    assert kept.batch.rewards.mean().item() == pytest.approx(record["critic/rewards/mean"])
    assert torch.isfinite(kept.batch.rollout_logprobs).all()
    assert math.isnan(kept.batch.advantages[kept.batch.loss_mask][0])
    assert (run / "samples" / "step_000001.jsonl").exists()
    assert "report: " in said
