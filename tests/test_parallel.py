"""Process groups: which layouts fit, what the launcher must provide, who stands where."""

import dataclasses

import pytest
import torch

from megatron_opo.actor.parallel import data_parallel_size, initialize
from megatron_opo.errors import RecipeError, UnfitEnvironmentError
from megatron_opo.recipe import ActorConfig
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("layout", "world_size", "expected"),
    [
        ({}, 1, 1),
        ({}, 6, 6),
        ({"tensor_parallel": 2}, 6, 3),
        ({"data_parallel": 2}, 2, 2),
        ({"expert_parallel": 4}, 8, 8),
        ({"tensor_parallel": 2, "context_parallel": 3, "pipeline_parallel": 2}, 24, 2),
        ({"context_parallel": 2, "expert_parallel": 4}, 4, 2),
        ({"tensor_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 1}, 4, 2),
    ],
)
def test_replicas_are_what_the_processes_leave_over(layout, world_size, expected):
    assert data_parallel_size(ActorConfig(**layout), world_size) == expected


@pytest.mark.parametrize(
    ("layout", "world_size", "named"),
    [
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            6,
            "actor.tensor_parallel 2 x actor.pipeline_parallel 2 = 4 processes per replica of the "
            "model, which does not divide the 6 that were started: start 4 or 8",
        ),
        ({"tensor_parallel": 4}, 1, "that were started: start 4 (torchrun"),
        (
            {"tensor_parallel": 2, "context_parallel": 2},
            6,
            "actor.tensor_parallel 2 x actor.context_parallel 2 x actor.pipeline_parallel 1 = 4 "
            "processes per replica of the model, which does not divide the 6 that were started",
        ),
        (
            {"context_parallel": 3, "expert_parallel": 4},
            15,
            "needs a multiple of 12 processes, but 15 were started: start 12 or 24",
        ),
        ({"data_parallel": 3}, 2, "= 3 processes, but 2 were started: start 3 (torchrun"),
        (
            {"tensor_parallel": 2, "expert_parallel": 4},
            12,
            "actor.expert_parallel 4 x actor.expert_tensor_parallel 2 on each of "
            "actor.pipeline_parallel 1 stages needs a multiple of 8 processes, but 12 were "
            "started: start 8 or 16",
        ),
        ({"pipeline_parallel": 2, "expert_parallel": 4}, 2, "were started: start 8 (torchrun"),
    ],
)
def test_processes_that_do_not_fit_are_told_how_many_to_start(layout, world_size, named):
    with pytest.raises(RecipeError) as error:
        data_parallel_size(ActorConfig(**layout), world_size)
    assert named in str(error.value)


LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"MASTER_PORT": None}, "RANK, WORLD_SIZE, MASTER_ADDR but not MASTER_PORT"),
        ({"RANK": None, "WORLD_SIZE": "2"}, "but not RANK"),
        ({"RANK": "zero"}, "RANK is 'zero', not a whole number"),
        ({"RANK": "1"}, "RANK is 1 but WORLD_SIZE is 1"),
    ],
)
def test_an_incomplete_launcher_environment_is_named(changes, named, monkeypatch):
    for name, value in (LAUNCHER | changes).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(UnfitEnvironmentError) as error:
        initialize(ActorConfig(), seed=0)
    assert named in str(error.value)


def describe(layout: dict):
    import torch.distributed as dist

    parallel = initialize(ActorConfig(**layout), seed=7)
    ranks = torch.zeros(parallel.world_size, dtype=torch.int64)
    ranks[parallel.rank] = parallel.rank + 1
    dist.all_reduce(ranks, group=parallel.control)
    place = {
        field.name: getattr(parallel, field.name)
        for field in dataclasses.fields(parallel)
        if field.name not in ("control", "device")
    }
    return place | {"ranks": ranks.tolist(), "draw": torch.rand(1).item()}


def test_tensor_ranks_vary_fastest_then_context_data_and_pipeline():
    """The example of the docstring, on the ranks that 4 processes allow."""
    places = run_ranks(4, describe, {"tensor_parallel": 2, "pipeline_parallel": 2})
    assert [(p["tp_rank"], p["dp_rank"], p["pp_rank"]) for p in places] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 0, 1),
        (1, 0, 1),
    ]
    places = run_ranks(4, describe, {"context_parallel": 2})
    assert [(p["cp_rank"], p["dp_rank"], p["pp_rank"]) for p in places] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
    ]
    assert all((p["cp_size"], p["dp_size"], p["pp_size"]) == (2, 2, 1) for p in places)
    assert all(p["ranks"] == [1, 2, 3, 4] and p["backend"] == "gloo" for p in places)
    assert len({p["draw"] for p in places}) == 1


def test_experts_are_shared_out_over_the_ranks_of_a_stage():
    layout = {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}
    places = run_ranks(4, describe, layout)
    assert [(p["tp_rank"], p["dp_rank"], p["ep_rank"]) for p in places] == [
        (0, 0, 0),
        (1, 0, 1),
        (0, 1, 0),
        (1, 1, 1),
    ]
    assert all((p["ep_size"], p["expert_tp_size"]) == (2, 1) for p in places)


def alone_twice():
    import os

    from megatron_opo.actor.parallel import shutdown

    for name in LAUNCHER:
        os.environ.pop(name, None)
    first = describe({})
    shutdown()
    return first, describe({})


def test_one_process_needs_no_launcher_and_may_start_over():
    ((first, second),) = run_ranks(1, alone_twice)
    assert first == second and first["world_size"] == 1


def test_a_layout_that_does_not_fit_fails_before_any_group_is_formed():
    with pytest.raises(AssertionError, match="which does not divide the 2 that were started"):
        run_ranks(2, describe, {"tensor_parallel": 4})
