"""A checkpoint's files: whole or not there, checked, and dropped by rule."""

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_opo.checkpoint_files import (
    CHECKSUMS,
    drop_old,
    make_partial,
    partial_directory,
    problem_with,
    publish,
    read_checksums,
    remove_leftovers,
    set_aside,
    split_by_size,
    to_drop,
)
from megatron_opo.errors import CheckpointError
from megatron_opo.runs import ATTEMPT_VARIABLE, CHECKPOINTS, complete_checkpoints, latest_checkpoint
from tests.ranks import run_ranks

CONTENTS = {"a.distcp": bytes(range(256)) * 40, "b.distcp": b"b", ".metadata": b""}


def write_checkpoint(run_path: Path, step: int, **keep) -> Path:
    """As rank 0 does it; `keep` as for `drop_old`."""
    partial = partial_directory(run_path, step)
    make_partial(partial)
    for name, data in CONTENTS.items():
        (partial / name).write_bytes(data + str(step).encode())
    final = run_path / CHECKPOINTS / f"step_{step}"
    state = f'{{"version": {step}, "cursor": {{}}, "recipe": {{}}}}'
    publish(partial, final, {}, state.encode())
    drop_old(run_path, **({"keep": 9, "keep_every": 0, "best": None} | keep))
    return final


def problems(directory: Path) -> list[str]:
    digests = read_checksums(directory)
    found = [problem_with(directory / name, value) for name, value in digests.items()]
    return [problem for problem in found if problem]


def test_sha256sum_agrees_and_every_file_is_covered(tmp_path):
    final = write_checkpoint(tmp_path, 4)
    covered = read_checksums(final)
    assert {*covered, CHECKSUMS} == {path.name for path in final.iterdir()}
    assert list(covered)[-1] == "state.json"
    command = ["sha256sum", "--strict", "--check", CHECKSUMS]
    checked = subprocess.run(command, cwd=final, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.count(": OK\n") == len(covered)


def test_damage_is_named(tmp_path):
    final = write_checkpoint(tmp_path, 4)
    assert problems(final) == []
    whole = (final / "a.distcp").read_bytes()
    (final / "a.distcp").write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    (final / "b.distcp").unlink()
    (final / ".metadata").unlink()
    (final / ".metadata").mkdir()
    assert len(problems(final)) == 3
    found = "\n".join(problems(final))
    assert re.search(
        r"^a\.distcp is damaged \(sha256 \w{16}\.\.\., written as \w{16}\.", found, re.M
    )
    assert "b.distcp is missing" in found
    assert ".metadata cannot be read (Is a directory)" in found
    lines = (final / CHECKSUMS).read_bytes()
    for cut in (lines[: len(lines) // 2], b"", b"\xff\xfe", b"nonsense\n"):
        (final / CHECKSUMS).write_bytes(cut)
        with pytest.raises(CheckpointError, match=CHECKSUMS):
            read_checksums(final)
    (final / CHECKSUMS).unlink()
    assert read_checksums(final) is None


def kill_at_every_operation(run: str, snapshots: str) -> int:
    """Save step 1, then step 2 with keep=1 over and over, killed one operation later each time;
    keep what each left. The number of operations that there were."""
    run_path, count, at = Path(run), 0, 0
    names = ("fsync", "rename", "unlink", "rmdir", "mkdir")
    originals = {name: getattr(os, name) for name in names}

    def mortal(name: str):
        def call(*arguments, **options):
            nonlocal count
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return originals[name](*arguments, **options)

        return call

    while True:
        shutil.rmtree(run_path, ignore_errors=True)
        write_checkpoint(run_path, 1)
        child = os.fork()
        if child == 0:
            for name in names:
                setattr(os, name, mortal(name))
            write_checkpoint(run_path, 2, keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        shutil.copytree(run_path, Path(snapshots) / str(at))
        if not os.WIFSIGNALED(status):
            return at
        at += 1


def test_killed_at_any_operation_there_is_a_whole_checkpoint(tmp_path):
    snapshots = tmp_path / "left"
    (operations,) = run_ranks(1, kill_at_every_operation, str(tmp_path / "run"), str(snapshots))
    assert operations > 15
    newest = []
    for at in range(operations + 1):
        left = snapshots / str(at)
        found = complete_checkpoints(left)
        assert found and all(problems(directory) == [] for directory in found), at
        newest.append(latest_checkpoint(left).version)
        remove_leftovers(left)
        assert sorted(found) == sorted((left / CHECKPOINTS).iterdir()), at
    assert newest == sorted(newest) and newest[0] == 1 and newest[-1] == 2
    assert [path.name for path in complete_checkpoints(snapshots / str(operations))] == ["step_2"]


def test_everything_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """What a machine that stops would keep: the order in which things are flushed and named."""
    done = []
    fsync, rename = os.fsync, os.rename
    where = lambda number: Path(os.readlink(f"/proc/self/fd/{number}"))  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(where(number)), fsync(number)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    final = write_checkpoint(tmp_path, 4)
    partial, renamed = partial_directory(tmp_path, 4), done.index("rename")
    last = {name: max(i for i, what in enumerate(done) if what == partial / name)
            for name in ("state.json", CHECKSUMS, *CONTENTS)}  # fmt: skip
    assert max(last[name] for name in CONTENTS) < last[CHECKSUMS] < last["state.json"]
    assert done[last["state.json"] - 1] == partial, "all other names are on the disk before it"
    assert done[last["state.json"] + 1 : renamed + 2] == [partial, "rename", final.parent]


def test_a_step_that_is_written_again_replaces_what_was_there(tmp_path):
    final = write_checkpoint(tmp_path, 4)
    (final / "a.distcp").write_bytes(b"other")
    assert write_checkpoint(tmp_path, 4) == final and problems(final) == []
    remove_leftovers(tmp_path)
    assert list((tmp_path / CHECKPOINTS).iterdir()) == [final]


def test_a_damaged_one_is_set_aside_and_never_counts(tmp_path):
    first = set_aside(write_checkpoint(tmp_path, 4))
    second = set_aside(write_checkpoint(tmp_path, 4))
    assert first.name == "step_4.damaged" and second.name.startswith("step_4.")
    remove_leftovers(tmp_path)
    assert {first, second} == set((tmp_path / CHECKPOINTS).iterdir())
    assert complete_checkpoints(tmp_path) == []


def test_each_start_of_a_job_writes_in_a_place_of_its_own(tmp_path, monkeypatch):
    assert partial_directory(tmp_path, 3).name == "step_3.partial"
    monkeypatch.setenv(ATTEMPT_VARIABLE, "42.1")
    left = partial_directory(tmp_path, 3)
    left.mkdir(parents=True)
    assert left.name == "step_3.42.1.partial"
    monkeypatch.setenv(ATTEMPT_VARIABLE, "42.2")
    assert partial_directory(tmp_path, 3) != left
    remove_leftovers(tmp_path)
    assert not left.exists()


@given(
    st.sets(st.integers(0, 60), max_size=20),
    st.integers(1, 6),
    st.integers(0, 12),
    st.none() | st.integers(0, 60),
)
def test_what_is_dropped_is_old_and_nothing_that_was_asked_for(steps, keep, keep_every, best):
    order = list(steps)
    random.Random(keep).shuffle(order)
    dropped = to_drop(order, keep=keep, keep_every=keep_every, best=best)
    kept = steps - set(dropped)
    assert len(dropped) == len(set(dropped)) and set(dropped) <= steps
    for step in steps:
        newer = sum(other > step for other in steps)
        divides = keep_every > 0 and step in range(0, 61, keep_every)
        assert (step in kept) == (newer < keep or divides or step == best)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_shares_hold_every_file_once_and_none_much_more_than_another(sizes, shares):
    with tempfile.TemporaryDirectory() as place:
        for i, size in enumerate(sizes):
            (Path(place) / str(i)).write_bytes(bytes(size))
        names = [*map(str, range(len(sizes))), "missing"]
        split = split_by_size(Path(place), names, shares)
    assert len(split) == shares
    assert sorted(name for share in split for name in share) == sorted(names)
    loads = [sum(sizes[int(name)] for name in share if name != "missing") for share in split]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_a_disk_without_room_is_found_before_anything_is_begun(tmp_path):
    (error,) = run_ranks(1, make_partial_with_small_files, str(tmp_path / "step_1.partial"))
    assert "File too large" in error


def make_partial_with_small_files(partial: str) -> str:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(OSError) as caught:
        make_partial(Path(partial))
    return str(caught.value)
