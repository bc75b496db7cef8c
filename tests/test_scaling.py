"""The benchmark that asks the planner for the fastest layout: what it returns is that."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_opo.plan.planner import Plan, cluster_of, make_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import scaling

CASE = scaling.case_of(scaling.MODELS["7B"]).with_prompts(16)
TINY = scaling.Space(
    tensor=(1, 2),
    pipeline=(1, 2),
    context=(1, 2),
    server_tensor=(2, 4, 8),  # of which 8 does not fit the model
    apart=(0, 1 / 2),
    buckets_mb=(256, 1024),
)


def everything(gpu: str, gpus: int) -> list[Plan]:
    found = []
    for candidate in scaling.candidates(CASE, TINY, gpu, gpus):
        for bucket in TINY.buckets_mb:
            plan = scaling.fitted(CASE, candidate, bucket)
            if isinstance(plan, Plan):
                assert candidate.bound <= plan.step_seconds
                found.append(plan)
            else:
                assert plan in ("update", "generate", "sizes")
    return found


def test_the_chosen_layout_is_the_fastest_of_all_that_fit():
    plans = everything("h100", 16)
    assert {plan.cluster.rollout_nodes for plan in plans} == {0, 1}
    best = scaling.fastest(CASE, TINY, "h100", 16, slack=0)
    assert best is not None and best.fits
    assert best.step_seconds == min(plan.step_seconds for plan in plans)
    near = scaling.fastest(CASE, TINY, "h100", 16, slack=0.1)
    assert near is not None
    close = [plan for plan in plans if plan.step_seconds <= 1.1 * best.step_seconds]
    beside = [plan for plan in close if plan.cluster.colocated]
    assert near.step_seconds in [plan.step_seconds for plan in beside]
    assert near.recipe.actor.replica_size == min(p.recipe.actor.replica_size for p in beside)


def test_a_chosen_layout_fits_by_the_planners_own_word():
    """As `megatron-opo plan` would say of the recipe."""
    plan = scaling.fastest(CASE, TINY, "h100", 16)
    assert plan is not None
    where = cluster_of(plan.recipe, plan.cluster.gpu, plan.cluster.network, gpus=16)
    again = make_plan(plan.recipe, CASE.config, CASE.config_path, where)
    assert again.fits
    assert again.step_seconds == plan.step_seconds


def test_more_gpus_memory_or_choice_are_not_slower_and_more_prompts_not_faster():
    def seconds(case=CASE, space=TINY, gpu="h100", gpus=16):
        plan = scaling.fastest(case, space, gpu, gpus, slack=0)
        assert plan is not None
        parts = scaling.parts(plan)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(plan.step_seconds)
        return plan.step_seconds

    by_gpus = [seconds(gpus=gpus) for gpus in (8, 16, 32)]
    assert all(more < fewer for fewer, more in pairwise(by_gpus))
    assert seconds(gpu="h200") < by_gpus[1]
    assert seconds(CASE.with_prompts(32)) > by_gpus[1]
    assert seconds(space=replace(TINY, pipeline=(1, 2, 4))) <= by_gpus[1]
    # The longest response takes its time on any number of GPUs.
    most = scaling.fastest(CASE, TINY, "h100", 64)
    assert most is not None and scaling.limit(most).startswith("longest response")


def test_the_tables_have_a_row_for_each_number_of_gpus():
    text = scaling.report((8,), ("h100",), {"7B": scaling.MODELS["7B"]})
    assert "Calculated, not run here" in text
    rows = [line for line in text.splitlines() if line.startswith("| 8 |")]
    assert len(rows) == 2 and "nothing fits" not in "".join(rows)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    tables.append([scaling.row(8, None), rows[0]])
    for table in tables:
        assert len({line.count("|") for line in table}) == 1, table
