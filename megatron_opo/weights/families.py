"""Model families: one table each, from which loading, export and shape checks are derived.

A family is the Hugging Face `model_type`, what sets its architecture apart, and its weights in
Hugging Face order. Adding one is adding an entry to FAMILIES and a parity test.
"""

from dataclasses import dataclass
from typing import Any

from megatron_opo.errors import RecipeError


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
    """

    megatron: str
    parts: tuple[Part, ...]
    split: int | None = None
    per_kv_head: bool = False


@dataclass(frozen=True)
class Family:
    """`required` are config values this code relies on; a config without the key has them.
    `layer` are the parameters of one layer; what stands before and after is common to all."""

    model_type: str
    qk_norm: bool
    required: dict[str, tuple]
    layer: tuple[Row, ...]


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
        Family(
            model_type="llama",
            qk_norm=False,
            required=PLAIN_DECODER,
            layer=(*ATTENTION, *GATED_MLP, *NORMS),
        ),
        Family(
            model_type="qwen3",
            qk_norm=True,
            required={**PLAIN_DECODER, "use_sliding_window": (False,)},
            layer=(*ATTENTION, *QK_NORM, *GATED_MLP, *NORMS),
        ),
    )
}

USED = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "layer_types",
    }
)
# Keys that do not change what the network computes for given weights and tokens.
INERT = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)


@dataclass(frozen=True)
class Architecture:
    """A checked config.json."""

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
    rope_theta: float
    tied: bool

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "head": self.head_dim,
        }

    def shape(self, part: Part) -> tuple[int, ...]:
        return tuple(self.sizes[size] for size in part.shape)

    def rows(self) -> list[tuple[Row, int | None]]:
        """Every parameter in Hugging Face order, with its layer from 0 where it belongs to one.

        With tied embeddings there is no output layer among them: its copy on the last pipeline
        stage is made from the embedding.
        """
        layers = [(row, i) for i in range(self.layers) for row in self.family.layer]
        head = [] if self.tied else [(OUTPUT, None)]
        return [(EMBEDDING, None), *layers, (FINAL_NORM, None), *head]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of a checkpoint, in order."""
        return {
            part.name.format(layer=layer): self.shape(part)
            for row, layer in self.rows()
            for part in row.parts
        }


def read_architecture(hf_config: dict[str, Any]) -> Architecture:
    """Interpret a Hugging Face config.json.

    Raises:
        RecipeError: the family is unknown, or the config asks for something this code does not do;
            every problem is listed.
    """
    family = FAMILIES.get(hf_config.get("model_type", ""))
    if family is None:
        raise RecipeError(
            f"config.json: `model_type` is {hf_config.get('model_type')!r}; allowed: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    problems = _unsupported(family, hf_config)

    def whole(key: str, default: int | None = None) -> int:
        return int(_number(hf_config, key, int, problems, default))

    heads = whole("num_attention_heads")
    hidden = whole("hidden_size")
    architecture = Architecture(
        family=family,
        vocab=whole("vocab_size"),
        hidden=hidden,
        ffn=whole("intermediate_size"),
        layers=whole("num_hidden_layers"),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", hidden // heads),
        max_positions=whole("max_position_embeddings"),
        norm_eps=float(_number(hf_config, "rms_norm_eps", float, problems)),
        rope_theta=_rope_theta(hf_config, problems),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
    )
    if architecture.heads % architecture.kv_heads:
        problems.append(
            f"`num_attention_heads` ({heads}) is not a multiple of `num_key_value_heads` "
            f"({architecture.kv_heads})"
        )
    if problems:
        raise RecipeError("\n".join(f"config.json: {problem}" for problem in problems))
    return architecture


def _number(config: dict[str, Any], key: str, kind: type, problems: list[str], default=None):
    """A positive number; what is wrong joins `problems` and reads as 1."""
    value = config.get(key)
    value = default if value is None else value
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < float("inf"):
        return value
    allowed = "a whole number above 0" if kind is int else "a number above 0"
    problems.append(f"`{key}` is {value!r}, must be {allowed}")
    return 1


def _unsupported(family: Family, config: dict[str, Any]) -> list[str]:
    problems = []
    for key, value in config.items():
        # transformers keeps notes of its own under names that start with an underscore.
        if value is None or key in USED or key in INERT or key.startswith("_"):
            continue
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if key not in family.required:
            problems.append(
                f"`{key}` is {value!r}: a {family.model_type} model with it is not supported"
            )
        elif value not in family.required[key]:
            allowed = ", ".join(map(repr, family.required[key]))
            problems.append(f"`{key}` is {value!r}; supported: {allowed}")
    other = {kind for kind in config.get("layer_types") or () if kind != "full_attention"}
    if other:
        problems.append(f"`layer_types` has {sorted(other)}; supported: 'full_attention'")
    return problems


def _rope_theta(config: dict[str, Any], problems: list[str]) -> float:
    """`rope_theta` stands at the top before transformers 5, and in `rope_parameters` since."""
    for key in ("rope_scaling", "rope_parameters"):
        section = dict(config.get(key) or {})
        kind = section.pop("rope_type", section.pop("type", "default"))
        section.pop("rope_theta", None)
        section.pop("type", None)
        if kind != "default" or section.pop("partial_rotary_factor", 1.0) != 1.0 or section:
            problems.append(f"`{key}` is {config[key]!r}; supported: rope_type 'default'")
    inner = (config.get("rope_parameters") or {}).get("rope_theta")
    outer = config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        problems.append(f"`rope_theta` is {outer!r} but `rope_parameters` says {inner!r}")
    theta = {"rope_theta": outer if inner is None else inner}
    return float(_number(theta, "rope_theta", float, problems, default=10_000.0))
