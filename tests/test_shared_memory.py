"""Weights that servers read from the trainer's memory, and memory that both sides hand over."""

import os

import torch
from servers import perturbed
from test_rollout_sync import assert_sampled_from, reported_versions

from megatron_opo.recipe import SyncConfig
from megatron_opo.rollout.shared_memory import SHARED_MEMORY, share_one

MIB = 2**20
CPU = torch.device("cpu")
VERIFIED = SyncConfig(transport="shared_memory")


def left_in_shared_memory(pid: int | None = None) -> list[str]:
    """Files of torch's that a process made there."""
    return [path.name for path in SHARED_MEMORY.glob(f"torch_{pid or os.getpid()}_*")]


def shared_rollout(pool, servers=None, **settings):
    return pool.rollout(servers, sync=VERIFIED, shared=share_one(MIB, CPU), **settings)


def test_servers_of_one_and_of_two_ranks_read_several_messages(qwen_pool, llama_pool):
    for pool, checksums in ((qwen_pool, 2 * (4 * 8 + 2)), (llama_pool, 2 * (4 * 6 + 3))):
        rollout = shared_rollout(pool)
        for seed in (1, 2):
            weights = perturbed(pool.weights(), seed)
            assert sum(t.nbytes for t in weights.values()) > 3 * MIB
            version = pool.next_version()
            stats = rollout.sync(iter(weights.items()), version)
            assert stats.bytes == sum(t.nbytes for t in weights.values())
            assert stats.tensors == len(weights)
            assert stats.checksums == checksums
            assert reported_versions(pool) == {str(version)}
        assert_sampled_from(pool, rollout, weights, version)
        rollout._sync.close()
    assert not left_in_shared_memory()
