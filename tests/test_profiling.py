import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_opo.errors import RecipeError
from megatron_opo.profiling import Profiler, ahead_of_rank_0
from megatron_opo.recipe import Recipe
from megatron_opo.spmd import Driver
from tests.ranks import run_ranks
from tests.traces import read_tracks

CPU = torch.device("cpu")
AHEAD_S = 1000


def recipe_of(run_path: Path, **profile) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "profiled",
            "run_dir": str(run_path),
            "model": {"path": "unused"},
            "data": {"train": {"files": ["unused.jsonl"]}},
            "profile": profile,
        }
    )


def profile_steps(run_path: Path):
    """What each rank's clock is ahead. Two steps are profiled; something gets into the way of the
    files of the second."""
    import torch.distributed as dist

    from megatron_opo.observe.run_log import RunLog

    dist.init_process_group("gloo")
    driver = Driver(dist.get_rank(), dist.group.WORLD)
    driver.spans.clock = lambda: time.monotonic() + AHEAD_S * driver.rank
    driver.spans.take()
    desk = None
    if driver.is_here:
        options = {"recipe_text": "", "versions": {}, "total_steps": 2, "quiet": True}
        desk = SimpleNamespace(log=RunLog(run_path, spans=driver.spans, **options))
    profiler = Profiler(recipe_of(run_path, steps="1-2", torch=True), CPU, driver)
    with profiler:
        profiler.turn_to(1, desk)
        for step in (1, 2):
            with driver.spans.of("work"):
                dist.barrier()
                (torch.eye(4) @ torch.eye(4)).sum()
            driver.run(lambda: desk.log.step(step, {}))  # noqa: B023
            if step == 2 and desk:
                (run_path / "profile").rename(run_path / "first")
                (run_path / "profile").write_text("in the way")
            dist.barrier()
            profiler.turn_to(step + 1, desk)
    return ahead_of_rank_0(driver)


def test_ranks_share_a_clock_and_what_cannot_be_written_is_a_warning(tmp_path):
    (first, (ahead, error)) = run_ranks(2, profile_steps, tmp_path, timeout_s=60)
    # Processes of one machine read the same clock, here set ahead.
    assert first == (0, 0)
    assert abs(ahead - AHEAD_S) <= error + 1e-9 and error < 1

    files = {path.name for path in (tmp_path / "first").iterdir()}
    assert files == {"trace_step_1.json", *(f"torch_step_1_rank_{i}.json.gz" for i in (0, 1))}
    tracks = read_tracks(tmp_path / "first" / "trace_step_1.json")
    works = [e for t in tracks.values() for e in t[0] if e["name"] == "work"]
    # Both went through the same barrier.
    latest_start = max(event["ts"] for event in works)
    assert len(works) == 2 and latest_start < min(e["ts"] + e["dur"] for e in works) + error * 1e6

    said = (tmp_path / "run.log").read_text()
    assert f"profile of step 1: {tmp_path}/profile/trace_step_1.json" in said
    assert "warning: profile of step 1" not in said
    assert "profile of step 2: " not in said
    assert "warning: profile of step 2, rank 0: " in said
    assert "trace_step_2.json: cannot be written" in said
    assert "warning: profile of step 2, rank 1: " in said


def test_gpu_memory_of_a_cpu_is_refused(tmp_path):
    recipe = recipe_of(tmp_path, steps=1, memory=True)
    with pytest.raises(RecipeError, match=r"profile\.memory is true, but this run trains on CPUs"):
        Profiler(recipe, CPU, Driver(0, None))
