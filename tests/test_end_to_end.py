"""The command as a user runs it: real servers, real training, a task that any model can learn."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_opo.launch import EXIT_REQUEUE
from megatron_opo.weights.megatron_save import save_megatron
from tests.models import tiny_qwen3
from tests.traces import read_tracks

ROOT = Path(__file__).parents[1]
RECIPE = """
name: letters
model: {path: model, dtype: float32}
data:
  train: {files: [train.jsonl]}
  eval: {files: [eval.jsonl]}
  max_prompt_tokens: 32
reward: {function: "reward.py:share_of_a", workers: 1}
rollout:
  prompts_per_step: 8
  samples_per_prompt: 8
  max_response_tokens: 12
  server_args: {max_total_tokens: 16384}
actor: {micro_batch_tokens: 1024}
optimizer: {lr: 3e-3}
train: {steps: 4}
eval: {every: 0, samples_per_prompt: 2}
checkpoint: {export_hf_every: 1, keep_hf: 2}
"""
REWARD = """
def share_of_a(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("a") / max(1, len(solution_str))
"""


def make_unsupported(model: Path, copy: Path) -> None:
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


def make_project(directory: Path) -> Path:
    tiny_qwen3(directory / "model")
    for name, count in [("train", 40), ("eval", 8)]:
        rows = [{"prompt": f"{name} {i}: ", "answer": "a"} for i in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (directory / "reward.py").write_text(REWARD)
    make_unsupported(directory / "model", directory / "gpt2")
    (directory / "recipe.yaml").write_text(RECIPE)
    return directory


def train(
    directory: Path, *arguments: str, timeout: float = 240, stderr: int = subprocess.STDOUT
) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "megatron_opo", "train", "recipe.yaml", *arguments],
        cwd=directory,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=stderr,
        timeout=timeout,
    )


def read_metrics(directory: Path, kind: str) -> list[dict]:
    lines = (directory / "runs" / "letters" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def finished(project):
    """A run of four steps, and its output."""
    outcome = train(project, "log.prometheus_port=0")
    assert outcome.returncode == 0, outcome.stdout
    return outcome.stdout


def test_the_reward_rises_and_server_and_actor_agree_all_along(project, finished):
    steps = read_metrics(project, "train")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[-1]["critic/rewards/mean"] > steps[0]["critic/rewards/mean"] + 0.3
    for record in steps:
        assert record["on_policy/logprob_gap_max"] < 1e-4
        assert record["actor/grad_norm"] > 0
        assert record["sync/bytes"] > 0
        assert record["rollout/samples"] == 64
        # OPO: the length-weighted sum of a group's advantages is 0.
        assert abs(record["critic/advantages/mean"]) < 1e-6
        phases = [v for k, v in record.items() if k.startswith("timing_s/") and k.count("/") == 1]
        assert sum(phases) == pytest.approx(2 * record["timing_s/step"], abs=1e-9)
    waits = {k: v for k, v in steps[0].items() if k.startswith("start_s/")}
    first = waits.pop("start_s/first_sample")
    assert sum(waits.values()) < first < sum(waits.values()) + steps[0]["timing_s/generate"]
    assert f"first sample after {first:.0f} s: imports " in finished
    evaluations = read_metrics(project, "eval")
    assert [record["step"] for record in evaluations] == [0, 4]
    assert evaluations[1]["eval/avg@2"] > evaluations[0]["eval/avg@2"] + 0.3
    assert "Traceback" not in finished
    for shown in ("trainer", "server 0"):
        assert re.search(rf"Prometheus: http://127\.0\.0\.1:\d+/metrics \({shown}\)", finished)
    told = finished.splitlines()
    assert told[0] == "letters: starting 1 server, loading the trainer"
    assert told[-1].startswith("finished: 4 steps in ") and told[-1].endswith("/report.html")
    assert "\x1b" not in finished and "\r" not in finished


def test_the_run_leaves_what_it_promises(project, finished):
    run = project / "runs" / "letters"
    assert "<html" in (run / "report.html").read_text()
    assert list((run / "tensorboard").iterdir())
    samples = [json.loads(s) for s in (run / "samples" / "step_000004.jsonl").open()]
    assert {len(s["response"]) > 0 for s in samples} == {True}
    groups = {s["group_id"] for s in samples}
    assert len(samples) == 8 * len(groups), "whole groups are kept"
    assert "temperature: 1.0" in (run / "recipe.yaml").read_text(), "defaults are shown"


def test_the_exported_model_is_the_trained_policy(project, finished):
    """Its most likely continuation is the rewarded letter; the start model's was not."""
    first = project / "model"
    last = project / "runs" / "letters" / "hf" / "step_4"
    chosen = {}
    for path in (first, last):
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        chat = [{"role": "user", "content": "eval 0: "}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        chosen[path] = tokenizer.decode(model(ids).logits[0, -1].argmax())
    assert chosen[last] == "a"
    assert chosen[first] != "a"


def exported_steps(project: Path) -> list[str]:
    return sorted(path.name for path in (project / "runs" / "letters" / "hf").iterdir())


def test_models_are_exported_while_it_trains_and_the_newest_are_kept(project, finished):
    assert exported_steps(project) == ["step_3", "step_4"]
    directories = [project / "runs" / "letters" / "hf" / f"step_{i}" for i in (3, 4)]
    third, last = (load_file(path / "model.safetensors") for path in directories)
    assert all(not torch.equal(third[name], last[name]) for name in last)


def test_a_finished_run_says_so_and_more_steps_continue_it_from_what_is_whole(project, finished):
    again = train(project, "--quiet")
    assert again.returncode == 0
    assert again.stdout.startswith("runs/letters already has all of its 4 steps: raise train.steps")
    assert again.stdout.count("\n") == 1
    further = train(project, "train.steps=5", "eval.at_end=false", "--json", stderr=subprocess.PIPE)
    assert (further.returncode, further.stderr) == (0, "")
    events = [json.loads(line) for line in further.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert [kind for kind in kinds if kind not in ("note", "warning")] == [
        *("start", "step", "finished", "end")
    ]
    assert any("resuming from" in event.get("text", "") for event in events)
    changed = "the recipe changed since then: "
    assert [event["text"] for event in events if event["event"] == "warning"] == [
        changed + "eval.at_end: True -> False",
        changed + "log.prometheus_port: 0 -> None",
        changed + "train.steps: 4 -> 5",
    ]
    assert [event["version"] for event in events if event["event"] == "start"] == [4]
    assert (events[-2]["step"], events[-1]["exit_code"]) == (5, 0)
    steps = read_metrics(project, "train")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    assert steps[4]["critic/rewards/mean"] > steps[0]["critic/rewards/mean"] + 0.3
    assert steps[4]["on_policy/logprob_gap_max"] < 1e-4
    assert exported_steps(project) == ["step_4", "step_5"]
    resume_from_the_one_before(project)


def resume_from_the_one_before(project: Path) -> None:
    """The checkpoint of step 5 is damaged: it is set aside, and step 5 runs again from step 4."""
    run_path = project / "runs" / "letters"
    checkpoints = run_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_4", "step_5"]
    (checkpoints / "step_3.partial").mkdir()
    file = checkpoints / "step_5" / "__0_0.distcp"
    file.write_bytes(bytes(1) + file.read_bytes()[1:])
    again = train(project, "train.steps=6", "checkpoint.every=1", "eval.at_end=false")
    assert again.returncode == 0, again.stdout
    aside = "a checkpoint is damaged, and now runs/letters/checkpoints/step_5.damaged: __0_0.distcp"
    assert f"warning: {aside} is damaged (sha256 " in " ".join(again.stdout.split())
    assert aside in (run_path / "run.log").read_text()
    assert "resuming from runs/letters/checkpoints/step_4" in again.stdout
    assert "DTensor" not in again.stdout
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_5", "step_5.damaged", "step_6"]
    steps = read_metrics(project, "train")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[5]["checkpoint/write_seconds"] > 0 and steps[5]["timing_s/checkpoint"] > 0
    (*_, best) = read_metrics(project, "eval")
    state = json.loads((checkpoints / "step_6" / "state.json").read_text())
    expected = {"metric": "eval/avg@2", "value": best["eval/best"], "step": best["eval/best_step"]}
    assert state["best_eval"] == expected and best["eval/best"] >= best["eval/avg@2"]
    assert "checkpoint of step 6: " in again.stdout


TALK = """
async def talk(episode):
    await episode.generate(max_tokens=2)
    episode.add("?")
    await episode.generate()
"""


def test_two_ranks_train_by_token_baselines_on_groups_with_a_signal(tmp_path):
    project = make_project(tmp_path)
    # Of other weights than those that the servers read: they must have been sent these.
    save_megatron(project / "start", tiny_qwen3(tmp_path / "other", seed=1))
    exports = project / "runs" / "letters" / "hf"
    exports.mkdir(parents=True)
    for step in (1, 2):  # no directory can take the place of a link
        (exports / f"step_{step}").symlink_to(tmp_path / "nowhere")
    (project / "talk.py").write_text(TALK)
    outcome = train(
        project,
        "actor.tensor_parallel=2",
        "rollout.function=talk.py:talk",
        "log.policy_shift=true",
        "model.megatron_checkpoint=start",
        "algorithm.estimator=otb",
        "algorithm.loss_aggregation=seq-mean-token-mean",
        "rollout.samples_per_prompt=4",
        "rollout.dynamic_sampling={enabled: true, max_rounds: 40}",
        "train.steps=2",
        "eval.at_start=false",
        "eval.at_end=false",
        "sync.transport=disk",
        "profile={steps: 2, torch: true, servers: true}",
    )
    assert outcome.returncode == 2, outcome.stdout
    assert outcome.stdout.count("error: ") == 1
    said = " ".join(outcome.stdout.split())
    assert "warning: the model of step 1 was not exported: " in said
    assert "error: the model of step 2 was not exported: " in said
    assert (exports.parent / "checkpoints" / "step_2" / "state.json").exists()
    steps = read_metrics(project, "train")
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["on_policy/logprob_gap_max"] < 1e-4
        assert record["rollout/groups_all_equal"] == 0
        assert record["rollout/samples"] == 32
        assert record["actor/grad_norm"] > 0
        assert record["rollout/turns/min"] == record["rollout/turns/max"] == 2
        assert record["on_policy/kl_step"] > 0 and "timing_s/policy_shift" in record
    assert steps[0]["on_policy/kl_to_start"] == 0 < steps[1]["on_policy/kl_to_start"]
    assert outcome.stdout.count("the weights of least variance are 1 / length") == 1
    # A fresh model seldom writes the letter: most groups of four have only rewards of 0.
    assert sum(record["rollout/groups_dropped"] for record in steps) > 0
    assert all("timing_s/score" in record for record in steps)
    profile = exports.parent / "profile"
    check_trace(read_tracks(profile / "trace_step_2.json"), steps[1])
    profiled = ["torch_step_2_rank_0.json.gz", "torch_step_2_rank_1.json.gz"]
    profiled = ["step_2-server_0-TP-0.trace.json.gz", *profiled, "trace_step_2.json"]
    assert sorted(path.name for path in profile.iterdir()) == profiled
    for name in profiled[:3]:
        with gzip.open(profile / name, "rt") as file:
            assert "aten::mm" in file.read()
    assert f"profile of step 2: {profile / 'trace_step_2.json'}" in said


def check_trace(tracks, metrics):
    """Ranks and server are there, and rank 0's spans are what its metrics say."""
    assert list(tracks) == ["rank 0", "rank 1", "server 0"]
    (first,), (second,) = (tracks[f"rank {rank}"].values() for rank in (0, 1))
    in_trace: Counter[tuple[str, str]] = Counter()
    for event in first:
        in_trace[event["cat"], event["name"]] += event["dur"] / 1e6
    in_metrics = Counter({("step 2", "step 2"): metrics["timing_s/step"]})
    for name, value in metrics.items():
        phase, *parts = name.removeprefix("timing_s/").split("/")
        if name.startswith("timing_s/") and {phase, *parts}.isdisjoint(("step", "unaccounted")):
            in_metrics[phase, [phase, *parts][-1]] += value
    assert in_trace == pytest.approx(in_metrics, abs=1e-6)
    for track in (first, second):
        passes = [event["name"] for event in track if event["cat"] == "update"]
        assert passes.count("forward") == passes.count("backward") >= 1
        assert {"share", "forward_backward", "optimizer"} <= {*passes}
    assert any(event["name"] == "wait" and event["dur"] > 1e5 for event in second)
    requests = [event for thread in tracks["server 0"].values() for event in thread]
    prompts = [event for event in requests if event["name"].startswith("prompt ")]
    # Those of dropped groups, too.
    assert sum(e["args"]["response_tokens"] for e in prompts) >= metrics["rollout/tokens"]
    # One for each turn.
    assert {event["args"]["samples"] for event in prompts} == {1}
    assert len(prompts) == 2 * 4 * (8 + metrics["rollout/groups_dropped"])
    names = {event["name"] for event in requests}
    assert {"/pause_generation", "/update_weights_from_disk", "/weights_checker"} <= names


SIGNALLED = """
import os, signal, sys
from megatron_opo.actor.checkpoint_writer import CheckpointWriter
from megatron_opo.cli import main
from megatron_opo.desk import Desk

owner, name = sys.argv[1].split(".")
left = int(sys.argv[2])
work = getattr(globals()[owner], name)

def ask_first(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return work(*arguments)

setattr(globals()[owner], name, ask_first)
sys.exit(main(["train", "recipe.yaml", "eval.at_start=false", *sys.argv[3:]]))
"""


def signalled(project: Path, method: str, call: int, *arguments: str):
    """A run that gets SIGTERM in that call of a method."""
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, method, str(call), *arguments],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


@pytest.mark.timeout(600)
def test_a_run_that_is_asked_to_stop_goes_on_where_it_was(tmp_path):
    project = make_project(tmp_path)
    arguments = ["actor.data_parallel=2", "eval.at_start=false", "eval.at_end=false"]
    arguments += ["rollout.hand_over_memory=true", "sync.transport=shared_memory"]
    command = [sys.executable, "-m", "megatron_opo", "train", "recipe.yaml", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    metrics = project / "runs" / "letters" / "metrics.jsonl"
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(
            [*command, "train.steps=1000"],
            cwd=project,
            env=environment,
            stdout=output,
            stderr=output,
        )
        deadline = time.monotonic() + 240
        while not (metrics.exists() and '"step": 1' in metrics.read_text()):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        run.send_signal(signal.SIGUSR1)
        assert run.wait(60) == EXIT_REQUEUE, (tmp_path / "output").read_text()
    trained = len(read_metrics(project, "train"))
    said = f"stopped after step {trained}, as asked (SIGUSR1)"
    assert said in (tmp_path / "output").read_text()

    # Asked when the batch of a step is complete and not yet trained on.
    between = signalled(project, "CheckpointWriter.poll", 2, "train.steps=1000")
    assert between.returncode == 143, between.stdout
    trained += 1
    assert f"stopped after step {trained}, as asked (SIGTERM)" in between.stdout
    # And in the last evaluation, which the same command then makes up for.
    last = [f"train.steps={trained + 1}", "eval.at_end=true", "checkpoint.export_hf=false"]
    assert signalled(project, "Desk.sample_and_score_eval", 1, *last).returncode == 143
    assert not read_metrics(project, "eval")
    again = train(project, "eval.at_start=false", *last)
    assert again.returncode == 0, again.stdout
    assert [record["step"] for record in read_metrics(project, "eval")] == [trained + 1]
    steps = [record["step"] for record in read_metrics(project, "train")]
    assert steps == list(range(1, trained + 2))
    newest = project / "runs" / "letters" / "checkpoints" / f"step_{trained + 1}" / "state.json"
    drawn = json.loads(newest.read_text())["cursor"]
    assert drawn["epoch"] * 40 + drawn["position"] == 8 * (trained + 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rollout.sample_per_prompt=4"], "did you mean `rollout.samples_per_prompt`?"),
        (["model.path=nowhere"], "nowhere is not a directory"),
        (["model.path=gpt2"], "`model_type` is 'gpt2'"),
        (["actor.tensor_parallel=3"], "allowed: 1, 2, 4"),
        (["data.train.files=[nowhere.jsonl]"], "nowhere.jsonl"),
        (["data.train.files=[nowhere.jsonl]", "actor.tensor_parallel=2"], "nowhere.jsonl"),
        (["reward.function=reward.py:missing"], "share_of_a"),
    ],
)
def test_a_mistake_ends_in_one_clear_error(arguments, expected, tmp_path_factory, project):
    run_dir = tmp_path_factory.mktemp("mistake") / "run"
    outcome = train(project, *arguments, f"run_dir={run_dir}", timeout=120)
    assert outcome.returncode == 2, outcome.stdout
    assert expected in outcome.stdout
    assert outcome.stdout.count("error: ") == 1
    if "reward.function" not in arguments[0]:  # it is loaded while the servers start
        assert not list(run_dir.glob("logs/server_*")), "found before a server was started"
    assert not processes_in(project), "servers that were starting have ended"
    assert "Traceback" not in outcome.stdout


def processes_in(directory: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(directory):
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.timeout(600)
def test_a_run_outlives_its_server_until_its_new_starts_are_used_up(tmp_path):
    """Killed while it samples, and again while it gets weights: then the run ends."""
    project = make_project(tmp_path)
    rows = [{"prompt": f"train {i}: ", "answer": "a"} for i in range(4000)]
    (project / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = project / "runs" / "letters"
    arguments = ["train.steps=1000", "rollout.max_restarts=1", "log.samples_per_step=64"]
    with (tmp_path / "output").open("w") as output:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "megatron_opo", "train", "recipe.yaml", *arguments],
            cwd=project,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            for moment in ("Prefill batch", "POST /begin_weight_update"):
                wait_for_more(run / "metrics.jsonl", '"kind": "train"', trainer)
                wait_for_more(run / "logs" / "server_0.log", moment, trainer)
                children = psutil.Process(trainer.pid).children()
                (guard,) = [c.pid for c in children if "sglang.launch_server" in c.cmdline()]
                os.killpg(guard, signal.SIGKILL)
            code = trainer.wait(120)
        finally:
            trainer.kill()
            trainer.wait()
    said = (tmp_path / "output").read_text()
    assert code == 1, said
    assert "It is started again in 1 s (1 of rollout.max_restarts 1)" in said
    assert "It is not started again (rollout.max_restarts is used up)" in said
    assert "error: no server is left:\n  server 0" in said
    assert "Traceback" not in said
    steps = read_metrics(project, "train")
    last = len(steps)
    assert [record["step"] for record in steps] == list(range(1, last + 1))
    assert max(record["on_policy/logprob_gap_max"] for record in steps) < 1e-4
    assert steps[0]["rollout/restarts"] == 0 and steps[-1]["rollout/restarts"] == 1
    state = json.loads((run / "checkpoints" / f"step_{last}" / "state.json").read_text())
    assert (state["cursor"]["epoch"], state["cursor"]["position"]) == (0, 8 * last)
    trained = []
    for path in (run / "samples").glob("step_*.jsonl"):
        trained += {json.loads(line)["group_id"] for line in path.open()}
    assert len(trained) == len(set(trained)) == 8 * last, "each prompt was trained once"


def wait_for_more(path: Path, text: str, process: subprocess.Popen) -> None:
    """Until `text` comes into the file once more than it is there now."""
    deadline = time.monotonic() + 240

    def seen() -> int:
        return path.read_bytes().count(text.encode()) if path.exists() else 0

    before = seen()
    while seen() <= before:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
