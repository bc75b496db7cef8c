"""Directories written by streaming: what is in memory meanwhile, what is left after a failure."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_opo.errors import CheckpointError, WeightError
from megatron_opo.weights import new_directory
from megatron_opo.weights.hf_config import read_architecture
from megatron_opo.weights.megatron_save import save_megatron
from megatron_opo.weights.save import save_hf
from megatron_opo.weights.streaming import WRITE_BYTES, FileStream, StreamedFile
from tests.models import tiny_llama
from tests.ranks import RankError, run_ranks

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


def shapes(source: Path) -> dict[str, tuple[int, ...]]:
    return read_architecture(json.loads((source / "config.json").read_text())).hf_shapes()


def weights(source: Path) -> dict[str, torch.Tensor]:
    loaded = load_file(source / "model.safetensors")
    return {name: loaded[name] for name in shapes(source)}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_shards_are_as_hugging_face_has_them_in_whatever_order_tensors_come(source, tmp_path):
    tensors = weights(source)
    save_hf(tmp_path / "a", tensors.items(), source=source, max_shard_bytes=10**6)
    save_hf(tmp_path / "b", reversed(tensors.items()), source=source, max_shard_bytes=10**6)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(tensors)
    assert list(index["weight_map"].values()) == sorted(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for file in files:
        part = load_file(tmp_path / "a" / file)
        assert set(part) == {name for name, f in index["weight_map"].items() if f == file}
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in part.items())
        assert sum(tensor.nbytes for tensor in part.values()) <= 10**6


def test_only_the_tensors_in_flight_are_in_memory(source, tmp_path):
    """A shard, or the whole model, would be several times as much."""
    largest = max(tensor.nbytes for tensor in weights(source).values())
    alive, high = 0, 0

    def gone(num_bytes: int) -> None:
        nonlocal alive
        alive -= num_bytes

    def fresh():
        nonlocal alive, high
        for name, shape in shapes(source).items():
            tensor = torch.ones(shape)
            alive += tensor.nbytes
            high = max(high, alive)
            weakref.finalize(tensor.untyped_storage(), gone, tensor.nbytes)
            yield name, tensor
            del tensor

    save_hf(tmp_path / "hf", fresh(), source=source, buffer_bytes=2 * largest)
    total = sum(tensor.nbytes for tensor in weights(source).values())
    assert high <= 4 * largest < total / 4
    assert alive <= largest


def test_progress_counts_every_byte(source, tmp_path):
    seen = []
    save_hf(
        tmp_path / "hf",
        weights(source).items(),
        source=source,
        max_shard_bytes=10**6,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    size = sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert {total for _, total in seen} == {size}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (size, size)


def _without(tensors):
    del tensors[UP]


BAD_WEIGHTS = {
    "missing": (_without, rf"38 tensors .* config\.json implies 39: {UP} missing"),
    "misshapen": (lambda t: t.update({UP: t[UP][:-1]}), rf"`{UP}` .*\[383, 128\], must be"),
    "transposed": (lambda t: t.update({UP: t[UP].t()}), rf"`{UP}` .*\[128, 384\], must be"),
    "other dtype": (lambda t: t.update({UP: t[UP].double()}), rf"`{UP}` .*float64 .*float32"),
    "unexpected": (lambda t: t.update(extra=torch.ones(1)), "`extra` was to be saved twice, or"),
    "none": (lambda t: t.clear(), "no tensors were to be saved"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_are_not_the_configs_are_refused(case, source, tmp_path):
    tensors, taken = weights(source), []
    edit, message = BAD_WEIGHTS[case]
    edit(tensors)
    pairs = (taken.append(name) or (name, tensor) for name, tensor in tensors.items())
    with pytest.raises(WeightError, match=message):
        save_hf(tmp_path / "hf", pairs, source=source)
    assert list(tmp_path.iterdir()) == []
    # Where ranks take part in producing them, the caller runs them to their end.
    deque(pairs, maxlen=0)
    assert taken == list(tensors)


def test_a_tensor_that_comes_twice_is_refused(source, tmp_path):
    pairs = list(weights(source).items())
    with pytest.raises(WeightError, match="was to be saved twice"):
        save_hf(tmp_path / "hf", [*pairs, pairs[3]], source=source)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_written(source, tmp_path, monkeypatch):
    def usage(path):
        assert Path(path) == tmp_path, "the nearest directory that exists"
        return shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    taken = []
    pairs = (taken.append(name) or (name, tensor) for name, tensor in weights(source).items())
    target = tmp_path / "a" / "b" / "hf"
    with pytest.raises(CheckpointError) as error:
        save_hf(target, pairs, source=source)
    size = sum(tensor.nbytes for tensor in weights(source).values())
    assert f"{target} needs {size / 1e6:.1f} MB of disk, but only 1.0 MB are free" in str(
        error.value
    )
    assert len(taken) == 1
    assert list(tmp_path.iterdir()) == []


def save_with_small_files(source: str, target: str) -> str:
    """The error where files cannot grow past 60 kB and a tensor waits for the one before it."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    try:
        save_hf(Path(target), weights(Path(source)).items(), source=Path(source), buffer_bytes=1)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_failed_write_ends_the_wait_for_room(source, tmp_path):
    (error,) = run_ranks(1, save_with_small_files, str(source), str(tmp_path / "hf"))
    assert re.search("hf cannot be written: .*File too large", error)
    assert list(tmp_path.iterdir()) == []


def die_while_saving(source: str, target: str) -> None:
    def pairs():
        for i, pair in enumerate(weights(Path(source)).items()):
            if i == 20:
                os.kill(os.getpid(), 9)
            yield pair

    save_hf(Path(target), pairs(), source=Path(source))


def test_what_a_killed_process_left_is_removed_by_the_next_save(source, tmp_path):
    target = tmp_path / "hf"
    with pytest.raises(RankError, match="died without an answer"):
        run_ranks(1, die_while_saving, str(source), str(target))
    (left,) = tmp_path.iterdir()
    here, label = left.name.rpartition("-")[::2]
    assert here.startswith(".hf.partial-")
    held = tmp_path / f"{here}-00000001"
    elsewhere = tmp_path / ".hf.partial-othernode-1234abcd-00000002"
    long_idle = tmp_path / ".hf.partial-othernode-1234abcd-00000003"
    busy_file = tmp_path / ".hf.partial-othernode-1234abcd-00000004"
    other = tmp_path / f".hf2.partial-{label}"
    for path in (held, elsewhere, long_idle, busy_file, other):
        path.mkdir()
        (path / "model.safetensors").touch()
    days_ago = time.time() - 2 * 24 * 3600
    for path in (held, long_idle, other):
        os.utime(path / "model.safetensors", (days_ago, days_ago))
    for path in (held, long_idle, other, busy_file):
        os.utime(path, (days_ago, days_ago))
    with held_by_another_process(held):
        save_hf(target, weights(source).items(), source=source)
    assert set(tmp_path.iterdir()) == {target, held, elsewhere, busy_file, other}
    assert load_file(target / "model.safetensors").keys() == shapes(source).keys()


@contextmanager
def held_by_another_process(directory: Path):
    code = "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY)\n"
    code += "fcntl.flock(fd, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, directory]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"\n"
        yield


def test_another_node_s_process_with_the_same_number_is_not_disturbed(
    source, tmp_path, monkeypatch
):
    """Two containers on one disk, both of which call their process 1: no lock, no other number."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    target = tmp_path / "hf"

    def pairs():
        for i, pair in enumerate(weights(source).items()):
            if i == 20:
                with monkeypatch.context() as other:
                    other.setattr(new_directory, "_machine", lambda: "other-1234abcd")
                    save_hf(target, weights(source).items(), source=source)
                (target / "README").write_text("of the first that was done")
            yield pair

    with pytest.raises(CheckpointError, match=r"hf appeared while it was written here, by ano"):
        save_hf(target, pairs(), source=source)
    assert list(tmp_path.iterdir()) == [target]
    assert (target / "README").exists()


@pytest.mark.parametrize("found", ["directory", "empty directory", "file", "link", "lost link"])
def test_a_target_that_exists_is_left_before_the_weights_are_touched(found, source, tmp_path):
    target, untouched = tmp_path / "hf", iter([("never", torch.full((1,), torch.nan))])
    (tmp_path / "there").mkdir()
    if "link" in found:
        target.symlink_to(tmp_path / ("there" if found == "link" else "gone"))
    elif found == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        if found == "directory":
            (target / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"hf exists already.*: remove it or choose another"):
        save_hf(target, untouched, source=source)
    assert sorted(tmp_path.rglob("*")) == before
    assert next(untouched)[0] == "never"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (".", r"^\. exists already"),
        ("", r"^\. exists already"),
        ("/", r"^/ exists already"),
        ("..", r"^\.\. exists already"),
        ("absent/..", r"^absent/\.\. does not end in the name of a new directory"),
        ("file/hf", r"^file/hf cannot be made: .*file is not a directory"),
    ],
)
def test_a_target_without_a_place_or_name_is_refused(
    target, message, source, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for save in (
        lambda: save_hf(Path(target), iter(()), source=source),
        lambda: save_megatron(Path(target), source),
    ):
        with pytest.raises(CheckpointError, match=message):
            save()
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def fail_twice(source: str, target: str) -> tuple[str, bool]:
    """The error of a disk that fills up long before weights turn out to be unusable."""
    import resource

    def pairs():
        for i, pair in enumerate(weights(Path(source)).items()):
            if i == 30:
                raise WeightError("`late` holds NaN")
            yield pair

    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    coming = pairs()
    try:
        save_hf(Path(target), coming, source=Path(source), buffer_bytes=1)
    except CheckpointError as error:
        message = str(error)
    gc.collect()
    return message, coming.gi_frame is not None


def test_the_first_error_is_shown_and_weights_stay_open_for_the_caller(source, tmp_path):
    ((message, is_open),) = run_ranks(1, fail_twice, str(source), str(tmp_path / "hf"))
    assert re.search("hf cannot be written: .*File too large", message)
    assert is_open, "else other ranks would wait for ever"
    assert list(tmp_path.iterdir()) == []


def interrupt_twice(source: str, target: str) -> str:
    """Ctrl-C in the midst of the weights, and again when what is there is being removed."""
    remove, removals = shutil.rmtree, []

    def interrupted_rmtree(path, **how):
        removals.append(path)
        os.kill(os.getpid(), signal.SIGINT)
        remove(path, **how)

    def pairs():
        for i, pair in enumerate(weights(Path(source)).items()):
            if i == 20:
                shutil.rmtree = interrupted_rmtree
                os.kill(os.getpid(), signal.SIGINT)
            yield pair

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        save_hf(Path(target), pairs(), source=Path(source))
    except KeyboardInterrupt:
        return f"interrupted, {len(removals)} more in vain"
    return "saved"


def test_an_interrupt_while_an_interrupted_save_is_removed_changes_nothing(source, tmp_path):
    (found,) = run_ranks(1, interrupt_twice, str(source), str(tmp_path / "hf"))
    assert re.fullmatch(r"interrupted, [1-9] more in vain", found)
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_a_config_is_an_error(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be written: .*config\.json"):
        save_hf(tmp_path / "hf", weights(source).items(), source=tmp_path)


def test_tensors_larger_than_a_chunk_and_parts_of_others(tmp_path):
    whole = torch.arange(30_000_000, dtype=torch.int32)
    path = tmp_path / "file"
    half = whole.nbytes // 2
    with FileStream({path: whole.nbytes}, buffer_bytes=1, threads=2) as stream:
        stream.write(path, half, whole[15_000_000:])
        stream.write(path, 0, whole[:15_000_000].clone().unflatten(0, (3000, 5000)))
        stream.write(path, 0, torch.ones(0))
    assert torch.equal(torch.from_file(str(path), size=whole.numel(), dtype=torch.int32), whole)


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    path = tmp_path / "missing" / "file"
    stream = FileStream({path: 4}, buffer_bytes=8, threads=1)
    with pytest.raises(FileNotFoundError), stream:
        stream.write(path, 0, torch.ones(1))


def test_a_streamed_file_holds_what_was_written(tmp_path):
    pieces = [b"", b"abc", os.urandom(2 * WRITE_BYTES + 5), memoryview(torch.ones(7).numpy())]
    with StreamedFile(tmp_path / "file", "wb") as file:
        assert [file.write(piece) for piece in pieces] == [memoryview(p).nbytes for p in pieces]
        assert file.tell() == sum(memoryview(piece).nbytes for piece in pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(bytes(piece) for piece in pieces)
