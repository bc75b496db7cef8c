"""The project's job scripts on a real Slurm: they train, and survive what clusters do to them."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from cluster import ENDED, MiniCluster

from tests.test_end_to_end import make_project

ROOT = Path(__file__).parents[2]
JOB = ROOT / "slurm" / "quickstart.sbatch"
START_S = 240.0
# In place of what is not installed here: each keeps its arguments and runs what stands behind the
# image, outside of any container.
PYTHON = f"""#!/bin/bash
exec {shlex.quote(sys.executable)} "$@"
"""
APPTAINER = """#!/bin/bash
printf '%s\\0' "$@" >"$KEPT.$SLURM_NODEID"
while [[ $1 != "$CONTAINER_IMAGE" ]]; do
  [[ $1 == --pwd ]] && cd "$2"
  shift
done
exec "${@:2}"
"""
SRUN_WITH_PYXIS = f"""#!/bin/bash
srun={shutil.which("srun")}
if [[ $* == --help ]]; then
  "$srun" --help
  echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"
  exit
fi
printf '%s\\0' "$@" >"$KEPT.srun"
for word; do
  [[ $word == --container-* || $word == --no-container-* ]] || kept+=("$word")
done
exec "$srun" "${{kept[@]}}"
"""
QUIET = ["eval.at_start=false", "eval.at_end=false", "checkpoint.export_hf=false"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    # A space: every path of a script has to be quoted.
    project = make_project(tmp_path_factory.mktemp("a project"))
    (project / "slurm").symlink_to(ROOT / "slurm")
    return project


@pytest.fixture
def submit(slurm, directory):
    """submit(name, *overrides, options=[...], **environment): a run of that name on two nodes."""

    def submit_run(name: str, *overrides: str, options: tuple[str, ...] = (), **more: str) -> int:
        settings = {"RECIPE": "recipe.yaml", "VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
        words = [*options, JOB, f"name={name}", *QUIET, *overrides]
        return slurm.sbatch(*words, env=settings | more, cwd=directory)

    return submit_run


def metrics(directory: Path, name: str) -> list[dict]:
    path = directory / "runs" / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def steps(directory: Path, name: str) -> list[int]:
    return [record["step"] for record in metrics(directory, name)]


def wait_for_step(slurm: MiniCluster, directory: Path, name: str, job: int, step: int) -> None:
    deadline = time.monotonic() + START_S
    while step not in steps(directory, name):
        assert slurm.job(job)["JobState"] not in ENDED, slurm.output(job)
        assert time.monotonic() < deadline, slurm.output(job)
        time.sleep(1.0)  # asking Slurm costs what the job could use


def kill(slurm: MiniCluster, job: int, words: str, node: str) -> None:
    """kill -9 the processes of a job on a node whose command contains `words`."""
    found = [p for p in slurm.processes(job) if p.machine == node and words in p.command]
    assert found, slurm.processes(job)
    for process in found:
        os.kill(process.pid, signal.SIGKILL)


def wait_until_gone(slurm: MiniCluster, job: int) -> None:
    deadline = time.monotonic() + 15
    while left := slurm.processes(job):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_warned_job_of_trainer_and_server_nodes_goes_on_after_a_requeue(slurm, submit, directory):
    """A warning, as Slurm sends it before the time limit."""
    job = submit(
        "warned",
        "train.steps=1000",
        "checkpoint.every=2",
        "actor.data_parallel=1",
        "rollout.servers=1",
        ROLLOUT_NODES="1",
    )
    wait_for_step(slurm, directory, "warned", job, 3)
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    slurm.wait_output(job, "ended with exit code 85")
    stopped = steps(directory, "warned")[-1]
    wait_for_step(slurm, directory, "warned", job, stopped + 1)
    slurm.scancel(job)
    slurm.wait(job, "CANCELLED")
    done = steps(directory, "warned")
    assert done == list(range(1, len(done) + 1))
    assert f"resuming from runs/warned/checkpoints/step_{stopped}" in slurm.output(job)
    attempts = directory / "runs" / "warned" / "attempts.jsonl"
    assert [json.loads(line) for line in attempts.read_text().splitlines()] == [
        {"attempt": f"{job}.0", "step": 0},
        {"attempt": f"{job}.1", "step": stopped},
    ]
    logs = directory / "runs" / "warned" / "logs" / f"{job}.1"
    assert not list(logs.glob("node_0_*/server_*")) and not list(logs.glob("node_1_*/rank_*"))
    assert len(list(logs.glob("node_1_*/server_0.log"))) == 1
    wait_until_gone(slurm, job)
    assert slurm.job(job)["JobState"] == "CANCELLED", "a cancelled job is not queued again"
    assert "Traceback" not in slurm.output(job)


@pytest.mark.timeout(600)
def test_the_run_goes_on_after_a_lost_server_rank_and_launcher(slurm, submit, directory):
    """A lost server costs no restart of the job: the launcher of its node starts it again."""
    job = submit("lost", "train.steps=1000", "checkpoint.every=1")
    wait_for_step(slurm, directory, "lost", job, 1)
    kill(slurm, job, "sglang.launch_server", node="n2")
    slurm.wait_output(job, "(1 of rollout.max_restarts 5)", timeout=60)
    deadline = time.monotonic() + START_S
    while not any(
        record["rollout/restarts"] == 1 and record["rollout/servers"] == 2
        for record in metrics(directory, "lost")
    ):
        assert time.monotonic() < deadline, slurm.output(job)
        time.sleep(0.5)
    kill(slurm, job, "-m megatron_opo train", node="n1")
    slurm.wait_output(job, "error: rank 0 was killed by signal 9", timeout=40)
    wait_for_step(slurm, directory, "lost", job, steps(directory, "lost")[-1] + 2)
    kill(slurm, job, "megatron-opo launch", node="n2")
    slurm.wait_output(job, "error: the launcher on n2 ended without a word", timeout=20)
    wait_for_step(slurm, directory, "lost", job, steps(directory, "lost")[-1] + 2)
    assert metrics(directory, "lost")[-1]["rollout/servers"] == 2
    slurm.scancel(job)
    slurm.wait(job, "CANCELLED")
    done = steps(directory, "lost")
    assert done == list(range(1, len(done) + 1))
    wait_until_gone(slurm, job)


def of_servers(slurm: MiniCluster) -> list[list[str]]:
    """Names in shared memory. Not a rank's own: one that waits for a lost node is killed by Slurm
    together with all that could remove them."""
    found = [slurm.shared_memory(node) for node in ("n1", "n3")]
    return [[name for name in names if not name.startswith("torch_")] for names in found]


def check_first_start(slurm: MiniCluster, directory: Path, job: int) -> None:
    """Of `test_two_nodes_train_and_go_on_without_one`."""
    for record in metrics(directory, "node"):
        assert record["rollout/servers"] == 2
        assert record["on_policy/logprob_gap_max"] < 1e-4
    logs = directory / "runs" / "node" / "logs" / f"{job}.0"
    for node, ranks in ((0, set()), (1, {"rank_1.log"})):
        place = logs / f"node_{node}_n{node + 1}"
        assert {path.name for path in place.iterdir()} == {f"server_{node}.log"} | ranks
        assert 'POST /generate HTTP/1.1" 200 OK' in (place / f"server_{node}.log").read_text()
        assert f"http://10.99.0.{node + 1}:" in (place / f"server_{node}.log").read_text()
    assert "\x1b" not in slurm.output(job)


def test_two_nodes_train_and_go_on_without_one(slurm, submit, directory):
    """With a server on each. No other job may train the run meanwhile; cancelled, it leaves
    nothing."""
    # Of jobs before, whose processes were killed.
    left = of_servers(slurm)
    job = submit(
        "node",
        "train.steps=1000",
        "checkpoint.every=1",
        "rollout.hand_over_memory=true",
        "sync.transport=shared_memory",
    )
    wait_for_step(slurm, directory, "node", job, 2)
    assert slurm.job(job)["NodeList"] == "n[1-2]"
    check_first_start(slurm, directory, job)

    second = submit("node", options=("--nodes=1", "--nodelist=n3"))
    ended = slurm.wait(second, "FAILED", timeout=60)
    assert ended["ExitCode"] == "2:0" and ended["Restarts"] == "0"
    assert "another run is training in" in slurm.output(second)

    slurm.power_off("n2")
    at = time.monotonic()
    deadline = at + START_S
    while "(n1 n3), start 2" not in slurm.output(job):
        assert time.monotonic() < deadline, slurm.output(job)
        time.sleep(1.0)
    assert time.monotonic() - at < 90, "the end of a node is noticed within a minute or so"
    trained = steps(directory, "node")[-1]
    wait_for_step(slurm, directory, "node", job, trained + 1)

    slurm.scancel(job)
    slurm.wait(job, "CANCELLED")
    done = steps(directory, "node")
    assert done == list(range(1, len(done) + 1))
    wait_until_gone(slurm, job)
    assert of_servers(slurm) == left
    time.sleep(6)  # longer than a requeued job waits
    assert slurm.job(job)["JobState"] == "CANCELLED"


def test_a_mistake_is_told_once_and_not_tried_again(slurm, submit):
    job = submit("mistake", "rollout.servers=3")
    ended = slurm.wait(job, "FAILED", timeout=60)
    said = slurm.output(job)
    assert ended["ExitCode"] == "2:0" and ended["Restarts"] == "0"
    assert said.count("error:") == 1 + said.count("srun: error:")
    assert "rollout.servers: 3 do not spread evenly over 2 nodes" in said


def test_an_array_is_a_sweep(slurm, submit, directory):
    lines = [
        "# rates",
        "optimizer.lr=1e-3 'rollout.server_args={max_total_tokens: 8192}'",
        "",
        "optimizer.lr=nonsense",
    ]
    (directory / "sweep.txt").write_text("\n".join(lines) + "\n")
    options = ("--array=0-2", "--nodes=1")
    job = submit("sweep", "rollout.servers=1", options=options, SWEEP="sweep.txt", CHECK_ONLY="1")
    deadline = time.monotonic() + 120
    while {entry["JobState"] for entry in slurm.jobs(job)} & {"PENDING", "RUNNING", "COMPLETING"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    found = {entry["ArrayTaskId"]: entry for entry in slurm.jobs(job)}
    assert {task: entry["ExitCode"] for task, entry in found.items()} == {
        "0": "0:0",
        "1": "2:0",
        "2": "2:0",
    }
    said = {task: Path(entry["StdOut"]).read_text() for task, entry in found.items()}
    assert "1 node is fit" in said["0"]
    assert "optimizer.lr" in said["1"] and "nonsense" in said["1"]
    assert "sweep.txt has no line for array task 2" in said["2"]


# In the place of the launcher: what the script does then.
LAUNCHER = """#!/bin/bash
echo "$SLURM_ARRAY_TASK_ID" >>"$KEPT"
{commands}
"""


def launcher(directory: Path, commands: str) -> dict[str, str]:
    path = directory / "bin" / "megatron-opo"
    path.parent.mkdir()
    path.write_text(LAUNCHER.format(commands=commands))
    path.chmod(0o755)
    return {"VENV": str(directory), "KEPT": str(directory / "kept")}


def wait_until_all_ended(slurm: MiniCluster, job: int) -> dict[str, dict[str, str]]:
    """The tasks of an array, by number."""
    deadline = time.monotonic() + 120
    found = slurm.jobs(job)
    while not {entry["JobState"] for entry in found} <= ENDED:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
        found = slurm.jobs(job)
    return {entry["ArrayTaskId"]: entry for entry in found}


def test_a_task_of_an_array_is_queued_again_alone(slurm, submit, tmp_path):
    """Also the last one, which has the id of the whole array."""
    commands = "[[ $SLURM_ARRAY_TASK_ID != 2 || ${SLURM_RESTART_COUNT:-0} != 0 ]] || exit 85"
    options = ("--array=0-2%1", "--nodes=1")
    job = submit("again", options=options, **launcher(tmp_path, commands))
    found = wait_until_all_ended(slurm, job)
    assert {task: entry["JobState"] for task, entry in found.items()} == dict.fromkeys(
        "012", "COMPLETED"
    )
    assert (tmp_path / "kept").read_text().split() == ["0", "1", "2", "2"]


def test_failures_are_counted_and_stops_before_the_time_limit_are_not(
    slurm, submit, directory, tmp_path
):
    commands = 'codes=(85 1 85 1 85); exit "${codes[${SLURM_RESTART_COUNT:-0}]}"'
    settings = launcher(tmp_path, commands) | {"MAX_RESTARTS": "1"}
    job = submit("count", options=("--nodes=1", "--hold"), **settings)
    count = directory / f".slurm_failures_{job}"
    count.write_text("of a cancelled job\n" * 5)
    slurm.run("scontrol", "release", str(job))
    ended = slurm.wait(job, "FAILED", timeout=180)
    assert ended["ExitCode"] == "1:0" and ended["Restarts"] == "3"
    assert not count.exists()


def test_a_sweep_that_cannot_be_read_trains_nothing(slurm, submit, directory, tmp_path):
    settings = launcher(tmp_path, "exit 0")
    (directory / "torn.txt").write_text("seed=1 data.note=it's optimizer.lr=1e-9\n")
    for options in (("--array=0", "--nodes=1"), ("--nodes=1",)):
        job = submit("torn", options=options, SWEEP="torn.txt", **settings)
        assert slurm.wait(job, "FAILED", timeout=30)["ExitCode"] == "2:0"
    assert "SWEEP is for job arrays" in slurm.output(job)
    assert not (tmp_path / "kept").exists()


def test_a_run_dir_that_cannot_be_used_is_a_mistake(slurm, submit):
    job = submit("nowhere", "run_dir=/dev/null/runs")
    ended = slurm.wait(job, "FAILED", timeout=60)
    assert ended["ExitCode"] == "2:0" and ended["Restarts"] == "0"
    assert "run_dir: /dev/null/runs" in slurm.output(job)


def stand_in(directory: Path, **scripts: str) -> dict[str, str]:
    """An environment in which these commands come before the real ones."""
    for name, text in scripts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "KEPT": str(directory / "kept"),
        "CONTAINER_IMAGE": str(directory / "opo image.sqsh"),
        "CHECK_ONLY": "1",
    }


def kept_words(directory: Path, name: str) -> list[str]:
    return (directory / f"kept.{name}").read_text().split("\0")[:-1]


def test_apptainer_runs_the_launchers_where_srun_knows_no_containers(
    slurm, submit, directory, tmp_path
):
    settings = stand_in(tmp_path, apptainer=APPTAINER, python3=PYTHON)
    job = submit("apptainer", CONTAINER_MOUNTS="/data:/data,/my models", **settings)
    slurm.wait(job, "COMPLETED", timeout=60)
    assert "2 nodes are fit: n1, n2" in slurm.output(job)
    for node in "01":
        words = kept_words(tmp_path, node)
        bind = ["--bind", f"{directory},/data:/data,/my models", "--pwd", str(directory)]
        assert words[:6] == ["exec", "--nv", *bind]
        image = [str(tmp_path / "opo image.sqsh"), "python3", "-m", "megatron_opo", "launch"]
        assert words[6:11] == image
        assert words[11:13] == ["recipe.yaml", "--check-only"]


def test_pyxis_runs_the_launchers_where_srun_knows_containers(slurm, submit, directory, tmp_path):
    settings = stand_in(tmp_path, srun=SRUN_WITH_PYXIS, python3=PYTHON)
    job = submit("pyxis", CONTAINER_MOUNTS="/data:/data,/models:/my models", **settings)
    slurm.wait(job, "COMPLETED", timeout=60)
    assert "2 nodes are fit: n1, n2" in slurm.output(job)
    words = kept_words(tmp_path, "srun")
    at = words.index("python3")
    assert [word for word in words[:at] if "container" in word] == [
        f"--container-image={tmp_path}/opo image.sqsh",
        f"--container-mounts={directory}:{directory},/data:/data,/models:/my models",
        f"--container-workdir={directory}",
        "--no-container-mount-home",
    ]
    assert words[at : at + 4] == ["python3", "-m", "megatron_opo", "launch"]


@pytest.mark.parametrize("place", ["nowhere", "/no where"])
def test_a_missing_environment_is_named_in_full(place, slurm, submit, directory):
    job = submit("missing", VENV=place)
    assert slurm.wait(job, "FAILED", timeout=30)["ExitCode"] == "2:0"
    path = directory / place / "bin" / "megatron-opo"
    assert f"error: {path} does not exist: make setup" in slurm.output(job)


def test_a_job_from_another_directory_says_so(slurm, tmp_path):
    job = slurm.sbatch(JOB, cwd=tmp_path)
    assert slurm.wait(job, "FAILED", timeout=30)["ExitCode"] == "2:0"
    assert "run sbatch in the project directory" in slurm.output(job)


def test_gpus_that_are_promised_and_absent_are_told_before_anything_starts(slurm, submit):
    job = submit("gpus", options=("--gpus-per-node=8",))
    ended = slurm.wait(job, "FAILED", timeout=60)
    assert ended["ExitCode"] == "2:0" and ended["Restarts"] == "0"
    assert "n2: Slurm gave this node 8 GPUs, torch sees 0" in slurm.output(job)


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("slurm/opo_*.sbatch")))
def test_job_scripts_ask_for_what_a_cluster_of_such_nodes_has(script, slurm, directory):
    words = ["sbatch", "--test-only", "--partition=h200", str(ROOT / "slurm" / script)]
    assert "to start at" in slurm.run(*words, cwd=directory).stderr


def test_70b_is_refused_where_there_are_not_enough_nodes(slurm, directory):
    script = str(ROOT / "slurm" / "opo_70b.sbatch")
    words = ["sbatch", "--test-only", "--partition=h200_half", script]
    refused = slurm.run(*words, cwd=directory, check=False)
    assert refused.returncode != 0
    assert "node configuration is not available" in refused.stderr
