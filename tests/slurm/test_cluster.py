"""The cluster of the tests does what a real one does, where our scripts depend on it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import MiniCluster, SlurmError

H200_JOB = "#SBATCH --nodes=16 --gpus-per-node=8 --ntasks-per-node=1 --cpus-per-task=96\n"


@pytest.fixture(scope="module", autouse=True)
def warned(slurm_cluster, tmp_path_factory):
    """A cluster and its job, which ends half a minute after all of these tests have begun."""
    directory = tmp_path_factory.mktemp("warned")
    script = directory / "job.sbatch"
    script.write_text(
        "#!/bin/bash\ntrap 'echo warned after $SECONDS s; exit 85' USR1\nsleep 300 & wait\n"
    )
    # Of its own, as the cluster of the other tests is emptied after each.
    with MiniCluster(directory, nodes=1) as cluster:
        yield cluster, cluster.sbatch("--time=1", "--signal=B:USR1@55", script)


@pytest.fixture
def submit(slurm, tmp_path):
    """submit(text, *options): a batch script of that text."""

    def submit_script(text: str, *options: str) -> int:
        script = tmp_path / "job.sbatch"
        script.write_text(f"#!/bin/bash\n{text}")
        return slurm.sbatch(*options, script, cwd=tmp_path)

    return submit_script


def test_nodes_have_names_addresses_and_gpus_of_their_own(slurm):
    shown = slurm.run(
        *("srun", "--nodes=3", "--gpus-per-node=8", "bash", "-c"),
        "echo $(hostname) $(getent hosts $(hostname)) $CUDA_VISIBLE_DEVICES $SLURM_NODELIST",
    )
    gpus = "0,1,2,3,4,5,6,7"
    assert sorted(shown.stdout.splitlines()) == [
        f"n{i} 10.99.0.{i} n{i} {gpus} n[1-3]" for i in (1, 2, 3)
    ]


def test_nodes_share_files_but_not_memory_or_ports(slurm, tmp_path):
    server = f"""
import os, socket
listener = socket.create_server(("0.0.0.0", 30000))
name = os.environ["SLURMD_NODENAME"]
open("/dev/shm/of_a_node", "x").write(name)
open({str(tmp_path)!r} + "/" + name, "x").close()
print(name, sum(entry.isdecimal() for entry in os.listdir("/proc")) < 30)
"""
    shown = slurm.run("srun", "--nodes=3", sys.executable, "-c", server)
    assert sorted(shown.stdout.splitlines()) == ["n1 True", "n2 True", "n3 True"]
    assert {path.name for path in tmp_path.iterdir()} == {"n1", "n2", "n3"}


def test_a_job_array(slurm, submit, tmp_path):
    job = submit("echo run $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_JOB_ID", "--array=3,5,7")
    slurm.wait(job, "COMPLETED")
    outputs = {Path(task["StdOut"]).read_text() for task in slurm.jobs(job)}
    assert outputs == {f"run {i} of {job}\n" for i in (3, 5, 7)}


def test_a_requeued_job_keeps_its_id_and_goes_on_soon(slurm, submit):
    job = submit(
        "echo attempt ${SLURM_RESTART_COUNT:-0} of $SLURM_JOB_ID\n"
        'if [ -z "${SLURM_RESTART_COUNT:-}" ]; then\n'
        "    scontrol requeue $SLURM_JOB_ID\n"
        "    sleep 60\n"
        "fi\n",
        "--open-mode=append",
    )
    slurm.wait_output(job, "attempt 0")
    start = time.monotonic()
    ended = slurm.wait(job, "COMPLETED", timeout=15)
    assert time.monotonic() - start < 15
    assert ended["Restarts"] == "1"
    lines = [line for line in slurm.output(job).splitlines() if line.startswith("attempt")]
    assert lines == [f"attempt 0 of {job}", f"attempt 1 of {job}"]


def test_a_rank_that_fails_ends_the_step(slurm, submit):
    # Without --wait, other ranks stay when one fails so soon that they are still being started.
    job = submit(
        "srun --kill-on-bad-exit --wait=5 bash -c"
        " '[ $SLURM_PROCID = 1 ] && kill -KILL $$; sleep 300'; echo ended with $?\n",
        "--nodes=3",
    )
    slurm.wait(job, "COMPLETED")
    output = slurm.output(job)
    # Of all codes the largest, not that of the rank that failed first; the others got a TERM.
    assert "ended with 137" in output or "ended with 143" in output


def test_jobs_of_a_lost_node_are_requeued(slurm, submit):
    text = "echo attempt ${SLURM_RESTART_COUNT:-0}\nsrun sleep 300\n"
    silent = submit(text, "--nodes=2", "--nodelist=n[1,2]", "--output=silent")
    crashed = submit(text, "--nodes=2", "--nodelist=n[1,3]", "--output=crashed")
    both = (silent, crashed)
    for job, node in zip(both, ("n2", "n3"), strict=True):
        slurm.wait_output(job, "attempt 0")
        slurm.wait_processes(job, node)
    slurm.power_off("n2")
    slurm.kill_slurmd("n3")
    for job in both:
        assert slurm.wait(job, "PENDING", timeout=60)["Restarts"] == "1"
    # What a script must reckon with: where only slurmd has died, the job's processes live on.
    assert [process.machine for process in slurm.processes(crashed)] == ["n3"]
    assert slurm.processes(silent) == []
    slurm.start_node("n2")
    slurm.start_node("n3")
    for job in both:
        slurm.wait(job, "RUNNING")
        slurm.wait_output(job, "attempt 1")


def test_scancel_leaves_no_process(slurm, submit):
    job = submit("srun bash -c 'sleep 301 & sleep 302 & wait'\n", "--nodes=3")
    for node in slurm.nodes:
        slurm.wait_processes(job, node)
    running = slurm.processes(job)
    slurm.scancel(job)
    slurm.wait(job, "CANCELLED")
    assert slurm.processes(job) == []
    assert not any(Path(f"/proc/{process.pid}").exists() for process in running)


def test_a_plan_for_16_nodes_needs_16_nodes(slurm, tmp_path):
    script = tmp_path / "big.sbatch"
    script.write_text(f"#!/bin/bash\n{H200_JOB}srun true\n")
    fits = slurm.run("sbatch", "--test-only", "--partition=h200", script)
    assert "h[001-016]" in fits.stderr
    for partition in ("h200_half", "debug"):
        refused = slurm.run(
            "sbatch", "--test-only", f"--partition={partition}", script, check=False
        )
        assert refused.returncode != 0
        assert "Requested node configuration is not available" in refused.stderr


def test_an_outer_job_does_not_show(slurm, submit, monkeypatch):
    """The tests themselves may run inside a Slurm job, which must not reach ours."""
    monkeypatch.setenv("SLURM_JOB_ID", "987654")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    job = submit("echo $SLURM_JOB_ID ${SBATCH_PARTITION:-none}\n")
    slurm.wait(job, "COMPLETED")
    assert slurm.output(job) == f"{job} none\n"


def test_a_second_cluster_at_the_same_time(slurm, submit, tmp_path):
    ours = submit("sleep 300\n")
    slurm.wait_processes(ours, "n1")
    with MiniCluster(tmp_path / "second", nodes=1) as second:
        script = tmp_path / "job.sbatch"
        # Up to the same job id, so that a mix-up would show.
        theirs = 0
        while theirs < ours:
            theirs = second.sbatch("--hold" if theirs + 1 < ours else "--parsable", script)
        second.wait_processes(theirs, "n1")
        pids = {process.pid for process in second.processes(theirs)}
        assert not pids & {process.pid for process in slurm.processes(ours)}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert slurm.job(ours)["JobState"] == "RUNNING"
    assert slurm.processes(ours)


def processes_that_name(text: str) -> list[str]:
    """Command lines of all processes of the machine in which `text` occurs."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words:
            lines.append(words)
    return lines


def test_a_failed_start_says_why_and_leaves_nothing(slurm, tmp_path):
    with (
        pytest.raises(SlurmError, match="NoSuchOption"),
        MiniCluster(tmp_path, nodes=1, extra_conf="NoSuchOption=1"),
    ):
        pass
    assert processes_that_name(str(tmp_path)) == []


def test_a_killed_test_run_leaves_nothing(slurm, tmp_path):
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from cluster import MiniCluster
with MiniCluster(Path({str(tmp_path)!r}), nodes=1) as slurm:
    script = slurm.directory / "job.sbatch"
    script.write_text("#!/bin/bash\\nsetsid sleep 300 & sleep 300\\n")
    slurm.wait_processes(slurm.sbatch(script), "n1")
    print("up", flush=True)
    input()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "up\n"
    assert len(processes_that_name(str(tmp_path))) >= 4
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    deadline = time.monotonic() + 10
    while (left := processes_that_name(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_the_batch_script_is_warned_before_the_time_limit(warned):
    cluster, job = warned
    assert cluster.wait(job, "FAILED", timeout=40)["ExitCode"] == "85:0"
    assert "warned after" in cluster.output(job)
