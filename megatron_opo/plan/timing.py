"""Seconds of a step, estimated. Every efficiency is in `assumptions`."""

import heapq
import math
from dataclasses import dataclass

from megatron_opo.plan.activations import expert_rows
from megatron_opo.plan.assumptions import (
    ALL_REDUCE,
    BANDWIDTH_EFFICIENCY,
    DECODE_STEP,
    FILL,
    HOST_LINK,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    PROMPT_SHARE,
)
from megatron_opo.plan.flops import Flops, active_weights, forward_flops
from megatron_opo.plan.hardware import Cluster, Gpu
from megatron_opo.plan.layout import BYTES, Layout, Model, held_by
from megatron_opo.plan.memory import FLOAT, ServerMemory, TrainerMemory
from megatron_opo.recipe import Recipe


@dataclass(frozen=True)
class Workload:
    """One step's samples. Response lengths are spread evenly around `mean_response`, as far as they
    may: from 0 to twice the mean, or up to the limit."""

    prompts: int
    samples: int
    prompt_tokens: int
    mean_response: int
    longest_response: int

    @property
    def tokens(self) -> int:
        return self.samples * (self.prompt_tokens + self.mean_response)

    @property
    def response_tokens(self) -> int:
        return self.samples * self.mean_response

    def responses(self, count: int) -> list[int]:
        """Lengths of `count` responses, short ones first."""
        spread = min(self.mean_response - 1, self.longest_response - self.mean_response)
        if count == 1:
            return [self.mean_response]
        return [
            round(self.mean_response + spread * (2 * i / (count - 1) - 1)) for i in range(count)
        ]


def workload_of(recipe: Recipe, mean_response: int | None) -> Workload:
    """Without a mean, half of the longest response."""
    rollout = recipe.rollout
    longest = rollout.max_response_tokens
    return Workload(
        prompts=rollout.prompts_per_step,
        samples=rollout.prompts_per_step * rollout.samples_per_prompt,
        prompt_tokens=max(1, round(recipe.data.max_prompt_tokens * PROMPT_SHARE.value)),
        mean_response=min(longest, mean_response or max(1, longest // 2)),
        longest_response=longest,
    )


def micro_batches(recipe: Recipe, layout: Layout, work: Workload) -> int:
    """Of each data-parallel rank; the interleaved schedule takes them by as many as there are
    stages."""
    full = recipe.actor.micro_batch_tokens * FILL.value
    by = layout.pipeline if layout.virtual > 1 else 1
    return by * max(1, math.ceil(work.tokens / layout.copies / full / by))


@dataclass(frozen=True)
class Generate:
    """`concurrency` is the mean number of samples that one server works on, `most` the largest;
    `bandwidth` and `compute` are the shares of the phase that the GPU's memory and its arithmetic
    are busy at their assumed efficiency."""

    seconds: float
    prefill_seconds: float
    steps: int
    most: int
    concurrency: float
    bandwidth: float
    compute: float


def generate_time(
    model: Model, recipe: Recipe, cluster: Cluster, server: ServerMemory, work: Workload
) -> Generate:
    """The slowest server's time, which all wait for. A server takes as many samples at once as its
    cache holds at their own lengths, and as the recipe lets through."""
    rollout = recipe.rollout
    slots = request_limit(recipe)
    decode = _Decode(model, recipe, cluster.gpu, server)
    waiting = _interleaved(work.responses(math.ceil(work.samples / rollout.servers)))
    running: list[tuple[int, int]] = []  # (step at which it ends, tokens it will have)
    step, seconds, held, most = 0, 0.0, 0, 0
    busy, busy_memory, busy_compute = 0.0, 0.0, 0.0
    # Samples in flight are halfway through their responses, on average.
    context = work.prompt_tokens + work.mean_response / 2
    while waiting or running:
        while waiting and len(running) < slots:
            tokens = work.prompt_tokens + waiting[-1]
            if running and held + tokens > server.kv_tokens:
                break
            heapq.heappush(running, (step + waiting.pop(), tokens))
            held += tokens
        most = max(most, len(running))
        steps = running[0][0] - step
        memory, compute = decode.parts(len(running), context)
        seconds += steps * (max(memory, compute) + decode.overhead)
        busy += steps * len(running)
        busy_memory += steps * memory
        busy_compute += steps * compute
        step += steps
        while running and running[0][0] <= step:
            held -= heapq.heappop(running)[1]
    prompts = math.ceil(work.prompts / rollout.servers)
    prefill = forward_flops(model, [work.prompt_tokens] * prompts, prompts).forward
    prefill /= rollout.tensor_parallel * cluster.gpu.flops * MATMUL_EFFICIENCY.value
    total = seconds + prefill
    return Generate(
        seconds=total,
        prefill_seconds=prefill,
        steps=step,
        most=most,
        concurrency=busy / max(step, 1),
        bandwidth=busy_memory / total,
        compute=(busy_compute + prefill) / total,
    )


def request_limit(recipe: Recipe) -> int:
    """Samples that the recipe lets one server work on at once."""
    rollout = recipe.rollout
    limit = max(1, rollout.max_concurrent_requests // rollout.servers)
    return min(limit, rollout.server_args.get("max_running_requests") or limit)


def _interleaved(lengths: list[int]) -> list[int]:
    """Short and long ones by turns, in a fixed order."""
    stride = max(1, round(len(lengths) * 0.618))
    while math.gcd(stride, len(lengths)) != 1:
        stride += 1
    return [lengths[i * stride % len(lengths)] for i in range(len(lengths))]


class _Decode:
    """Seconds of one decode step of a server."""

    def __init__(self, model: Model, recipe: Recipe, gpu: Gpu, server: ServerMemory):
        tensor = recipe.rollout.tensor_parallel
        experts = model.architecture.experts
        width = BYTES[recipe.model.dtype]
        one_expert = sum(w.numel for layer in model.layers for w in layer if w.expert)
        self.expert_bytes = one_expert * model.experts * width / tensor
        self.used = experts.per_token / experts.count if experts else 0.0
        # The embedding is a table: each token reads one row of it.
        table = 0 if model.architecture.tied else model.embedding.numel * width / tensor
        self.dense_bytes = server.weights - self.expert_bytes - table
        self.kv_per_token = server.kv_per_token
        self.bandwidth = gpu.bandwidth * BANDWIDTH_EFFICIENCY.value
        active = active_weights(model) + model.embedding.numel
        self.flops = 2 * active / tensor / (gpu.flops * MATMUL_EFFICIENCY.value)
        self.overhead = DECODE_STEP.value
        if tensor > 1:
            self.overhead += 2 * model.architecture.layers * ALL_REDUCE.value

    def parts(self, samples: int, context: float) -> tuple[float, float]:
        """Seconds that memory and that arithmetic need for one token of each sample."""
        touched = 1 - (1 - self.used) ** samples
        read = self.dense_bytes + touched * self.expert_bytes
        read += samples * context * self.kv_per_token
        return read / self.bandwidth, samples * self.flops


@dataclass(frozen=True)
class Update:
    """`bubble` is the share of the phase in which a pipeline stage waits for others, `mfu` model
    FLOPs over the trainers' peak."""

    seconds: float
    compute_seconds: float
    tensor_seconds: float
    context_seconds: float
    expert_seconds: float
    data_seconds: float
    bubble: float
    micro_batches: int
    flops: float
    computed_flops: float
    mfu: float


def update_time(
    model: Model, recipe: Recipe, cluster: Cluster, layout: Layout, work: Workload
) -> Update:
    flops = step_flops(model, work)
    recompute = recipe.actor.recompute == "full"
    computed = flops.computed(recompute)
    gpus = cluster.trainer_gpus
    compute = computed / gpus / (cluster.gpu.flops * MATMUL_EFFICIENCY.value)
    per_rank = work.tokens / layout.copies
    layers = model.architecture.layers / layout.pipeline
    tensor = _tensor_bytes(model, recipe, layout, per_rank) * layers
    tensor /= cluster.link(layout.tensor) * LINK_EFFICIENCY.value
    context = _context_bytes(model, recipe, layout, per_rank) * layers
    context /= cluster.link(layout.tensor * layout.context) * LINK_EFFICIENCY.value
    expert = _expert_bytes(model, recipe, layout, per_rank) / layout.pipeline
    expert /= cluster.link(layout.expert * layout.expert_tensor) * LINK_EFFICIENCY.value
    batches = micro_batches(recipe, layout, work)
    waiting = (layout.pipeline - 1) / (batches * layout.virtual)
    data = _data_seconds(model, recipe, cluster, layout)
    computing = compute + tensor + context + expert
    seconds = computing * (1 + waiting) + data
    return Update(
        seconds=seconds,
        compute_seconds=compute,
        tensor_seconds=tensor,
        context_seconds=context,
        expert_seconds=expert,
        data_seconds=data,
        bubble=computing * waiting / seconds,
        micro_batches=batches,
        flops=flops.model,
        computed_flops=computed,
        mfu=flops.model / (seconds * gpus * cluster.gpu.flops),
    )


def step_flops(model: Model, work: Workload) -> Flops:
    lengths = [work.prompt_tokens + n for n in work.responses(work.samples)]
    return forward_flops(model, lengths, work.response_tokens)


def _tensor_bytes(model: Model, recipe: Recipe, layout: Layout, tokens: float) -> float:
    """That each rank sends for one layer: the residual stream is gathered and reduced twice in each
    direction; sequence parallelism gathers two inputs once more for the weights' gradients."""
    if layout.tensor == 1:
        return 0.0
    moved = tokens * model.architecture.hidden * BYTES[recipe.model.dtype]
    moved *= (layout.tensor - 1) / layout.tensor
    passes = 4 + 4 + (4 if recipe.actor.recompute == "full" else 0)
    return moved * (passes + (2 if layout.sequence_parallel else 0))


def _context_bytes(model: Model, recipe: Recipe, layout: Layout, tokens: float) -> float:
    """That each rank sends for one layer: its keys and values to all others, whose gradients come
    back."""
    a = model.architecture
    width = 2 * max(a.kv_heads / layout.tensor, 1) * a.head_dim * BYTES[recipe.model.dtype]
    passes = 3 if recipe.actor.recompute == "full" else 2
    return tokens * width * (layout.context - 1) * passes


def _expert_bytes(model: Model, recipe: Recipe, layout: Layout, tokens: float) -> float:
    """That each rank sends for all layers with experts: tokens go out and come back, both ways."""
    experts = model.architecture.experts
    if experts is None or layout.expert == 1:
        return 0.0
    rows = expert_rows(model, layout, round(tokens)) / layout.expert_tensor
    moved = rows * model.architecture.hidden * BYTES[recipe.model.dtype]
    moved *= (layout.expert - 1) / layout.expert
    return moved * (6 if recipe.actor.recompute == "full" else 4) * len(experts.layers)


def _data_seconds(model: Model, recipe: Recipe, cluster: Cluster, layout: Layout) -> float:
    """Gradients are reduced, and new weights gathered, over all ranks with the same parameters."""
    if layout.copies == 1:
        return 0.0
    buffer = max(held_by(model, layout, s).buffer for s in range(layout.pipeline))
    weights = BYTES[recipe.model.dtype] if layout.distributed_optimizer else FLOAT
    moved = buffer * (FLOAT + weights) * (layout.copies - 1) / layout.copies
    return moved / (cluster.link(layout.tensor * layout.copies) * LINK_EFFICIENCY.value)


def sync_time(model: Model, recipe: Recipe, cluster: Cluster) -> float:
    """Rank 0 gathers every weight and broadcasts it to the servers."""
    size = model.parameters * BYTES[recipe.model.dtype]
    gather = cluster.link(cluster.trainer_gpus)
    send = cluster.link(cluster.gpus)
    return size * (1 / gather + 1 / send) / LINK_EFFICIENCY.value


def handover_time(recipe: Recipe, trainers: list[TrainerMemory]) -> float:
    """A trainer's optimizer state goes to the host and comes back."""
    if not recipe.rollout.hands_over("cuda"):
        return 0.0
    return 2 * max(stage.optimizer for stage in trainers) / HOST_LINK.value
