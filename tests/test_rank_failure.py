"""One rank of a job fails, or is not like the others: all end soon, and the first error is shown.

The jobs replay a batch, so that no server is needed; the faults are put in from outside.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_opo.cli import main
from megatron_opo.replay import write_batch
from tests.actor_cases import RECIPE, make_rollout
from tests.models import tiny_qwen3
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
REPLAY = ("--replay", "batch.safetensors")
PATIENCE_S = 20
# Python imports it first of all; in the launcher it does nothing.
FAULT = """
import os, time
if os.environ.get("RANK") == "1":
    import pathlib, sys
    from megatron_opo.actor import step

    def fail(*_):
        pathlib.Path("raised").write_text(str(time.time()))
        raise RuntimeError("the fault of this test")

    calls = []
    def loss(logprobs, advantages, weights, true_loss=step.policy_gradient_loss):
        calls.append(1)
        if WHERE == "forward" and len(calls) == 2:
            fail()
        if WHERE == "backward":
            logprobs.register_hook(fail)
        return true_loss(logprobs, advantages, weights)

    step.policy_gradient_loss = loss
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    directory = tmp_path_factory.mktemp("project")
    tiny_qwen3(directory / "model")
    (directory / "recipe.yaml").write_text(RECIPE.format(model="model", run_dir="run"))
    write_batch(directory / "batch.safetensors", make_rollout(100), version=0, recipe={})
    return directory


def replay(project: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "megatron_opo", "train", "recipe.yaml", *REPLAY, *arguments],
        cwd=project,
        env=os.environ
        | {"PYTHONPATH": f"{path}:{ROOT}", "OMP_NUM_THREADS": "1", "TMPDIR": str(project)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("layout", "where"), [("tensor_parallel", "forward"), ("pipeline_parallel", "backward")]
)
def test_a_rank_that_raises_in_the_middle_of_an_update_ends_the_job(
    layout, where, project, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(f"WHERE = {where!r}\n{FAULT}")
    outcome = replay(project, f"actor.{layout}=2", path=str(tmp_path))
    took = time.time() - float((project / "raised").read_text())
    print(took, outcome.stdout)
    assert outcome.returncode == 1, outcome.stdout
    assert "error: rank 1 failed with exit code 1; the end of" in outcome.stdout
    assert "RuntimeError: the fault of this test" in outcome.stdout
    assert sum(line.startswith("error: ") for line in outcome.stdout.splitlines()) == 1
    assert "Traceback" not in outcome.stdout and "lost its connection" not in outcome.stdout
    assert took < PATIENCE_S
    assert not (project / "run").exists()


def start_differently(layouts: list[dict], code: list[str]) -> str:
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.errors import TrainingError
    from megatron_opo.recipe import ActorConfig

    rank = int(os.environ["RANK"])
    facts = {"the recipe's actor": layouts[rank], "the code": code[rank]}
    with pytest.raises(TrainingError) as error:
        initialize(ActorConfig(**layouts[rank]), seed=0, facts=facts)
    return str(error.value)


def test_ranks_of_other_recipes_or_code_are_named_before_they_wait_for_each_other():
    layouts = [{"tensor_parallel": 2}, {"pipeline_parallel": 2}]
    for said in run_ranks(2, start_differently, layouts, ["a", "b"]):
        assert said == (
            "the ranks were not started alike:\n"
            "  rank 1: the recipe's actor is {'pipeline_parallel': 2}, on rank 0 "
            "{'tensor_parallel': 2}; the code is 'b', on rank 0 'a'\n"
            "Give all of them the same files and the same command"
        )


def test_a_replay_moves_no_run_aside(project, capsys, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as exit:
        main(["train", "recipe.yaml", *REPLAY, "name=other", "--fresh"])
    assert exit.value.code == 2
    assert "--fresh would move the run aside" in capsys.readouterr().err
