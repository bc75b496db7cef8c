"""How a Megatron parameter of one rank is made of Hugging Face tensors, and back."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_opo.errors import WeightError
from megatron_opo.weights.families import EMBEDDING, OUTPUT, Architecture, Row

# Transformer Engine keeps a norm inside the linear layer that follows it.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
EXPERT_NAME = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.)?(?P<rest>linear_fc[12]\.weight)(?P<grouped>\d*)$"
)


@dataclass(frozen=True)
class Place:
    """Which slice a rank holds of the parameters that are cut: number `rank` of `ranks`; of those
    of experts, which may be cut into fewer, number `expert_rank` of `expert_ranks`."""

    rank: int = 0
    ranks: int = 1
    expert_rank: int = 0
    expert_ranks: int = 1

    def of(self, row: Row) -> tuple[int, int]:
        """Number of this rank's slice of a row, and how many there are."""
        if row.split is None:
            return 0, 1
        if row.expert is None:
            return self.rank, self.ranks
        return self.expert_rank, self.expert_ranks


def local_parameters(
    model: Sequence[torch.nn.Module], architecture: Architecture, place: Place
) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by Megatron name, layers and experts counted from 0 over the whole
    model.

    Wrappers such as DistributedDataParallel are looked through.

    Raises:
        WeightError: the model is not one of this architecture.
    """
    parameters = {}
    for chunk in map(_unwrapped, model):
        layers = chunk.decoder.layers
        for name, parameter in chunk.named_parameters():
            parameters[_global_name(name, layers)] = parameter
    expected = {
        name: local_shape(architecture, row, place.of(row)[1])
        for name, row in parameter_rows(architecture)
    }
    extra = sorted(set(parameters) - set(expected))
    if extra:
        raise WeightError(
            f"the Megatron model has parameters that a {architecture.family.model_type} model has "
            f"not: {', '.join(extra)}; drop what adds them from actor.transformer_config"
        )
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != expected[name]:
            raise WeightError(
                f"the Megatron model's `{name}` is {list(parameter.shape)}, but config.json says "
                f"{list(expected[name])}: the model was built from another config"
            )
    return parameters


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _global_name(name: str, layers: Any) -> str:
    for fused, separate in FUSED_NORMS.items():
        name = name.replace(fused, separate)
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    local, _, rest = name.removeprefix(prefix).partition(".")
    layer = layers[int(local)]
    expert = EXPERT_NAME.match(rest)
    if expert:
        number = int(expert["one"] or expert["grouped"]) + layer.mlp.local_expert_indices[0]
        rest = f"mlp.experts.local_experts.{number}.{expert['rest']}"
    return f"{prefix}{layer.layer_number - 1}.{rest}"


def parameter_rows(architecture: Architecture) -> Iterator[tuple[str, Row]]:
    """Megatron name and row of every parameter that a checkpoint must fill."""
    for row in architecture.rows():
        yield row.megatron, row
    if architecture.tied:
        # The last pipeline stage's own copy of the embedding.
        yield OUTPUT.megatron, EMBEDDING


def slice_bounds(shape: tuple[int, ...], split: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start and end along `split` of one rank's slice; they may pass the tensor's end, where the
    vocabulary is padded."""
    per_rank = -(-shape[split] // ranks)
    return rank * per_rank, (rank + 1) * per_rank


def part_bounds(
    architecture: Architecture, row: Row, rank: int, ranks: int
) -> list[tuple[int, int]]:
    """Start and end along `row.split` of what one rank holds of each part; as in `slice_bounds`
    they may pass the end of the vocabulary.

    With fewer key-value heads than ranks, several ranks share a group's rows (its queries, then
    key, then value) evenly, as Megatron does, so that a rank may hold nothing of a part.
    """
    shapes = [architecture.shape(part) for part in row.parts]
    if row.split is None:
        return [(0, shape[0]) for shape in shapes]
    if not row.per_kv_head or ranks <= architecture.kv_heads:
        return [slice_bounds(shape, row.split, rank, ranks) for shape in shapes]
    sharing = ranks // architecture.kv_heads
    heights = [shape[0] // architecture.kv_heads for shape in shapes]
    share = sum(heights) // sharing
    group, place = divmod(rank, sharing)
    bounds, above = [], 0
    for height in heights:
        first, last = (
            group * height + min(max(edge - above, 0), height)
            for edge in (place * share, (place + 1) * share)
        )
        bounds.append((first, last))
        above += height
    return bounds


def local_kv_groups(architecture: Architecture, ranks: int) -> int:
    """Groups whose rows lie in one rank's slice; 1 where it holds only some of a group's."""
    return max(1, architecture.kv_heads // ranks)


def local_shape(architecture: Architecture, row: Row, tp_size: int) -> tuple[int, ...]:
    """Shape of the parameter on one rank."""
    shapes = [list(architecture.shape(part)) for part in row.parts]
    merged = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
    if row.split is not None:
        merged[row.split] = slice_bounds(tuple(merged), row.split, 0, tp_size)[1]
    return tuple(merged)


def merge(row: Row, parts: list[torch.Tensor], kv_groups: int) -> torch.Tensor:
    """One rank's slices of the parts -> its Megatron parameter. `kv_groups` are this rank's."""
    if len(parts) == 1:
        return parts[0]
    blocks = kv_groups if row.per_kv_head else 1
    blocked = [part.unflatten(0, (blocks, part.shape[0] // blocks)) for part in parts]
    return torch.cat(blocked, dim=1).flatten(0, 1)


def unmerge(
    row: Row, parameter: torch.Tensor, heights: list[int], kv_groups: int, index: int
) -> torch.Tensor:
    """Part `index` of a parameter, the inverse of `merge`. `heights` are the parts' rows in it."""
    if len(heights) == 1:
        return parameter
    blocks = kv_groups if row.per_kv_head else 1
    sizes = [height // blocks for height in heights]
    return parameter.unflatten(0, (blocks, -1)).split(sizes, dim=1)[index].flatten(0, 1)


def whole_parts(
    architecture: Architecture, row: Row, slices: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The Hugging Face tensors of a row, from its parameter on each tensor-parallel rank in order
    (one rank's will do where `row.split` is None), without the rows that pad the vocabulary.

    They are contiguous and share no storage with each other; where nothing is cut or merged they
    are the slices themselves.
    """
    if row.split is None:
        return [slices[0]]
    heights = [architecture.shape(part)[0] for part in row.parts]
    if row.per_kv_head:
        # Ranks follow each other in the merged matrix, whether or not their edges are groups'.
        whole = slices[0] if len(slices) == 1 else torch.cat(list(slices))
        sizes = [height // architecture.kv_heads for height in heights]
        blocks = whole.unflatten(0, (architecture.kv_heads, -1)).split(sizes, dim=1)
        return [x.clone(memory_format=torch.contiguous_format).flatten(0, 1) for x in blocks]
    if len(heights) > 1:
        local = [height // len(slices) for height in heights]
        return [
            torch.cat([unmerge(row, each, local, 1, i) for each in slices])
            for i in range(len(heights))
        ]
    whole = slices[0] if len(slices) == 1 else torch.cat(list(slices), dim=row.split)
    if row.parts[0].shape[0] == "vocab" and len(whole) > architecture.vocab:
        # A copy, so that the padding is not sent along in the tensor's storage.
        return [whole[: architecture.vocab].clone()]
    return [whole]
