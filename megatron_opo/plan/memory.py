"""Memory of each GPU in both phases of a step."""

import math
from dataclasses import dataclass

from megatron_opo.plan.activations import (
    Pass,
    chunk_saved,
    in_flight,
    layer_workspace,
    logits_workspace,
)
from megatron_opo.plan.assumptions import FRAGMENTATION, RELEASED_SERVER, TRAINER_RESERVE
from megatron_opo.plan.hardware import GIB, Cluster
from megatron_opo.plan.layout import BYTES, Layout, Model, chunks_of, held_by
from megatron_opo.recipe import Recipe

FLOAT = 4
# SGLang's rule for what it leaves outside of weights and KV cache, in MiB: a base, so much for each
# token of a prefill chunk and each request of the largest CUDA graph, and not less than the least.
SERVER_BASE = 512
SERVER_PER_PREFILL_TOKEN = 1.5
SERVER_PER_GRAPH_REQUEST = 2
SERVER_PER_RANK = 128
SERVER_LEAST = 10 * 1024
# Of GPUs below so many GiB: tokens of a prefill chunk, requests of the largest graph with fewer
# than 4 ranks and with more.
SERVER_DEFAULTS = ((60, 4096, 32, 160), (160, 8192, 256, 512), (float("inf"), 16_384, 512, 512))


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on the fullest trainer rank of pipeline stage `stage` while it updates. `bucket` is
    what weights are sent by, in memory that servers open; `server` what servers keep there that do
    not hand it over."""

    stage: int
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserve: float
    bucket: float
    server: float = 0.0

    @property
    def total(self) -> float:
        held = self.weights + self.gradients + self.optimizer + self.bucket + self.server
        return held + self.activations + self.workspace + self.reserve


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on each server rank while it generates. `trainer` is what a colocated trainer keeps
    there; `kv_cache` is what is left for it, negative if there is nothing. `fraction` is the
    server's mem_fraction_static, `allowed` the largest that leaves room for the rest."""

    trainer: float
    weights: float
    workspace: float
    kv_cache: float
    kv_per_token: float
    fraction: float
    allowed: float

    @property
    def total(self) -> float:
        """What it takes itself."""
        return self.weights + self.workspace + max(0.0, self.kv_cache)

    @property
    def kv_tokens(self) -> int:
        """That one server holds."""
        return max(0, int(self.kv_cache // self.kv_per_token))


def trainer_memory(
    model: Model, recipe: Recipe, layout: Layout, micro_batches: int, gpus_per_node: int
) -> list[TrainerMemory]:
    """By pipeline stage."""
    released = RELEASED_SERVER.value if recipe.rollout.hands_over("cuda") else 0
    step = pass_of(recipe)
    state = FLOAT * (2 if recipe.model.dtype == "float32" else 3)
    stages = []
    for stage in range(layout.pipeline):
        held = held_by(model, layout, stage)
        chunks = chunks_of(model.architecture.layers, layout, stage)
        kept = max(chunk_saved(model, layout, chunk, step) for chunk in chunks)
        activations = kept * in_flight(layout, stage, micro_batches)
        workspace = layer_workspace(model, layout, step)
        if stage == layout.pipeline - 1:
            chunk_tokens = recipe.actor.logprob_chunk_tokens
            workspace = max(workspace, logits_workspace(model, layout, chunk_tokens, step))
        # Autograd makes a weight's gradient in its own dtype before it is added to the buffer.
        workspace += held.largest * step.width
        reserve = TRAINER_RESERVE.value + FRAGMENTATION.value * (activations + workspace)
        stages.append(
            TrainerMemory(
                stage=stage,
                parameters=held.parameters,
                weights=held.buffer * step.width,
                gradients=held.buffer * FLOAT,
                optimizer=held.shard * state,
                activations=activations,
                workspace=workspace,
                reserve=reserve + released,
                bucket=bucket_bytes(model, recipe) * leads_a_node(layout, stage, gpus_per_node),
            )
        )
    return stages


def bucket_bytes(model: Model, recipe: Recipe) -> int:
    """Of the memory that a node's lowest trainer rank keeps, in both phases, for the weights that
    it gives to servers."""
    if recipe.transport("cuda") != "shared_memory":
        return 0
    largest = model.largest_tensor * BYTES[recipe.model.dtype]
    weights = model.parameters * BYTES[recipe.model.dtype]
    bucket = min(recipe.sync.bucket_mb * 2**20, weights)
    return max(bucket, largest) + bucket


def leads_a_node(layout: Layout, stage: int, gpus_per_node: int) -> bool:
    """Whether one of a pipeline stage's ranks is the lowest one of its node."""
    ranks = layout.tensor * layout.copies
    first = stage * ranks
    return math.ceil(first / gpus_per_node) * gpus_per_node < first + ranks


def pass_of(recipe: Recipe) -> Pass:
    """A full micro-batch, all of whose tokens but the prompt's may be scored."""
    tokens = recipe.actor.micro_batch_tokens
    return Pass(
        tokens=tokens,
        scored=tokens,
        dtype=recipe.model.dtype,
        engine=recipe.model.dtype != "float32",
        recompute=recipe.actor.recompute == "full",
    )


def server_weights(model: Model, tensor: int, width: int) -> float:
    """Bytes on one rank of a server, which splits all it can by `tensor`, but holds a whole
    key-value head."""
    a = model.architecture
    alone = Layout(tensor, 1, 1, 1, tensor, 1, False, False)
    repeated = max(0.0, 1 - a.kv_heads / tensor) * 2 * a.head_dim * (a.hidden + a.family.qkv_bias)
    return (held_by(model, alone, 0).parameters + repeated * a.layers) * width


def kv_per_token(model: Model, tensor: int, cache_dtype: str, dtype: str) -> float:
    """Bytes of KV cache of one token on one rank of a server."""
    a = model.architecture
    width = 1 if cache_dtype.startswith("fp8") else BYTES[dtype]
    kv_heads = max(a.kv_heads / tensor, 1)
    return 2 * a.layers * kv_heads * a.head_dim * width


def server_workspace(recipe: Recipe, capacity: float) -> float:
    """Bytes that SGLang leaves outside of weights and KV cache where the recipe sets nothing."""
    arguments, tensor = recipe.rollout.server_args, recipe.rollout.tensor_parallel
    _, prefill, few, many = next(row for row in SERVER_DEFAULTS if capacity < row[0] * GIB)
    prefill = arguments.get("chunked_prefill_size") or prefill
    graph = arguments.get("cuda_graph_max_bs") or (few if tensor < 4 else many)
    mib = SERVER_BASE + SERVER_PER_PREFILL_TOKEN * max(prefill, 2048)
    mib += SERVER_PER_GRAPH_REQUEST * graph + SERVER_PER_RANK * tensor
    if capacity >= 60 * GIB:
        mib = max(mib, SERVER_LEAST)
    return mib * 2**20


def server_memory(
    model: Model, recipe: Recipe, cluster: Cluster, trainers: list[TrainerMemory]
) -> ServerMemory:
    """Of the fullest server rank."""
    capacity, arguments = cluster.gpu.memory, recipe.rollout.server_args
    tensor, width = recipe.rollout.tensor_parallel, BYTES[recipe.model.dtype]
    weights = server_weights(model, tensor, width)
    # Weights are sent while nothing is generated: a bucket, its copy as one message, and the whole
    # tensor that is gathered for it.
    sync = 3.0 * max(recipe.sync.bucket_mb * 2**20, model.embedding.numel * width)
    workspace = max(server_workspace(recipe, capacity), sync)
    trainer = 0.0
    if recipe.rollout.hands_over("cuda"):
        trainer = max(stage.weights + stage.bucket for stage in trainers) + TRAINER_RESERVE.value
    elif cluster.colocated:
        # What an update has needed at most, torch's allocator keeps.
        trainer = max(stage.total for stage in trainers)
    allowed = (capacity - trainer - workspace) / capacity
    fraction = arguments.get("mem_fraction_static", 1 - workspace / capacity)
    cache = str(arguments.get("kv_cache_dtype", "auto"))
    per_token = kv_per_token(model, tensor, cache, recipe.model.dtype)
    kv_cache = capacity * min(fraction, allowed) - weights
    if "max_total_tokens" in arguments:
        kv_cache = min(kv_cache, arguments["max_total_tokens"] * per_token)
    return ServerMemory(
        trainer=trainer,
        weights=weights,
        workspace=workspace,
        kv_cache=kv_cache,
        kv_per_token=per_token,
        fraction=fraction,
        allowed=allowed,
    )


def host_memory(recipe: Recipe, trainers: list[TrainerMemory], cluster: Cluster) -> float:
    """Bytes that a node's host keeps of its trainers' optimizer state while servers generate."""
    if not recipe.rollout.hands_over("cuda"):
        return 0.0
    return max(stage.optimizer for stage in trainers) * cluster.gpus_per_node


def gib(size: float) -> float:
    return size / GIB
