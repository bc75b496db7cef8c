"""Seconds of a step, estimated. Every efficiency is in `assumptions`."""

import heapq
import math
from dataclasses import dataclass

from megatron_opo.plan.activations import expert_rows, rows_per_rank
from megatron_opo.plan.assumptions import (
    ALL_REDUCE,
    BANDWIDTH_EFFICIENCY,
    COLLECTIVE,
    DECODE_STEP,
    EXPERT_IMBALANCE,
    FILL,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    PROMPT_SHARE,
)
from megatron_opo.plan.flops import Flops, active_weights, forward_flops
from megatron_opo.plan.hardware import Cluster, Gpu
from megatron_opo.plan.layout import BYTES, Held, Layout, Model, held_by
from megatron_opo.plan.memory import FLOAT, ServerMemory
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
    """`longest_seconds` is what the longest response takes alone on its server, which more servers
    do not shorten; `concurrency` the mean number of samples that one server works on, `most` the
    largest; `bandwidth` and `compute` are the shares of the phase that the GPU's memory and its
    arithmetic are busy at their assumed efficiency."""

    seconds: float
    prefill_seconds: float
    longest_seconds: float
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
    lengths = work.responses(math.ceil(work.samples / rollout.servers))
    waiting = _interleaved(lengths)
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
        longest_seconds=max(lengths) * (max(decode.parts(1, context)) + decode.overhead),
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
    """`hidden_seconds` of the gradients' reduction go by during the backward pass, `data_seconds`
    are those that do not, with the gathering of new weights. `bubble` is the share of the phase in
    which a pipeline stage waits for others, `mfu` model FLOPs over the trainers' peak."""

    seconds: float
    compute_seconds: float
    tensor_seconds: float
    context_seconds: float
    expert_seconds: float
    stage_seconds: float
    start_seconds: float
    data_seconds: float
    hidden_seconds: float
    bubble: float
    micro_batches: int
    flops: float
    computed_flops: float
    mfu: float


def update_time(
    model: Model, recipe: Recipe, cluster: Cluster, layout: Layout, work: Workload, flops: Flops
) -> Update:
    """Each rank's arithmetic and the messages that it waits for, one after the other, times what
    the pipeline adds; then the gradients and the new weights. `flops` are those of `step_flops`."""
    computed = flops.computed(recipe.actor.recompute == "full")
    gpus = cluster.trainer_gpus
    busiest = computed + _waited_flops(model, recipe, layout, flops)
    compute = busiest / gpus / (cluster.gpu.flops * MATMUL_EFFICIENCY.value)
    per_rank = work.tokens / layout.copies
    layers = model.architecture.layers / layout.pipeline
    tensor = _tensor_bytes(model, recipe, layout, per_rank) * layers
    tensor /= cluster.ring(layout.tensor) * LINK_EFFICIENCY.value
    context = _context_bytes(model, recipe, layout, per_rank) * layers
    context /= cluster.ring(layout.context, layout.tensor) * LINK_EFFICIENCY.value
    expert = _expert_bytes(model, recipe, layout, per_rank) / layout.pipeline
    expert *= _seconds_to_experts(cluster, layout)
    stage = _stage_bytes(model, recipe, layout, per_rank)
    stage /= cluster.between(cluster.trainer_gpus) * LINK_EFFICIENCY.value
    batches = micro_batches(recipe, layout, work)
    start = _start_seconds(model, recipe, layout, batches)
    computing = compute + tensor + context + expert + stage + start
    waiting = (layout.pipeline - 1) / (batches * layout.virtual)
    held = [held_by(model, layout, stage) for stage in range(layout.pipeline)]
    fullest = max(held, key=lambda each: each.buffer)
    reduce, gather = _data_seconds(recipe, cluster, layout, fullest)
    backward = computing / batches * (1 - flops.forward / computed)
    hidden = _hidden_seconds(recipe, fullest, reduce, backward)
    seconds = computing * (1 + waiting) + reduce - hidden + gather
    return Update(
        seconds=seconds,
        compute_seconds=compute,
        tensor_seconds=tensor,
        context_seconds=context,
        expert_seconds=expert,
        stage_seconds=stage,
        start_seconds=start,
        data_seconds=reduce - hidden + gather,
        hidden_seconds=hidden,
        bubble=computing * waiting / seconds,
        micro_batches=batches,
        flops=flops.model,
        computed_flops=computed,
        mfu=flops.model / (seconds * gpus * cluster.gpu.flops),
    )


def step_flops(model: Model, work: Workload) -> Flops:
    lengths = [work.prompt_tokens + n for n in work.responses(work.samples)]
    return forward_flops(model, lengths, work.response_tokens)


def _waited_flops(model: Model, recipe: Recipe, layout: Layout, flops: Flops) -> float:
    """What the busiest rank's experts compute beyond the mean, on all ranks: these wait for it in
    every layer."""
    experts = model.architecture.experts
    if experts is None or layout.expert == 1:
        return 0.0
    weights = sum(weight.numel for layer in model.layers for weight in layer if weight.expert)
    share = weights * experts.per_token / active_weights(model)
    passes = 4 if recipe.actor.recompute == "full" else 3
    return flops.layers * share * passes * (EXPERT_IMBALANCE.value - 1)


def _tensor_bytes(model: Model, recipe: Recipe, layout: Layout, tokens: float) -> float:
    """That each rank sends for one layer: the residual stream is gathered and reduced twice in each
    direction; sequence parallelism gathers two inputs once more for the weights' gradients."""
    moved = tokens * model.architecture.hidden * BYTES[recipe.model.dtype]
    moved *= (layout.tensor - 1) / layout.tensor
    return moved * _tensor_messages(recipe, layout)


def _tensor_messages(recipe: Recipe, layout: Layout) -> int:
    if layout.tensor == 1:
        return 0
    passes = 4 + 4 + (4 if recipe.actor.recompute == "full" else 0)
    return passes + (2 if layout.sequence_parallel else 0)


def _context_bytes(model: Model, recipe: Recipe, layout: Layout, tokens: float) -> float:
    """That each rank sends for one layer: its keys and values to all others, whose gradients come
    back."""
    a = model.architecture
    width = 2 * max(a.kv_heads / layout.tensor, 1) * a.head_dim * BYTES[recipe.model.dtype]
    return tokens * width * (layout.context - 1) * _context_messages(recipe, layout)


def _context_messages(recipe: Recipe, layout: Layout) -> int:
    if layout.context == 1:
        return 0
    return 3 if recipe.actor.recompute == "full" else 2


def _expert_bytes(model: Model, recipe: Recipe, layout: Layout, tokens: float) -> float:
    """That each rank has for the experts of all layers, its own among them: tokens go out and come
    back, both ways, each as often as it has experts."""
    experts = model.architecture.experts
    if experts is None:
        return 0.0
    rows = expert_rows(model, layout, round(tokens)) / layout.expert_tensor
    moved = rows * model.architecture.hidden * BYTES[recipe.model.dtype]
    return moved * _expert_messages(recipe, layout) * len(experts.layers)


def _expert_messages(recipe: Recipe, layout: Layout) -> int:
    if layout.expert == 1:
        return 0
    return 6 if recipe.actor.recompute == "full" else 4


def _start_seconds(model: Model, recipe: Recipe, layout: Layout, batches: int) -> float:
    """Of all messages of a rank, however small they are: many small micro-batches have many."""
    in_layer = _tensor_messages(recipe, layout) + _context_messages(recipe, layout)
    in_layer += _expert_messages(recipe, layout)
    messages = in_layer * model.architecture.layers / layout.pipeline
    if layout.pipeline > 1:
        messages += 2 * layout.virtual
    return batches * messages * COLLECTIVE.value


def _seconds_to_experts(cluster: Cluster, layout: Layout) -> float:
    """Of a byte that may go to any rank with experts alike: those of the own node are reached
    over its links while the others are over the network; the slower of the two counts."""
    ranks = layout.expert
    near = min(ranks, max(1, cluster.gpus_per_node // layout.expert_tensor))
    inside = (near - 1) / ranks / cluster.gpu.node_link
    outside = (ranks - near) / ranks / cluster.network.link
    return max(inside, outside) / LINK_EFFICIENCY.value


def _stage_bytes(model: Model, recipe: Recipe, layout: Layout, tokens: float) -> float:
    """That each rank sends to the next chunk of layers, and back in the backward pass."""
    if layout.pipeline == 1:
        return 0.0
    rows = rows_per_rank(round(tokens), layout)
    return 2 * layout.virtual * rows * model.architecture.hidden * BYTES[recipe.model.dtype]


def _data_seconds(
    recipe: Recipe, cluster: Cluster, layout: Layout, held: Held
) -> tuple[float, float]:
    """For the gradients' reduction, and for gathering new weights, over all ranks that hold the
    same parameters: those of experts are others than those of the rest.

    A ring of n ranks sends (n - 1) / n of the buffer from each. Without a distributed optimizer
    the reduction leaves the whole sum on all of them, which is twice as much, and weights are not
    gathered.
    """
    groups = (
        (held.buffer - held.experts, layout.copies, layout.tensor),
        (held.experts, layout.expert_data, layout.expert * layout.expert_tensor),
    )
    per_byte = sum(
        elements * (ranks - 1) / ranks / cluster.ring(ranks, apart)
        for elements, ranks, apart in groups
    )
    per_byte /= LINK_EFFICIENCY.value
    if not layout.distributed_optimizer:
        return per_byte * 2 * FLOAT, 0.0
    return per_byte * FLOAT, per_byte * BYTES[recipe.model.dtype]


def _hidden_seconds(recipe: Recipe, held: Held, reduce: float, backward: float) -> float:
    """Of the reduction, with actor.grad_bucket_mb. Only the last micro-batch's gradients are whole,
    so it goes on during that one's backward pass, and the last bucket (of the first layers) is full
    only at its end: min(backward, reduce - the last bucket's)."""
    if recipe.actor.grad_bucket_mb is None:
        return 0.0
    last = min(1.0, recipe.actor.grad_bucket_mb * 2**20 / (held.buffer * FLOAT))
    return min(backward, reduce * (1 - last))
