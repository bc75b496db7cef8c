"""Groups split over ranks get the baselines that one rank would give them."""

import pytest
import torch
import torch.distributed as dist

from megatron_opo.advantages.distributed import (
    distributed_baselines,
    distributed_group_advantages_,
)
from megatron_opo.advantages.kernel import group_advantages_
from megatron_opo.errors import KernelError
from tests.kernel_cases import exact_advantages
from tests.ranks import run_ranks

# Group 0 lies on both ranks, 1 on one, 2 has equal rewards, 3 one member, 4 no token, 5 nothing.
GROUPS = [0, 2, 0, 1, 3, 0, 2, 1, 4, 2, 0, 4]
REWARDS = [1, 0.1, 0, -1, 0.7, 0, 0.1, 2, 1, 0.1, 1, 0]
LENGTHS = [10, 3, 20, 5, 4, 30, 7, 1, 0, 11, 20, 0]
RANK_OF = [0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1]


def advantages_of_this_rank(singleton_raw: bool) -> dict[int, list[float]]:
    dist.init_process_group("gloo")
    mine = [i for i, rank in enumerate(RANK_OF) if rank == dist.get_rank()]
    lengths = torch.tensor([LENGTHS[i] for i in mine])
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    buffer = torch.full((int(cu_seqlens[-1]),), 9.0)
    distributed_group_advantages_(
        buffer,
        torch.tensor([REWARDS[i] for i in mine], dtype=torch.float64),
        lengths,
        torch.tensor([GROUPS[i] for i in mine]),
        6,
        cu_seqlens,
        singleton_raw=singleton_raw,
    )
    rows = buffer.split(lengths.tolist())
    dist.destroy_process_group()
    return {i: row.tolist() for i, row in zip(mine, rows, strict=True)}


@pytest.mark.parametrize("singleton_raw", [False, True])
def test_two_ranks_give_what_one_gives(singleton_raw):
    split = {}
    for answer in run_ranks(2, advantages_of_this_rank, singleton_raw):
        split |= answer
    order = sorted(range(12), key=lambda i: GROUPS[i])
    lengths = torch.tensor([LENGTHS[i] for i in order])
    buffer = torch.empty(int(lengths.sum()))
    group_advantages_(
        buffer,
        torch.tensor([REWARDS[i] for i in order], dtype=torch.float64),
        lengths,
        torch.tensor([0, 4, 6, 9, 10, 12]),
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        singleton_raw=singleton_raw,
    )
    whole = dict(zip(order, buffer.split(lengths.tolist()), strict=True))
    members = [[i for i in range(12) if GROUPS[i] == g] for g in range(5)]
    exact = exact_advantages(REWARDS, LENGTHS, members, singleton_raw)
    for i, row in split.items():
        assert row == pytest.approx(whole[i].tolist(), rel=1e-6)
        assert row == pytest.approx([float(exact[i])] * LENGTHS[i], rel=1e-6)
        if GROUPS[i] == 2:
            assert row == [0.0] * LENGTHS[i]


def test_ids_and_shapes_that_do_not_fit_are_refused():
    rewards = torch.zeros(2)
    with pytest.raises(KernelError, match=r"must all be \[n\]"):
        distributed_baselines(rewards, torch.zeros(3), torch.tensor([0, 1]), 2)
    with pytest.raises(KernelError, match="0 to 2, allowed is 0 to 1"):
        distributed_baselines(rewards, rewards, torch.tensor([0, 2]), 2)
