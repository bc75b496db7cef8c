"""Which parameters each rank holds: exact sizes of weights, gradients and optimizer state."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_opo.errors import RecipeError
from megatron_opo.recipe import Recipe
from megatron_opo.weights.families import EMBEDDING, FINAL_NORM, Architecture, Row

# Megatron's alignment of parameters and buckets in a sharded buffer, in elements.
PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Layout:
    """How a trainer's ranks share the model. There are `data` replicas; the `tensor` x `context` x
    `data` ranks of a pipeline stage hold its experts as `expert` x `expert_tensor` x `expert_data`.
    """

    tensor: int
    pipeline: int
    virtual: int
    expert: int
    expert_tensor: int
    data: int
    sequence_parallel: bool
    distributed_optimizer: bool
    context: int = 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same dense parameters."""
        return self.context * self.data

    @property
    def expert_data(self) -> int:
        return self.tensor * self.copies // (self.expert * self.expert_tensor)


def layout_of(recipe: Recipe, gpus: int) -> Layout:
    """The layout of a recipe on so many trainer GPUs.

    Raises:
        RecipeError: the GPUs do not fit the layout.
    """
    actor = recipe.actor
    replica = recipe.actor.replica_size
    data = actor.data_parallel or gpus // replica
    fewest = actor.smallest_world
    if gpus % fewest or data * replica != gpus:
        what = f"a multiple of {fewest}" if actor.data_parallel is None else str(data * replica)
        raise RecipeError(
            f"{gpus} trainer GPUs do not fit {actor.replica_shape}, actor.expert_parallel "
            f"{actor.expert_parallel} and actor.data_parallel {actor.data_parallel}: give {what} "
            "(--nodes, --gpus-per-node or --gpus), or change the layout"
        )
    return Layout(
        tensor=actor.tensor_parallel,
        pipeline=actor.pipeline_parallel,
        virtual=actor.virtual_pipeline,
        expert=actor.expert_parallel,
        expert_tensor=actor.expert_tensor_size,
        data=data,
        sequence_parallel=actor.sequence_parallel,
        distributed_optimizer=recipe.optimizer.distributed,
        context=actor.context_parallel,
    )


@dataclass(frozen=True)
class Weight:
    """One parameter of `rows` x `columns` elements. If `split`, ranks share its rows (which for
    some are the columns of the matrix); a vocabulary is padded to a multiple of them."""

    rows: int
    columns: int
    split: bool
    expert: bool
    is_matrix: bool

    def on_rank(self, layout: Layout) -> int:
        """Elements that each rank holds of it."""
        ranks = layout.expert_tensor if self.expert else layout.tensor
        return math.ceil(self.rows / ranks) * self.columns if self.split else self.numel

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Model:
    """An architecture's parameters by place; an expert stands for all of its layer's. `tensors` is
    how many tensors a checkpoint has, `largest_tensor` how many elements the largest of them."""

    architecture: Architecture
    tensors: int
    largest_tensor: int
    embedding: Weight
    layers: tuple[tuple[Weight, ...], ...]
    final_norm: Weight

    @property
    def experts(self) -> int:
        return self.architecture.experts.count if self.architecture.experts else 0

    @property
    def parameters(self) -> int:
        alone = Layout(1, 1, 1, 1, 1, 1, False, True)
        return held_by(self, alone, 0).parameters

    def has_experts(self, layer: int) -> bool:
        experts = self.architecture.experts
        return experts is not None and layer in experts.layers


def model_of(architecture: Architecture) -> Model:
    family, experts = architecture.family, architecture.experts

    def weights(rows: Iterable[Row], expert: bool = False) -> tuple[Weight, ...]:
        return tuple(_weight(architecture, row, expert) for row in rows)

    common = weights((*family.attention, *family.norms))
    dense = (*common, *weights(family.mlp))
    sparse = (
        (*common, *weights(family.router), *weights(family.expert, expert=True)) if experts else ()
    )
    with_experts = experts.layers if experts else ()
    shapes = architecture.hf_shapes().values()
    return Model(
        architecture,
        len(shapes),
        max(map(math.prod, shapes)),
        _weight(architecture, EMBEDDING),
        tuple(sparse if i in with_experts else dense for i in range(architecture.layers)),
        _weight(architecture, FINAL_NORM),
    )


def _weight(architecture: Architecture, row: Row, expert: bool = False) -> Weight:
    shapes = [architecture.shape(part) for part in row.parts]
    numel = sum(math.prod(shape) for shape in shapes)
    rows = shapes[0][1] if row.split == 1 else sum(shape[0] for shape in shapes)
    return Weight(
        rows=rows,
        columns=numel // rows,
        split=row.split is not None,
        expert=expert,
        is_matrix=len(shapes[0]) > 1,
    )


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers [first, end) that a rank computes in one go."""

    first: int
    end: int
    has_embedding: bool
    has_head: bool


def chunks_of(layers: int, layout: Layout, stage: int) -> list[Chunk]:
    """What pipeline stage `stage` computes: `virtual` chunks, each of equally many layers."""
    per_chunk = layers // (layout.pipeline * layout.virtual)
    chunks = []
    for i in range(layout.virtual):
        first = (i * layout.pipeline + stage) * per_chunk
        end = first + per_chunk
        chunks.append(Chunk(first, end, first == 0, end == layers))
    return chunks


@dataclass(frozen=True)
class Held:
    """Elements on one rank. `parameters` as the model counts them; `buffer` with the alignment of a
    sharded gradient buffer, `experts` of them those of experts; `shard` is the most that a rank's
    share of the buffer has in the optimizer; `largest` the largest single parameter."""

    parameters: int = 0
    buffer: int = 0
    shard: int = 0
    largest: int = 0
    experts: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.parameters + other.parameters,
            self.buffer + other.buffer,
            self.shard + other.shard,
            max(self.largest, other.largest),
            self.experts + other.experts,
        )


def held_by(model: Model, layout: Layout, stage: int) -> Held:
    """What each rank of a pipeline stage holds."""
    total = Held()
    for chunk in chunks_of(model.architecture.layers, layout, stage):
        dense, expert = _chunk_sizes(model, layout, chunk)
        total += _buffered(dense, layout.copies, layout)
        sparse = _buffered(expert, layout.expert_data, layout)
        total += replace(sparse, experts=sparse.buffer)
        shared = model.architecture.tied and layout.pipeline > 1
        vocabulary = model.embedding.on_rank(layout)
        for here in (chunk.has_embedding, chunk.has_head):
            # A copy of a shared embedding has a bucket of its own.
            if here and shared:
                total += _buffered([vocabulary], layout.copies, layout)
    return total


def _chunk_sizes(model: Model, layout: Layout, chunk: Chunk) -> tuple[list[int], list[int]]:
    """Sizes of the dense and of the expert parameters, without a shared embedding."""
    local_experts = model.experts // layout.expert
    dense: list[int] = []
    expert: list[int] = []
    for layer in model.layers[chunk.first : chunk.end]:
        for weight in layer:
            size = weight.on_rank(layout)
            if weight.expert:
                expert += [size] * local_experts
            else:
                dense.append(size)
    tied = model.architecture.tied
    if chunk.has_embedding and not (tied and layout.pipeline > 1):
        dense.append(model.embedding.on_rank(layout))
    if chunk.has_head:
        dense.append(model.final_norm.on_rank(layout))
        if not tied:
            dense.append(model.embedding.on_rank(layout))
    return dense, expert


def _buffered(sizes: Iterable[int], copies: int, layout: Layout) -> Held:
    sizes = list(sizes)
    if not sizes:
        return Held()
    parameters = sum(sizes)
    if not layout.distributed_optimizer:
        return Held(parameters, parameters, parameters, max(sizes))
    aligned = sum(_round_up(size, PARAMETER_ALIGNMENT) for size in sizes)
    buffer = _round_up(aligned, math.lcm(copies, BUCKET_ALIGNMENT))
    return Held(parameters, buffer, min(buffer // copies, parameters), max(sizes))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
