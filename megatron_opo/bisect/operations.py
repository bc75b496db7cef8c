"""The operations of a transformer in the order in which a token goes through them, and where each
is found: in SGLang's modules and in Megatron's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_opo.weights.families import Architecture

EMBEDDING, FINAL_NORM, LOGITS, LOGPROB = "embedding", "final norm", "logits", "logprob"

# Of the layers, each [T, channels].
INPUT_NORM = "input norm"
QKV = "qkv projection"
QUERY_NORM, KEY_NORM = "query norm", "key norm"
QUERY, KEY = "rotated query", "rotated key"
ATTENTION = "attention"
OUTPUT_PROJECTION = "output projection"
RESIDUAL_1 = "sum after attention"
POST_NORM = "post-attention norm"
GATE_UP = "gate-up projection"
ACTIVATION = "activation"
DOWN = "down projection"
EXPERTS = "experts"
RESIDUAL_2 = "sum after MLP"

CAUSES = {
    EMBEDDING: "other weights of the embedding, or an embedding that one side scales",
    INPUT_NORM: "the order of rounding (scaled before or after the cast), eps, a float32 residual",
    QKV: "a bias that one side lacks, the layout of q, k and v, quantisation, a gemm kernel that "
    "adds up in another order",
    QUERY_NORM: "eps, the order of rounding, or a norm over all heads instead of each",
    QUERY: "rope_theta, rope_scaling, positions, the dtype of the cos/sin cache",
    ATTENTION: "the attention kernel, its scale, a sliding window, the dtype of the kv cache",
    OUTPUT_PROJECTION: "a gemm kernel that adds up in another order, quantisation, other weights",
    RESIDUAL_1: "a residual that is kept in another dtype",
    GATE_UP: "gate and up in another order, quantisation, a gemm kernel, other weights",
    ACTIVATION: "another activation function, or one that rounds between silu and product",
    DOWN: "a gemm kernel that adds up in another order, quantisation, other weights",
    EXPERTS: "the router's choice or its normalisation, the order in which experts are summed",
    LOGITS: "the dtype of the output layer, tied embeddings, soft-capping or scaling of logits",
    LOGPROB: "the temperature, or log_softmax in another dtype or order",
}
CAUSES |= {
    KEY_NORM: CAUSES[QUERY_NORM],
    KEY: CAUSES[QUERY],
    RESIDUAL_2: CAUSES[RESIDUAL_1],
    POST_NORM: CAUSES[INPUT_NORM],
    FINAL_NORM: CAUSES[INPUT_NORM],
}


@dataclass(frozen=True)
class Place:
    """A tensor that a module was given or gave: ("in" or "out") and its number."""

    module: str
    side: str = "out"
    index: int = 0
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Operation:
    """`layer` is None outside of the layers, `trainer` and `server` where no module has it."""

    name: str
    layer: int | None = None
    server: Place | None = None
    trainer: Place | None = None

    @property
    def title(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer}: {self.name}"


def operations(architecture: Architecture) -> list[Operation]:
    """All of a model's, from the embedding to the logprob."""
    found = [Operation(EMBEDDING, None, Place("model.embed_tokens"), Place("embedding"))]
    for layer in range(architecture.layers):
        found += _of_layer(architecture, layer)
    return [
        *found,
        Operation(FINAL_NORM, None, Place("model.norm"), Place("decoder.final_layernorm")),
        Operation(LOGITS),
        Operation(LOGPROB),
    ]


def _of_layer(architecture: Architecture, layer: int) -> list[Operation]:
    server, trainer = f"model.layers.{layer}", f"decoder.layers.{layer}"
    attention, of_attention = f"{server}.self_attn", f"{trainer}.self_attention"
    after, of_after = f"{server}.post_attention_layernorm", f"{trainer}.pre_mlp_layernorm"
    is_last = layer == architecture.layers - 1
    # SGLang adds a layer's output where the next one normalises it.
    adds = "model.norm" if is_last else f"model.layers.{layer + 1}.input_layernorm"
    added = "decoder.final_layernorm" if is_last else f"decoder.layers.{layer + 1}.input_layernorm"

    def split(mixed: torch.Tensor) -> torch.Tensor:
        return queries_keys_values(mixed, architecture)

    pairs = [
        (INPUT_NORM, Place(f"{server}.input_layernorm"), Place(f"{trainer}.input_layernorm")),
        (QKV, Place(f"{attention}.qkv_proj"), Place(f"{of_attention}.linear_qkv", arrange=split)),
        (QUERY_NORM, Place(f"{attention}.q_norm"), Place(f"{of_attention}.q_layernorm")),
        (KEY_NORM, Place(f"{attention}.k_norm"), Place(f"{of_attention}.k_layernorm")),
        (
            QUERY,
            Place(f"{attention}.attn", "in", 0),
            Place(f"{of_attention}.core_attention", "in", 0),
        ),
        (
            KEY,
            Place(f"{attention}.attn", "in", 1),
            Place(f"{of_attention}.core_attention", "in", 1),
        ),
        (ATTENTION, Place(f"{attention}.attn"), Place(f"{of_attention}.core_attention")),
        (OUTPUT_PROJECTION, Place(f"{attention}.o_proj"), Place(f"{of_attention}.linear_proj")),
        (RESIDUAL_1, Place(after, "out", 1), Place(of_after, "in", 0)),
        (POST_NORM, Place(after), Place(of_after)),
        *_of_mlp(architecture, layer),
        (RESIDUAL_2, Place(adds, "out", 1), Place(added, "in", 0)),
    ]
    if not architecture.family.qk_norm:
        pairs = [each for each in pairs if each[0] not in (QUERY_NORM, KEY_NORM)]
    return [Operation(name, layer, *places) for name, *places in pairs]


def _of_mlp(architecture: Architecture, layer: int) -> list[tuple[str, Place, Place]]:
    server, trainer = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    if architecture.experts is not None and layer in architecture.experts.layers:
        return [(EXPERTS, Place(server), Place(trainer))]
    fc1, fc2 = f"{trainer}.linear_fc1", f"{trainer}.linear_fc2"
    return [
        (GATE_UP, Place(f"{server}.gate_up_proj"), Place(fc1)),
        (ACTIVATION, Place(f"{server}.down_proj", "in"), Place(fc2, "in")),
        (DOWN, Place(f"{server}.down_proj"), Place(fc2)),
    ]


def queries_keys_values(mixed: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """Megatron's [T, groups * (queries of the group, key, value)] as SGLang's [T, all queries, all
    keys, all values]."""
    heads, groups, channels = architecture.heads, architecture.kv_heads, architecture.head_dim
    per_group = heads // groups
    parts = mixed.unflatten(-1, (groups, per_group + 2, channels))
    query, key, value = parts.split((per_group, 1, 1), dim=-2)
    return torch.cat([each.flatten(-3) for each in (query, key, value)], dim=-1)
