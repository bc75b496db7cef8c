import os
import subprocess
import sys

import pytest

from megatron_opo.errors import CheckpointError
from megatron_opo.recipe import Recipe
from megatron_opo.runs import changed_fields, exports, only_run

HOLD = """
import sys
from pathlib import Path
from megatron_opo.runs import only_run
with only_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_in_a_directory_is_refused_until_the_first_is_dead(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(CheckpointError, match="another run is training in")
        with refused, only_run(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.wait()
    with only_run(tmp_path / "run"):
        pass


def test_what_changed_since_a_checkpoint_is_named_by_its_field():
    before = Recipe.model_validate(
        {"name": "x", "model": {"path": "m"}, "data": {"train": {"files": ["a"]}}}
    )
    after = before.model_copy(
        update={"optimizer": before.optimizer.model_copy(update={"lr": 2e-6})}
    )
    assert changed_fields(before.model_dump(mode="json"), after) == ["optimizer.lr: 1e-06 -> 2e-06"]
    assert changed_fields(before.model_dump(mode="json"), before) == []


def test_a_run_directory_below_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(CheckpointError, match=r"run_dir: .*file/run cannot be written")
    with refused, only_run(tmp_path / "file" / "run"):
        pass


def test_exports_are_ordered_by_when_they_were_written(tmp_path):
    """A run resumed from before step 16 writes step 12 again, which is the newest then."""
    names = ["step_12.20260102-030405", "step_16", "step_9", "step_12"]
    others = [".step_12.partial-7", "step_12.partial", "step_x", "other"]
    for i, name in enumerate([*names, *others]):
        path = tmp_path / "hf" / name
        path.mkdir(parents=True)
        os.utime(path, ns=(i, i))
    (tmp_path / "hf" / "step_3").write_text("no directory")
    assert [path.name for path in exports(tmp_path)] == names
    assert exports(tmp_path / "nowhere") == []
