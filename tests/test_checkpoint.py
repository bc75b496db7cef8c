import json

import numpy as np
import pytest

from megatron_opo.errors import CheckpointError
from megatron_opo.runs import latest_checkpoint
from tests.actor_cases import open_actor, resume_and_train, train_and_save
from tests.models import tiny_qwen3
from tests.ranks import run_ranks

SAVED = {
    "TP1": (1, []),
    "TP2": (2, ["actor.tensor_parallel=2"]),
    "CP2 DP2 in buckets": (
        4,
        ["actor.context_parallel=2", "actor.data_parallel=2", "actor.grad_bucket_mb=0.02"],
    ),
}
LOADED = {**SAVED, "PP2": (2, ["actor.pipeline_parallel=2"])}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_qwen3(tmp_path_factory.mktemp("checkpoint") / "model"))


@pytest.mark.parametrize("saved", SAVED)
def test_a_checkpoint_resumes_in_every_layout(saved, model, tmp_path):
    ranks, overrides = SAVED[saved]
    run_dir = str(tmp_path / "run")
    undisturbed = run_ranks(ranks, train_and_save, model, run_dir, overrides)[0]
    for loaded, (ranks, overrides) in LOADED.items():
        resumed = run_ranks(ranks, resume_and_train, model, run_dir, overrides)[0]
        assert resumed["restored"] == (1, 1, {"row": 7})
        same_layout = loaded == saved
        for name, value in undisturbed["metrics"].items():
            if not name.startswith("perf/"):
                tolerance = {"abs": 0, "rel": 0} if same_layout else {"abs": 1e-6, "rel": 2e-5}
                assert resumed["metrics"][name] == pytest.approx(value, **tolerance), (loaded, name)
        for name, weight in undisturbed["weights"].items():
            if same_layout:
                assert np.array_equal(resumed["weights"][name], weight), (loaded, name)
            else:
                np.testing.assert_allclose(resumed["weights"][name], weight, rtol=0, atol=2e-6)


def refused_resume(model: str, run_dir: str, overrides: list[str]) -> str:
    """What a rank says of the checkpoint."""
    from megatron_opo.actor.checkpoint import load_checkpoint

    actor = open_actor(model, run_dir, overrides)
    checkpoint = latest_checkpoint(actor.recipe.run_path)
    assert checkpoint is not None
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(actor, checkpoint)
    return str(caught.value)


def test_what_cannot_be_loaded_is_one_clear_error_on_every_rank(model, tmp_path):
    run_dir, overrides = str(tmp_path / "run"), ["actor.tensor_parallel=2"]
    run_ranks(2, train_and_save, model, run_dir, overrides)
    other = [*overrides, "optimizer.distributed=false"]
    for message in run_ranks(2, refused_resume, model, run_dir, other):
        assert "was written with optimizer.distributed=True" in message
    files = sorted((tmp_path / "run").glob("checkpoints/step_1/*.distcp"))
    whole = {file: file.read_bytes() for file in files}
    for damage, words in [
        (lambda data: data[: len(data) // 2], "is truncated"),
        # Where torch would say how to run what is in the file.
        (lambda data: data.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_vX"), "is damaged at "),
    ]:
        for file, data in whole.items():
            file.write_bytes(damage(data))
        for message in run_ranks(2, refused_resume, model, run_dir, overrides):
            assert message.startswith(f"checkpoint {run_dir}/checkpoints/step_1 cannot be loaded (")
            assert words in message and "weights_only" not in message
            assert "move the directory away" in message
            assert "\n" not in message


def test_only_complete_checkpoints_count_and_the_newest_wins(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for step, complete in [(2, True), (10, True), (9, True), (11, False)]:
        directory = tmp_path / "checkpoints" / f"step_{step}"
        directory.mkdir(parents=True)
        if complete:
            (directory / "state.json").write_text(
                json.dumps({"version": step, "cursor": {}, "recipe": {}})
            )
    (tmp_path / "checkpoints" / "step_12.partial").mkdir()
    assert latest_checkpoint(tmp_path).directory.name == "step_10"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_state_file_is_named(text, tmp_path):
    directory = tmp_path / "checkpoints" / "step_3"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step_3: state\.json cannot be used"):
        latest_checkpoint(tmp_path)
