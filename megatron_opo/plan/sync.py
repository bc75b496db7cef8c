"""Seconds between the phases of a step, estimated: weights to servers, memory back and forth."""

import math
from dataclasses import dataclass

from megatron_opo.plan.assumptions import (
    HOST_LINK,
    LINK_EFFICIENCY,
    SYNC_CALL,
    SYNC_MESSAGE,
    SYNC_TENSOR,
)
from megatron_opo.plan.hardware import Cluster
from megatron_opo.plan.layout import BYTES, Layout, Model
from megatron_opo.plan.memory import TrainerMemory
from megatron_opo.recipe import Recipe


@dataclass(frozen=True)
class Sync:
    """`gather_seconds` are rank 0's for the weights of all ranks, while it sends those before: the
    slower of the two counts. Sending is `transfer_seconds` of bytes, `load_seconds` of the servers'
    work for each tensor, and `call_seconds` of `messages` requests to every server."""

    seconds: float
    gather_seconds: float
    transfer_seconds: float
    load_seconds: float
    call_seconds: float
    messages: int


def sync_time(model: Model, recipe: Recipe, cluster: Cluster, layout: Layout) -> Sync:
    """Rank 0 gathers every weight, and sends it to the servers bucket by bucket.

    seconds = max(gather, transfer + load + calls). A bucket crosses the network once, over rank 0's
    own link. Then, with servers on the trainers' nodes, each server of a node reads it from the
    same GPU there; with servers of their own nodes, rank 0 broadcasts it to all their ranks.
    """
    size = model.parameters * BYTES[recipe.model.dtype]
    load = model.tensors * SYNC_TENSOR.value
    outside = size * _share_elsewhere(model, cluster, layout)
    network = cluster.network.link * LINK_EFFICIENCY.value
    node_link = cluster.gpu.node_link * LINK_EFFICIENCY.value
    gather = outside / network + (size - outside) / node_link + load
    transfer = size / network if cluster.nodes > 1 else 0.0
    servers = recipe.rollout.servers
    if recipe.transport("cuda") == "shared_memory":
        transfer += math.ceil(servers / cluster.server_nodes) * size / node_link
    messages = math.ceil(size / (recipe.sync.bucket_mb * 2**20))
    calls = messages * (SYNC_MESSAGE.value + servers * SYNC_CALL.value)
    return Sync(
        seconds=max(gather, transfer + load + calls),
        gather_seconds=gather,
        transfer_seconds=transfer,
        load_seconds=load,
        call_seconds=calls,
        messages=messages,
    )


def _share_elsewhere(model: Model, cluster: Cluster, layout: Layout) -> float:
    """Of the weights, those that the lowest rank which has them does not have on rank 0's node."""
    per_node, stage_ranks = cluster.gpus_per_node, layout.tensor * layout.copies
    stages = sum(stage * stage_ranks < per_node for stage in range(layout.pipeline))
    near = stages / layout.pipeline
    expert_ranks = layout.expert * layout.expert_tensor
    near_experts = near * min(1.0, per_node / expert_ranks)
    a = model.architecture
    one = sum(weight.numel for layer in model.layers for weight in layer if weight.expert)
    experts = one * (a.experts.count if a.experts else 0) / model.parameters
    return 1 - (near * (1 - experts) + near_experts * experts)


def handover_time(recipe: Recipe, trainers: list[TrainerMemory]) -> float:
    """A trainer's optimizer state goes to the host and comes back."""
    if not recipe.rollout.hands_over("cuda"):
        return 0.0
    return 2 * max(stage.optimizer for stage in trainers) / HOST_LINK.value
