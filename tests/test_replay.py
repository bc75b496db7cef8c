"""Kept batches: what is read is what was written, damage is named, and an update can be taken
again to the bit."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_opo.batch import Group, PackedBatch, Prompt, Sample, pack
from megatron_opo.errors import CheckpointError, DataError, LogError
from megatron_opo.recipe import Recipe
from megatron_opo.replay import (
    DTYPES,
    batch_path,
    digest,
    failed_batch_path,
    read_batch,
    replay_command,
    write_batch,
)
from tests.actor_cases import make_rollout, open_actor, sampled, save
from tests.models import tiny_qwen3
from tests.ranks import run_ranks

anywhere = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
RECIPE = {"name": "r", "seed": 3}


@st.composite
def scored_groups(draw) -> list[Group]:
    number = st.floats(allow_nan=False, allow_infinity=False, width=32)
    groups = []
    for k in range(draw(st.integers(1, 3))):
        text = draw(st.text(max_size=8))
        prompt = Prompt(f"e0-{k}", tuple(range(1, draw(st.integers(2, 4)))), text, "d", None)
        samples = []
        for i in range(draw(st.integers(1, 3))):
            length = draw(st.integers(1, 3))
            ids, zeros = (7,) * length, (0,) * length
            logprobs = tuple(draw(st.floats(width=32)) for _ in range(length))
            reward = draw(number) if k == i == 0 else draw(st.none() | number)
            samples.append(
                Sample(prompt.id, i, ids, logprobs, zeros, "stop", text, "http://s", reward)
            )
        greedy = replace(samples[0], reward=1.0) if draw(st.booleans()) else None
        groups.append(Group(prompt, tuple(samples), greedy))
    return groups


def assert_equal_to_the_bit(left: PackedBatch, right: PackedBatch) -> None:
    for field in fields(PackedBatch):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.numpy().tobytes() == b.numpy().tobytes(), field.name


@anywhere
@given(scored_groups(), st.integers(0, 10**6))
def test_what_is_read_is_what_was_written(tmp_path, groups, version):
    batch = pack(groups)
    path = batch_path(tmp_path, version + 1)
    write_batch(path, batch, version=version, recipe=RECIPE, groups=groups)
    kept = read_batch(path)
    assert_equal_to_the_bit(kept.batch, batch)
    assert (kept.version, kept.step, kept.recipe) == (version, version + 1, RECIPE)
    assert [record["prompt"] for record in kept.samples] == [g.prompt.text for g in groups]
    assert [len(record["samples"]) for record in kept.samples] == [len(g.samples) for g in groups]
    assert not list(path.parent.glob("*.partial"))


def tensors_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture
def written(tmp_path):
    path = batch_path(tmp_path, 17)
    write_batch(path, make_rollout(99), version=16, recipe=RECIPE)
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": None}, "there is no tensor `tokens`"),
        ({"extra": torch.zeros(1)}, "there are unknown tensors: extra"),
        ({"rewards": torch.zeros(9)}, "`rewards` is torch.float32 (9,), wanted torch.float64 [n]"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, "`loss_mask` has 3 elements"),
        ({"sample_ids": torch.zeros(9, dtype=torch.int64)}, "`sample_ids` do not rise"),
        ({"group_offsets": torch.tensor([0, 5, 3, 9])}, "`group_offsets` does not rise"),
        ({"group_offsets": torch.tensor([0, 3])}, "`group_offsets` does not go from 0 to 9"),
        ({"greedy_rewards": torch.zeros(9).double()}, "`greedy_rewards` has 9 elements"),
        ({"cu_seqlens": torch.zeros(10, dtype=torch.int64)}, "`cu_seqlens` does not go from 0 to"),
    ],
)
def test_tensors_that_contradict_each_other_are_named(written, changes, expected):
    tensors, metadata = tensors_of(written)
    tensors = {name: t for name, t in (tensors | changes).items() if t is not None}
    save_file(tensors, written, metadata)
    with pytest.raises(DataError) as error:
        read_batch(written)
    assert f"batch {written}: {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": None}, "a safetensors file, but no batch (format None"),
        ({"format_version": "2"}, "format version '2', but this program reads '1'"),
        ({"version": "-1"}, "what it says of itself cannot be read"),
        ({"version": "next"}, "what it says of itself cannot be read"),
        ({"recipe": "{"}, "what it says of itself cannot be read"),
        ({"recipe": "[]"}, "what it says of itself cannot be read"),
    ],
)
def test_other_files_and_other_versions_are_named(written, changes, expected):
    tensors, metadata = tensors_of(written)
    metadata = {name: text for name, text in (metadata | changes).items() if text is not None}
    metadata["sha256"] = digest(tensors, metadata)
    save_file(tensors, written, metadata)
    with pytest.raises(DataError) as error:
        read_batch(written)
    assert expected in str(error.value)


def test_any_flipped_bit_is_noticed(written):
    whole = written.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for place in range(header_end, len(whole), 7):
        written.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"not those that were written|damaged"):
            read_batch(written)


def test_what_is_no_file_or_no_safetensors_is_named(tmp_path, written):
    with pytest.raises(DataError, match="no such file"):
        read_batch(tmp_path / "nothing.safetensors")
    with pytest.raises(DataError, match="not a safetensors file, or damaged"):
        read_batch(tmp_path)
    written.write_bytes(written.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a safetensors file, or damaged"):
        read_batch(written)


@anywhere
@given(st.data())
def test_whatever_the_file_holds_only_data_errors_come_of_it(tmp_path, data):
    """Bytes that are changed, cut out or put in; then the tensors are still a batch, or it is
    said that they are not."""
    path = tmp_path / "batch.safetensors"
    write_batch(path, make_rollout(99), version=16, recipe=RECIPE)
    raw = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        end = data.draw(st.sampled_from([8, header_end, len(raw)]))
        place = data.draw(st.integers(0, max(0, end - 1)))
        cut = data.draw(st.integers(0, 3))
        raw[place : place + cut] = data.draw(st.binary(max_size=3))
    path.write_bytes(raw)
    try:
        kept = read_batch(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    assert kept.batch.response_lengths.sum() == kept.batch.loss_mask.sum()
    assert kept.batch.select([0]).tokens.numel() == kept.batch.sequence_lengths[0]


@anywhere
@given(st.data())
def test_tensors_of_any_values_are_a_batch_or_refused(tmp_path, data):
    path = tmp_path / "batch.safetensors"
    write_batch(path, make_rollout(99), version=16, recipe=RECIPE)
    tensors, metadata = tensors_of(path)
    name = data.draw(st.sampled_from(sorted(DTYPES)))
    size = tensors[name].numel() + data.draw(st.integers(-1, 1))
    values = st.integers(-2, 200) if not tensors[name].is_floating_point() else st.floats(width=32)
    drawn = data.draw(st.lists(values, min_size=size, max_size=size))
    tensors[name] = torch.tensor(drawn).to(DTYPES[name])
    metadata["sha256"] = digest(tensors, metadata)
    save_file(tensors, path, metadata)
    try:
        batch = read_batch(path).batch
    except DataError:
        return
    starts = batch.cu_seqlens[:-1]
    assert not batch.loss_mask[starts].any()
    assert (batch.sequence_lengths > 0).all()


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    import resource

    path = batch_path(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(LogError, match=r"step_1\.safetensors: the batch cannot be kept"):
            write_batch(path, make_rollout(99), version=0, recipe=RECIPE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(path.parent.iterdir()) == []


def test_a_failed_batch_never_replaces_another(tmp_path):
    names = []
    for _ in range(3):
        path = failed_batch_path(tmp_path, 2)
        write_batch(path, make_rollout(99), version=1, recipe=RECIPE)
        names.append(path.name)
    failed = ["step_2.failed.safetensors"]
    assert names == failed + [f"step_2.failed_{i}.safetensors" for i in (2, 3)]
    assert replay_command(tmp_path / "batches" / "b.safetensors") == (
        f"megatron-opo train {tmp_path}/recipe.yaml --replay {tmp_path}/batches/b.safetensors"
    )


def record(model: str, run_dir: str, overrides: list[str]) -> list[dict[str, float]]:
    """Three steps of a run that keeps its batches, and a checkpoint after the first one."""
    actor = open_actor(model, run_dir, overrides)
    metrics = []
    for step in range(3):
        batch = sampled(actor)
        if actor.driver.is_here:
            path = batch_path(Path(run_dir), step + 1)
            recipe = actor.recipe.model_dump(mode="json")
            write_batch(path, batch, version=step, recipe=recipe)
        metrics.append(actor.update(batch, version=step))
        if step == 0:
            save(actor, {})
    return metrics


def replay_steps(run_dir: str, overrides: list[str], steps: list[int]):
    """The metrics, or the error's text; rank 0's recipe is that of `record`."""
    from megatron_opo.actor.parallel import initialize
    from megatron_opo.errors import OpoError
    from megatron_opo.recipe_file import load_recipe
    from megatron_opo.train_only import replay

    recipe = load_recipe(Path(run_dir) / "recipe_0.yaml", overrides)
    parallel = initialize(recipe.actor, seed=0)
    try:
        return replay(recipe, [batch_path(Path(run_dir), step) for step in steps], parallel)
    except OpoError as error:
        return f"{type(error).__name__}: {error}"


def of_the_policy(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in step.items() if not name.startswith("perf/")}
        for step in metrics
    ]


@pytest.mark.parametrize("layout", ["tensor_parallel", "data_parallel"])
def test_steps_are_taken_again_to_the_bit(layout, tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    run_dir, overrides = str(tmp_path / "run"), [f"actor.{layout}=2"]
    recorded = of_the_policy(run_ranks(2, record, str(model), run_dir, overrides)[0])
    before = {path: path.stat().st_mtime_ns for path in Path(run_dir).rglob("*")}
    # From the start weights, and from the checkpoint of version 1.
    for steps in ([1, 2], [2, 3]):
        again = of_the_policy(run_ranks(2, replay_steps, run_dir, overrides, steps)[0])
        assert again == [recorded[step - 1] for step in steps]
        assert all(math.isfinite(value) for step in again for value in step.values())
    assert {path: path.stat().st_mtime_ns for path in Path(run_dir).rglob("*")} == before
    if layout == "data_parallel":
        chunk = next(Path(run_dir).rglob("*.distcp"))
        raw = bytearray(chunk.read_bytes())
        raw[len(raw) // 2] ^= 1
        chunk.write_bytes(raw)
        for said in run_ranks(2, replay_steps, run_dir, overrides, [2]):
            assert said.startswith("CheckpointError") and chunk.name in said


def test_a_version_without_checkpoint_and_files_out_of_turn_are_named(tmp_path):
    from megatron_opo.train_only import find_start, read_batches

    recipe = Recipe.model_validate(
        {"name": "r", "model": {"path": "m"}, "data": {"train": {"files": ["f"]}}}
    )
    paths = []
    for version in (0, 3, 5):
        paths.append(batch_path(tmp_path, version + 1))
        write_batch(paths[-1], make_rollout(99), version=version, recipe=RECIPE)
    assert find_start(recipe, read_batch(paths[0])) == ""
    with pytest.raises(CheckpointError) as error:
        find_start(recipe, read_batch(paths[1]))
    assert f"{tmp_path} has no checkpoint of that version (it has: none; " in str(error.value)
    assert "the batches of steps 1 to 4 together" in str(error.value)
    for version in (2, 4):
        directory = tmp_path / "checkpoints" / f"step_{version}"
        directory.mkdir(parents=True)
        (directory / "state.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError) as error:
        find_start(recipe, read_batch(paths[2]))
    assert "(it has: 2, 4; version 0 needs none)" in str(error.value)
    assert "the batches of steps 5 to 6 together" in str(error.value)
    with pytest.raises(DataError, match="is of step 6, after one of step 4"):
        read_batches(paths[1:], 99)
    with pytest.raises(DataError, match=r"the vocabulary of model\.path ends at 49"):
        read_batches(paths, 50)
