"""Model families: one table each, from which loading, export and shape checks are derived.

A family is the Hugging Face `model_type`, what sets its architecture apart, and its weights in
Hugging Face order. Adding one is adding an entry to FAMILIES and a parity test.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor. `shape` names sizes of `Architecture.sizes`: ("q", "hidden")."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Example, for 2 key-value heads: the parameter linear_qkv is the parts q, k, v with
    `per_kv_head` set, so its rows are q of group 0, k 0, v 0, q of group 1, k 1, v 1. Without it
    the parts follow each other whole (gate, then up). Each tensor-parallel rank holds such a
    parameter made of its slices of the parts along `split`; None means every rank holds all of it.

    In a family's table the names have `{layer}` and `{expert}` in them; `Architecture.rows` fills
    these in and sets `layer` and `expert`, both counted from 0 over the whole model.
    """

    megatron: str
    parts: tuple[Part, ...]
    split: int | None = None
    per_kv_head: bool = False
    layer: int | None = None
    expert: int | None = None

    def at(self, layer: int, expert: int | None = None) -> "Row":
        place = {"layer": layer, "expert": expert}
        return replace(
            self,
            megatron=self.megatron.format(**place),
            parts=tuple(Part(part.name.format(**place), part.shape) for part in self.parts),
            layer=layer,
            expert=expert,
        )


@dataclass(frozen=True)
class Family:
    """`required` are config values this code relies on; a config without the key has them.
    `has_window` says that attention may be confined to a sliding window.

    `attention`, `mlp` and `norms` are the parameters of a layer, in Hugging Face order. In a layer
    with experts, `router` and (for each expert) `expert` stand in the place of `mlp`. What comes
    before and after the layers is common to all families.
    """

    model_type: str
    required: dict[str, tuple]
    attention: tuple[Row, ...]
    mlp: tuple[Row, ...]
    norms: tuple[Row, ...]
    router: tuple[Row, ...] = ()
    expert: tuple[Row, ...] = ()
    has_window: bool = False

    @property
    def qk_norm(self) -> bool:
        return any("q_layernorm" in row.megatron for row in self.attention)

    @property
    def qkv_bias(self) -> bool:
        return any("linear_qkv.bias" in row.megatron for row in self.attention)


LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def _layer(megatron: str, *parts: tuple[str, tuple[str, ...]], **how) -> Row:
    return Row(LAYER + megatron, tuple(Part(HF_LAYER + n, shape) for n, shape in parts), **how)


EMBEDDING = Row(
    "embedding.word_embeddings.weight",
    (Part("model.embed_tokens.weight", ("vocab", "hidden")),),
    split=0,
)
ATTENTION = (
    _layer(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", ("q", "hidden")),
        ("self_attn.k_proj.weight", ("kv", "hidden")),
        ("self_attn.v_proj.weight", ("kv", "hidden")),
        split=0,
        per_kv_head=True,
    ),
    _layer(
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight", ("hidden", "q")),
        split=1,
    ),
)
QKV_BIAS = _layer(
    "self_attention.linear_qkv.bias",
    ("self_attn.q_proj.bias", ("q",)),
    ("self_attn.k_proj.bias", ("kv",)),
    ("self_attn.v_proj.bias", ("kv",)),
    split=0,
    per_kv_head=True,
)
QK_NORM = (
    _layer("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", ("head",))),
    _layer("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", ("head",))),
)
GATED_MLP = (
    _layer(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
        split=0,
    ),
    _layer("mlp.linear_fc2.weight", ("mlp.down_proj.weight", ("hidden", "ffn")), split=1),
)
ROUTER = (_layer("mlp.router.weight", ("mlp.gate.weight", ("experts", "hidden"))),)
EXPERT = (
    _layer(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden")),
        ("mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden")),
        split=0,
    ),
    _layer(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ("mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),
        split=1,
    ),
)
NORMS = (
    _layer("input_layernorm.weight", ("input_layernorm.weight", ("hidden",))),
    _layer("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", ("hidden",))),
)
FINAL_NORM = Row("decoder.final_layernorm.weight", (Part("model.norm.weight", ("hidden",)),))
OUTPUT = Row("output_layer.weight", (Part("lm_head.weight", ("vocab", "hidden")),), split=0)

PLAIN_DECODER = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
}

FAMILIES = {
    family.model_type: family
    for family in (
        # Llama 2, 3 and 3.x, SmolLM2, DeepSeek-R1-Distill-Llama
        Family("llama", PLAIN_DECODER, ATTENTION, GATED_MLP, NORMS),
        Family("mistral", PLAIN_DECODER, ATTENTION, GATED_MLP, NORMS, has_window=True),
        # Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen
        Family(
            "qwen2",
            {**PLAIN_DECODER, "use_mrope": (False,)},
            (*ATTENTION, QKV_BIAS),
            GATED_MLP,
            NORMS,
            has_window=True,
        ),
        Family("qwen3", PLAIN_DECODER, (*ATTENTION, *QK_NORM), GATED_MLP, NORMS, has_window=True),
        Family(
            "qwen3_moe",
            PLAIN_DECODER,
            (*ATTENTION, *QK_NORM),
            GATED_MLP,
            NORMS,
            router=ROUTER,
            expert=EXPERT,
        ),
    )
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: `kind` is a key of ROPES and `values` holds its numbers by their Hugging
    Face names, `attention_factor` 0 where yarn derives it from `factor`."""

    theta: float
    kind: str
    values: dict[str, float]

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied with, so that queries and keys both grow by it."""
        return self.values.get("attention_factor") or self.derived_attention_factor

    @property
    def derived_attention_factor(self) -> float:
        """Of yarn (arXiv 2309.00071), where the config gives none."""
        factor = self.values["factor"] if self.kind == "yarn" else 1.0
        return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Experts:
    """Mixture of experts. `layers` are those that have them, counted from 0; the others have a
    dense MLP. `normalize` makes the weights of a token's chosen experts sum to 1."""

    count: int
    per_token: int
    ffn: int
    normalize: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """A checked config.json. `windows` holds for each layer how many tokens, its own among them, a
    token attends to; None is all before it."""

    family: Family
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    windows: tuple[int | None, ...]
    experts: Experts | None

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "head": self.head_dim,
        }
        if self.experts is not None:
            sizes |= {"experts": self.experts.count, "expert_ffn": self.experts.ffn}
        return sizes

    def shape(self, part: Part) -> tuple[int, ...]:
        return tuple(self.sizes[size] for size in part.shape)

    def rows(self) -> list[Row]:
        """Every parameter of the whole model, from the embedding to the head.

        With tied embeddings there is no output layer among them: its copy on the last pipeline
        stage is made from the embedding.
        """
        layers = [row for i in range(self.layers) for row in self._layer_rows(i)]
        return [EMBEDDING, *layers, FINAL_NORM, *([] if self.tied else [OUTPUT])]

    def _layer_rows(self, layer: int) -> list[Row]:
        family, experts = self.family, self.experts
        rows = [row.at(layer) for row in family.attention]
        if experts is not None and layer in experts.layers:
            rows += [row.at(layer) for row in family.router]
            rows += [row.at(layer, e) for e in range(experts.count) for row in family.expert]
        else:
            rows += [row.at(layer) for row in family.mlp]
        return rows + [row.at(layer) for row in family.norms]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of a checkpoint, in the order of `rows`."""
        return {part.name: self.shape(part) for row in self.rows() for part in row.parts}

    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.hf_shapes().values())

    def largest_tensor(self) -> int:
        """Elements of the largest tensor of a checkpoint."""
        return max(math.prod(shape) for shape in self.hf_shapes().values())
