import pytest
import torch

from tests.ranks import run_ranks


def share_and_fail():
    """On each rank: what was shared, what a driver stage gave, and how its failure showed."""
    import torch.distributed as dist

    from megatron_opo.spmd import Driver

    dist.init_process_group("gloo")
    driver = Driver(dist.get_rank(), dist.group.WORLD)
    tensors = [
        torch.arange(5, dtype=torch.int32),
        torch.zeros(0),
        torch.tensor([[True, False]]),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    shared = driver.share(tensors if driver.is_here else None)
    meanwhile = []
    result = driver.run(lambda: 7, meanwhile=lambda: meanwhile.append("ran"))
    try:
        driver.run(lambda: 1 / 0)
        failure = None
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    heard = driver.hear("h\u00e9" * driver.rank), driver.hear("")
    gathered = driver.gather("h\u00e9" * driver.rank), driver.gather("")
    shapes = [(str(t.dtype), tuple(t.shape), t.tolist()) for t in shared]
    return {
        "shared": shapes,
        "result": result,
        "meanwhile": meanwhile,
        "failure": failure,
        "heard": heard,
        "gathered": gathered,
    }


def test_a_stage_of_rank_0_reaches_every_rank_and_so_does_its_failure():
    first, second = run_ranks(2, share_and_fail, timeout_s=60)
    assert first["shared"] == second["shared"]
    assert first["shared"] == [
        ("torch.int32", (5,), [0, 1, 2, 3, 4]),
        ("torch.float32", (0,), []),
        ("torch.bool", (1, 2), [[True, False]]),
        ("torch.float64", (), 2.5),
    ]
    assert (first["result"], second["result"]) == (7, None)
    assert (first["meanwhile"], second["meanwhile"]) == ([], ["ran"])
    assert first["failure"] == "ZeroDivisionError: division by zero"
    assert second["failure"] == "DriverFailed: rank 0 failed: ZeroDivisionError: division by zero"
    assert first["heard"] == (["", "h\u00e9"], ["", ""]) and second["heard"] == ([], [])
    assert first["gathered"] == second["gathered"] == first["heard"]


def test_the_helper_itself_reports_a_rank_that_raises():
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_ranks(2, divide, timeout_s=60)


def divide():
    return 1 / 0
