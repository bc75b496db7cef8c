"""A job of several nodes, without Slurm: who does what, who meets whom, who may go on."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_opo.cluster import (
    Board,
    Job,
    ToldElsewhere,
    job_from_environment,
    lay_out,
    meet,
    wait_for_all,
)
from megatron_opo.errors import (
    ClusterError,
    RecipeError,
    TrainingError,
    UnfitEnvironmentError,
)
from megatron_opo.node import _depart, record_attempt
from megatron_opo.preflight import check_nodes, differences
from megatron_opo.recipe import Recipe
from megatron_opo.runs import ATTEMPT_VARIABLE, attempts, check_attempt, is_restart

SLURM = {
    "MEGATRON_OPO_NODES": "n1 n2 n3",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "42",
    "SLURM_RESTART_COUNT": "2",
}


def recipe(**sections) -> Recipe:
    base = {"name": "x", "model": {"path": "m"}, "data": {"train": {"files": ["f"]}}}
    return Recipe.model_validate(base | sections)


def test_the_job_is_what_slurm_says():
    assert job_from_environment(SLURM) == Job(("n1", "n2", "n3"), 1, "42.2")
    del SLURM["SLURM_RESTART_COUNT"]
    assert job_from_environment(SLURM).attempt == "42.0"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"SLURM_NODEID": ""}, "no SLURM_NODEID"),
        ({"MEGATRON_OPO_NODES": ""}, "no MEGATRON_OPO_NODES"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID is x"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, but MEGATRON_OPO_NODES names 3 nodes"),
    ],
)
def test_a_launcher_outside_a_job_is_refused(change, named):
    with pytest.raises(ClusterError, match=named):
        job_from_environment(SLURM | change)


def test_colocated_nodes_have_ranks_and_servers():
    layout = lay_out(
        recipe(actor={"tensor_parallel": 4}, rollout={"servers": 8, "tensor_parallel": 2}), 2, 8
    )
    assert layout.world_size == 16
    assert [layout.ranks_of(node) for node in range(2)] == [range(8), range(8, 16)]
    assert layout.servers_by_node == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_rollout_nodes_have_servers_only():
    layout = lay_out(recipe(rollout={"servers": 2, "tensor_parallel": 8, "nodes": 2}), 5, 8)
    assert layout.world_size == 24
    assert layout.ranks_of(3) == range(0)
    assert layout.servers_by_node == ((), (), (), (0,), (1,))


def test_servers_that_run_already_are_not_started():
    layout = lay_out(recipe(rollout={"urls": ["http://a:1"]}), 2, 8)
    assert layout.servers_by_node == ((), ())


@pytest.mark.parametrize(
    ("sections", "nodes", "gpus", "named"),
    [
        ({"rollout": {"nodes": 2}}, 2, 8, "rollout.nodes: 2 of the job's 2 nodes"),
        ({"rollout": {"servers": 3}}, 2, 8, "rollout.servers: 3 do not spread evenly over 2"),
        ({"rollout": {"servers": 4, "tensor_parallel": 8}}, 2, 8, "need 16 GPUs, a node has 8"),
        ({"actor": {"tensor_parallel": 3}, "rollout": {"servers": 2}}, 2, 8, "no multiple of 3"),
        ({"actor": {"data_parallel": 3}, "rollout": {"servers": 2}}, 2, 0, "3 trainer processes"),
    ],
)
def test_what_does_not_fit_the_nodes_is_refused(sections, nodes, gpus, named):
    with pytest.raises(RecipeError) as error:
        lay_out(recipe(**sections), nodes, gpus)
    assert named in str(error.value)


def on_nodes(directory: Path, work, count: int = 2) -> list:
    """`work(board)` as each launcher of a job, in threads; results or errors by node."""
    results: list = [None] * count
    boards = []  # a board that is gone would look like a launcher that is

    def run(node: int) -> None:
        try:
            board = meet(Job(("localhost",) * count, node, "1.0"), directory, 20)
            boards.append(board)
            results[node] = work(board)
            board.post_mine("finished", True)
            if node == 0:
                board.collect("finished", 20, "test")
        except Exception as error:
            results[node] = error

    threads = [threading.Thread(target=run, args=(node,)) for node in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_launchers_meet_compare_and_exchange(tmp_path):
    def work(board: Board) -> list[str]:
        return [node["host"] for node in check_nodes(board, tmp_path, "recipe")]

    assert on_nodes(tmp_path, work, 3) == [["localhost"] * 3] * 3


def test_a_node_with_another_recipe_is_named(tmp_path):
    def work(board: Board):
        return check_nodes(board, tmp_path, f"recipe {board.job.node == 2}")

    zero, one, two = on_nodes(tmp_path, work, 3)
    assert isinstance(zero, UnfitEnvironmentError)
    assert isinstance(one, ToldElsewhere) and isinstance(two, ToldElsewhere)
    assert "the resolved recipe (hash) differ: localhost has" in str(zero)


def test_launchers_leave_with_one_code(tmp_path):
    codes = {0: 3, 1: 137, 2: 3}
    assert on_nodes(tmp_path, lambda b: _depart(b, codes[b.job.node]), 3) == [137] * 3
    assert on_nodes(tmp_path / "b", lambda b: _depart(b, 85)) == [85] * 2
    assert on_nodes(tmp_path / "c", lambda b: _depart(b, 0)) == [0] * 2


def test_node_0_that_does_not_come_is_named(tmp_path):
    with pytest.raises(ClusterError, match=r"localhost waited 0 s for node 0 \(first\)"):
        meet(Job(("first", "localhost"), 1, "1.0"), tmp_path, 0.3)


def test_a_node_that_does_not_join_is_named(tmp_path):
    board = meet(Job(("localhost", "second"), 0, "1.0"), tmp_path)
    with pytest.raises(ClusterError, match=r"run_dir.*no word from second within 0 s"):
        wait_for_all(board, 0.3)


LAUNCHER = """
import sys
from pathlib import Path
from megatron_opo.cluster import Job, meet, wait_for_all

board = meet(Job(("localhost",) * 3, int(sys.argv[2]), "1.0"), Path(sys.argv[1]))
wait_for_all(board)
print("joined", flush=True)
sys.stdin.read()
"""


def test_a_launcher_that_is_killed_is_named_and_not_waited_for(tmp_path):
    board = meet(Job(("localhost", "second", "third"), 0, "1.0"), tmp_path)
    others = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), str(node)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in (1, 2)
    ]
    try:
        wait_for_all(board)
        for other in others:
            assert other.stdout.readline() == "joined\n"
        place = json.loads((tmp_path / "rendezvous.json").read_text())
        for words in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\1", f"{place['token']} 2".encode()):
            with socket.create_connection((place["address"], place["lifeline"])) as stranger:
                stranger.sendall(words)
        assert board.describe_lost() is None
        others[1].kill()
        start = time.monotonic()
        with pytest.raises(ClusterError, match=r"facts: the launcher on third ended without"):
            board.collect("facts", 30, "facts")
        board.post("exit/1", 3)
        board.post("read/1", True)
        assert _depart(board, 3) == 137
        assert time.monotonic() - start < 15
    finally:
        for other in others:
            other.kill()
            other.communicate()


def node(host: str, **facts) -> dict:
    return {
        "host": host,
        "code": "aa",
        "recipe": "bb",
        "versions": {"torch": "2.13.0"},
        "gpus": ["H200"] * 8,
        "time": 1000.0,
    } | facts


def test_nodes_that_stand_out_are_named_with_what_they_have():
    nodes = [node("n1"), node("n2", gpus=["H200"] * 7), node("n3", time=1100.0)]
    gpus, clock = differences([*nodes, node("n4", versions={"torch": "2.12.0"})][:3])
    assert "the GPUs differ: n2 has 7 x H200; the others have 8 x H200" in gpus
    assert "n3: its clock is +100 s off" in clock
    (versions,) = differences([node("n1"), node("n2"), node("n3", versions={"torch": "2.12.0"})])
    assert "n3 has torch 2.12.0; the others have torch 2.13.0" in versions
    assert differences([node("n1"), node("n2")]) == []


def make_checkpoint(run: Path, step: int) -> None:
    directory = run / "checkpoints" / f"step_{step}"
    directory.mkdir(parents=True)
    state = {"version": step, "cursor": {}, "recipe": {}}
    (directory / "state.json").write_text(json.dumps(state))


def test_a_job_without_progress_stops_at_its_third_start(tmp_path):
    for restart in range(2):
        record_attempt(tmp_path, f"7.{restart}")
    with pytest.raises(TrainingError, match="started at step 0 for the third time"):
        record_attempt(tmp_path, "7.2")
    record_attempt(tmp_path, "8.0")  # another job may try
    make_checkpoint(tmp_path, 5)
    for restart in range(1, 3):
        record_attempt(tmp_path, f"8.{restart}")
    with pytest.raises(TrainingError, match="at step 5"):
        record_attempt(tmp_path, "8.3")


def test_an_attempt_after_a_torn_line(tmp_path, monkeypatch):
    record_attempt(tmp_path, "7.0")
    with (tmp_path / "attempts.jsonl").open("a") as stream:
        stream.write('{"attempt": "7')
    monkeypatch.setenv(ATTEMPT_VARIABLE, "7.0")
    check_attempt(tmp_path)
    record_attempt(tmp_path, "7.1")
    assert [a["attempt"] for a in attempts(tmp_path)] == ["7.0", "7.1"]


def test_only_the_newest_start_of_a_job_may_write(tmp_path, monkeypatch):
    check_attempt(tmp_path)  # not in a job
    record_attempt(tmp_path, "7.0")
    monkeypatch.setenv(ATTEMPT_VARIABLE, "7.0")
    check_attempt(tmp_path)
    assert not is_restart(tmp_path)
    record_attempt(tmp_path, "7.1")
    with pytest.raises(ClusterError, match=r"start 7\.1 of the job has taken over"):
        check_attempt(tmp_path)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "7.1")
    assert is_restart(tmp_path)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "70.0")  # the next of a chain
    assert is_restart(tmp_path)
    monkeypatch.delenv(ATTEMPT_VARIABLE)
    assert not is_restart(tmp_path)
