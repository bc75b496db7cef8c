"""SGLang servers: launched, sampled from, and given new weights."""

from megatron_opo.rollout.client import Rollout
from megatron_opo.rollout.keeper import ServersLostError
from megatron_opo.rollout.process import Server, close_servers, follow
from megatron_opo.rollout.requests import RolloutStats
from megatron_opo.rollout.server import launch_servers, wait_healthy
from megatron_opo.rollout.shared_memory import SharedBucket, parts_of, share_over_nodes
from megatron_opo.rollout.sync import SyncStats

__all__ = [
    "Rollout",
    "RolloutStats",
    "Server",
    "ServersLostError",
    "SharedBucket",
    "SyncStats",
    "close_servers",
    "follow",
    "launch_servers",
    "parts_of",
    "share_over_nodes",
    "wait_healthy",
]
