"""Checkpoints that are written while training goes on: real ranks, held, killed and failing."""

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_opo.errors import CheckpointError, DataError
from megatron_opo.runs import CHECKPOINTS, complete_checkpoints, latest_checkpoint
from tests.actor_cases import _step, open_actor, open_writer, save
from tests.models import tiny_qwen3
from tests.ranks import RankError, run_ranks

LAYOUTS = {
    "DP2": ["actor.data_parallel=2"],
    "DP2, bf16, optimizer not sharded": [
        "actor.data_parallel=2",
        "model.dtype=bfloat16",
        "optimizer.distributed=false",
    ],
    "TP2, memory away": ["actor.tensor_parallel=2"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_qwen3(tmp_path_factory.mktemp("writer") / "model"))


@contextmanager
def held_writing():
    """The files of a checkpoint are begun when the block ends, or what it gives is set."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original, may_write = FileSystemWriterAsync.write_preloaded_data, threading.Event()

    def write(*arguments):
        assert may_write.wait(60)
        return original(*arguments)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    try:
        yield may_write
    finally:
        may_write.set()
        FileSystemWriterAsync.write_preloaded_data = staticmethod(original)


def state_of(actor) -> list[torch.Tensor]:
    """A copy of all that training changes on this rank: weights, main weights and moments."""
    from megatron_opo.actor.checkpoint import optimizer_states

    found = [parameter for module in actor.modules for parameter in module.parameters()]
    for optimizer, parameter in optimizer_states(actor):
        state = optimizer.state[parameter]
        found += [parameter, *(torch.as_tensor(state[name]) for name in sorted(state))]
    return [tensor.detach().clone() for tensor in found]


def draw() -> list[float]:
    return [random.random(), np.random.rand(), float(np.random.randn()), torch.rand(()).item()]


def train_beside_a_held_checkpoint(model: str, run_dir: str, overrides: list[str], away: bool):
    from megatron_opo.actor.checkpoint import load_checkpoint

    actor = open_actor(model, run_dir, overrides)
    writer = open_writer(actor)
    _step(actor)
    np.random.randn()  # numpy keeps the second of each pair for later
    if away:
        actor.memory.give_away()
    before = state_of(actor)
    cursor = {"row": 7}
    with held_writing():
        writer.start(actor, lambda: {"cursor": cursor})
        cursor = {"row": 8}
        draws = draw()
        actor.memory.take_back()
        for _ in range(2):
            _step(actor)
            if away:  # into the very memory on the host that the state lay in
                actor.memory.give_away()
                actor.memory.take_back()
            assert writer.poll() == {}
        assert complete_checkpoints(actor.recipe.run_path) == []
    # Nobody asks for it: a rollout may go on for long.
    while not complete_checkpoints(actor.recipe.run_path):
        time.sleep(0.01)
    metrics = writer.wait()
    assert not any(torch.equal(a, b) for a, b in zip(before, state_of(actor), strict=True))
    checkpoint = latest_checkpoint(actor.recipe.run_path)
    assert checkpoint is not None
    load_checkpoint(actor, checkpoint)
    same = all(torch.equal(a, b) for a, b in zip(before, state_of(actor), strict=True))
    return same, draw() == draws, actor.version, checkpoint.cursor, metrics


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_meanwhile_changes_nothing_of_what_is_written(layout, model, tmp_path):
    run_dir, away = tmp_path / "run", "away" in layout
    arguments = (model, str(run_dir), LAYOUTS[layout], away)
    results = run_ranks(2, train_beside_a_held_checkpoint, *arguments)
    for same, same_draws, version, cursor, _ in results:
        assert (same, same_draws, version, cursor) == (True, True, 1, {"row": 7})
    metrics, nothing = (result[-1] for result in results)
    assert metrics["checkpoint/write_seconds"] > 0 and nothing == {}
    files = (run_dir / CHECKPOINTS / "step_1").glob("*[0-9].*")  # of ranks
    assert metrics["checkpoint/bytes"] == sum(path.stat().st_size for path in files)


def save_often(model: str, run_dir: str):
    """Which checkpoints there are before each of six, and after the last."""
    keep = ["checkpoint.keep=1", "checkpoint.keep_every=3", "checkpoint.keep_best=true"]
    actor = open_actor(model, run_dir, keep)
    writer, found = open_writer(actor), []
    best = {"metric": "eval/avg@1", "value": 0.5, "step": 2}

    def look() -> dict:
        found.append([path.name for path in complete_checkpoints(actor.recipe.run_path)])
        return {"cursor": {}, "best_eval": best, "run_id": "abc"}

    _step(actor)
    for version in range(1, 7):
        actor.version = version
        writer.start(actor, look)  # which is asked when the one before is complete
    writer.wait()
    look()
    newest = latest_checkpoint(actor.recipe.run_path)
    assert newest is not None and newest.best_eval is not None
    return found, newest.best_eval.step, newest.run_id


def test_the_newest_the_best_and_every_third_are_kept(model, tmp_path):
    ((found, best, run_id),) = run_ranks(1, save_often, model, str(tmp_path / "run"))
    assert found == [
        [], ["step_1"], ["step_2"], ["step_2", "step_3"], ["step_2", "step_3", "step_4"],
        ["step_2", "step_3", "step_5"], ["step_2", "step_3", "step_6"],
    ]  # fmt: skip
    assert (best, run_id) == (2, "abc")


def end_with(model: str, run_dir: str, interrupted: bool):
    """An error while a checkpoint is written, or on rank 0 an interrupt."""
    actor = open_actor(model, run_dir, ["actor.data_parallel=2"])
    _step(actor)
    error = KeyboardInterrupt if interrupted and actor.parallel.rank == 0 else DataError
    with pytest.raises(error), held_writing() as may_write, open_writer(actor) as writer:
        writer.start(actor, lambda: {"cursor": {}})
        if error is DataError:
            may_write.set()
        else:
            give_up = writer._writing.give_up
            writer._writing.give_up = lambda: (give_up(), may_write.set())
        raise error("no more prompts")
    return threading.active_count()


def test_an_error_that_all_ranks_meet_completes_what_is_being_written(model, tmp_path):
    assert run_ranks(2, end_with, model, str(tmp_path / "run"), False) == [1, 1]
    assert latest_checkpoint(tmp_path / "run").version == 1


def test_an_error_of_another_kind_gives_it_up(model, tmp_path):
    assert run_ranks(2, end_with, model, str(tmp_path / "run"), True) == [1, 1]
    assert latest_checkpoint(tmp_path / "run") is None
    assert [path.name for path in (tmp_path / "run" / CHECKPOINTS).iterdir()] == ["step_1.partial"]


def die_while_writing(model: str, run_dir: str):
    """A checkpoint, and another one in the midst of which rank 1 is killed."""
    actor = open_actor(model, run_dir, ["actor.tensor_parallel=2"])
    _step(actor)
    save(actor, {"row": 7})
    _step(actor)
    writer = open_writer(actor)
    if actor.parallel.rank == 1:
        fsync = os.fsync

        def last(number: int) -> None:
            if "__1_" in os.readlink(f"/proc/self/fd/{number}"):
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(number)

        os.fsync = last
    writer.start(actor, lambda: {"cursor": {"row": 8}})
    writer.wait()


def resume(model: str, run_dir: str, overrides: list[str]):
    from megatron_opo.actor.checkpoint import find_whole_checkpoint, load_checkpoint

    actor = open_actor(model, run_dir, overrides)
    try:
        found = find_whole_checkpoint(actor.recipe.run_path, actor.parallel)
    except CheckpointError as error:
        return str(error)
    load_checkpoint(actor, found.checkpoint)
    _step(actor)
    damaged = {path.name: problem for path, problem in found.damaged.items()}
    return found.version, actor.version, damaged, found.unverified


def test_killed_in_the_midst_of_writing_it_resumes_from_the_one_before(model, tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(RankError):
        run_ranks(2, die_while_writing, model, str(run_dir))
    left = {path.name for path in (run_dir / CHECKPOINTS).iterdir()}
    assert left == {"step_1", "step_2.partial"}
    (first, second) = run_ranks(2, resume, model, str(run_dir), ["actor.tensor_parallel=2"])
    assert first == second == (1, 2, {}, False)


@contextmanager
def small_disk(directory: Path, megabytes: int):
    """A file system of that size, where one may be made: whether it was."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", directory]
    made = os.geteuid() == 0 and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", directory], check=True)


def save_where_there_is_no_room(model: str, run_dir: str, limit_files: bool):
    import resource

    actor = open_actor(model, run_dir, ["actor.tensor_parallel=2"])
    _step(actor)
    save(actor, {"row": 7})
    _step(actor)
    if limit_files and actor.parallel.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    writer = open_writer(actor)
    writer.start(actor, lambda: {"cursor": {"row": 8}})
    with pytest.raises(CheckpointError) as caught:
        writer.wait()
    return str(caught.value)


def check_failed_write(model: str, run_dir: Path, limit_files: bool) -> None:
    messages = run_ranks(2, save_where_there_is_no_room, model, str(run_dir), limit_files)
    assert messages[0] == messages[1]
    assert "step_2.partial: cannot be written (rank " in messages[0]
    expected = "rank 1: [Errno 27] File too large" if limit_files else "[Errno 28] No space left"
    assert expected in messages[0]
    assert "earlier checkpoints are untouched" in messages[0]
    assert [path.name for path in (run_dir / CHECKPOINTS).iterdir()] == ["step_1"]
    assert latest_checkpoint(run_dir).cursor == {"row": 7}


def test_a_full_disk_is_the_same_error_on_all_ranks(model, tmp_path):
    size = (Path(model) / "model.safetensors").stat().st_size
    # Weights, main weights, two moments: room for one and a half checkpoints.
    with small_disk(tmp_path / "disk", int(size * 4 * 1.5 / 2**20) + 2) as made:
        check_failed_write(model, tmp_path / "disk" / "run", limit_files=not made)


def test_a_write_that_fails_on_one_rank_is_the_same_error_on_all(model, tmp_path):
    check_failed_write(model, tmp_path / "run", limit_files=True)


def train_and_save_thrice(model: str, run_dir: str):
    actor = open_actor(model, run_dir, ["actor.tensor_parallel=2", "checkpoint.keep=3"])
    for row in (7, 8, 9):
        _step(actor)
        save(actor, {"row": row})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(model, tmp_path):
    run_dir = tmp_path / "run"
    run_ranks(2, train_and_save_thrice, model, str(run_dir))
    steps = [run_dir / CHECKPOINTS / f"step_{step}" for step in (1, 2, 3)]
    shutil.copytree(steps[0], tmp_path / "old")
    flip(steps[2] / "__1_0.distcp")
    (steps[1] / "__0_0.distcp").unlink()
    tp2 = ["actor.tensor_parallel=2"]
    first, second = run_ranks(2, resume, model, str(run_dir), tp2)
    assert first == second
    version, trained, damaged, unverified = first
    assert (version, trained, unverified) == (1, 2, False)
    assert damaged["step_3"].startswith("__1_0.distcp is damaged (sha256 ")
    assert damaged["step_2"] == "__0_0.distcp is missing"
    # What the last one says of itself is damaged.
    flip(steps[0] / "state.json")
    texts = run_ranks(2, resume, model, str(run_dir), tp2)
    assert texts[0] == texts[1]
    assert "no checkpoint is whole" in texts[0] and "--fresh" in texts[0]
    assert all(f"step_{step}: " in texts[0] for step in (1, 2, 3))
    # One from before there were checksums, and another whose file is shorter than it must be.
    for step in (steps[1], steps[2]):
        shutil.rmtree(step)
        shutil.copytree(tmp_path / "old", step)
        (step / "checksums.sha256").unlink()
    os.truncate(steps[2] / "__0_0.distcp", 1000)
    first, second = run_ranks(2, resume, model, str(run_dir), tp2)
    assert first == second
    assert first[:2] == (1, 2) and first[3] and "__0_0.distcp is truncated" in first[2]["step_3"]


def load_and_save(model: str, run_dir: str, overrides: list[str], target: str) -> list | None:
    """Bring a checkpoint into another layout; what this rank holds, where it holds everything."""
    from megatron_opo.actor.checkpoint import load_checkpoint

    actor = open_actor(model, target, overrides)
    checkpoint = latest_checkpoint(Path(run_dir))
    if checkpoint is None:
        _step(actor)
        _step(actor)
    else:
        load_checkpoint(actor, checkpoint)
    save(actor, {})
    return state_of(actor) if actor.parallel.world_size == 1 else None


def test_moments_are_the_same_to_the_bit_after_a_round_trip_through_other_layouts(model, tmp_path):
    layouts = [
        (1, []),
        (2, ["actor.tensor_parallel=2"]),
        (2, ["actor.pipeline_parallel=2"]),
        (2, ["actor.data_parallel=2"]),
        (1, []),
    ]
    states, source = [], tmp_path / "none"
    for i, (ranks, overrides) in enumerate(layouts):
        target = tmp_path / str(i)
        states.append(
            run_ranks(ranks, load_and_save, model, str(source), overrides, str(target))[0]
        )
        source = target
    first, last = states[0], states[-1]
    assert len(first) == len(last) > 100
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
