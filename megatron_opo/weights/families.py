"""Model families: one table each, from which loading, export and shape checks are derived.

A family is the Hugging Face `model_type`, what sets its architecture apart, and its weights in
Hugging Face order. Adding one is adding an entry to FAMILIES and a parity test.
"""

import math
from dataclasses import dataclass, replace
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
    }
)
WINDOW_KEYS = frozenset(
    {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
)
EXPERT_KEYS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        # Of a loss that pretraining adds; policy gradients have none.
        "router_aux_loss_coef",
        "output_router_logits",
    }
)
# What each kind of rotary embedding takes beside `rope_theta`, with the defaults of transformers.
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
    },
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "attention_factor": 0.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
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


# What json.loads must give for keys that are no plain numbers; None counts as absent.
KINDS: dict[str, tuple[type, str]] = {
    "model_type": (str, "a text"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "layer_types": (list, "a list of texts"),
    "mlp_only_layers": (list, "a list of layer numbers"),
    "tie_word_embeddings": (bool, "true or false"),
    "use_sliding_window": (bool, "true or false"),
    "norm_topk_prob": (bool, "true or false"),
    "max_window_layers": (int, "a whole number"),
}
ITEMS: dict[str, type] = {"layer_types": str, "mlp_only_layers": int}
# No model comes near; a slip of the pen must not cost hours and all memory.
LARGEST = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}


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


def read_architecture(hf_config: dict[str, Any]) -> Architecture:
    """Interpret a Hugging Face config.json.

    Raises:
        RecipeError: the family is unknown, or the config asks for something this code does not do;
            every problem is listed.
    """
    problems = _wrong_kinds(hf_config)
    if problems:
        raise RecipeError("\n".join(f"config.json: {problem}" for problem in problems))
    family = FAMILIES.get(hf_config.get("model_type") or "")
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
    layers = whole("num_hidden_layers")
    kv_heads = whole("num_key_value_heads", heads)
    if not problems and heads % kv_heads:
        problems.append(
            f"`num_attention_heads` ({heads}) is not a multiple of `num_key_value_heads` "
            f"({kv_heads})"
        )
    architecture = Architecture(
        family=family,
        vocab=whole("vocab_size"),
        hidden=hidden,
        ffn=whole("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole("head_dim", hidden // heads),
        max_positions=whole("max_position_embeddings"),
        norm_eps=float(_number(hf_config, "rms_norm_eps", float, problems)),
        rope=_rope(hf_config, problems),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        windows=_windows(family, hf_config, layers, problems),
        experts=_experts(hf_config, layers, problems) if family.expert else None,
    )
    if problems:
        raise RecipeError("\n".join(f"config.json: {problem}" for problem in problems))
    return architecture


def _wrong_kinds(config: dict[str, Any]) -> list[str]:
    problems = []
    for key, (kind, allowed) in KINDS.items():
        value: Any = config.get(key)
        if value is None:
            continue
        items = value if isinstance(value, list) and key in ITEMS else []
        right = type(value) is kind and all(type(item) is ITEMS[key] for item in items)
        if not right:
            problems.append(f"`{key}` is {value!r:.80}, must be {allowed}")
    return problems


def _number(
    config: dict[str, Any], key: str, kind: type, problems: list[str], default: Any = None
) -> Any:
    """A positive number; what is wrong joins `problems` and reads as 1."""
    value: Any = config.get(key)
    value = default if value is None else value
    kinds = (int,) if kind is int else (int, float)
    largest = LARGEST.get(key, float("inf"))
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if is_number and 0 < value < float("inf") and value <= largest:
        return value
    allowed = "a whole number above 0" if kind is int else "a number above 0"
    if key in LARGEST:
        allowed += f", at most {largest:,}"
    problems.append(f"`{key}` is {value!r}, must be {allowed}")
    return 1


def _unsupported(family: Family, config: dict[str, Any]) -> list[str]:
    problems = []
    # A window that is switched off leaves its keys behind, also where it cannot be switched on.
    understood = USED | INERT | {"max_window_layers"}
    understood |= EXPERT_KEYS if family.expert else frozenset()
    if family.has_window or config.get("use_sliding_window") is False:
        understood |= WINDOW_KEYS
    for key, value in config.items():
        # transformers keeps notes of its own under names that start with an underscore.
        if value is None or key in understood or key.startswith("_"):
            continue
        if key == "layer_types" and set(value) <= {FULL}:
            continue
        if key not in family.required:
            problems.append(
                f"`{key}` is {value!r}: a {family.model_type} model with it is not supported"
            )
        elif value not in family.required[key]:
            allowed = ", ".join(map(repr, family.required[key]))
            problems.append(f"`{key}` is {value!r}; supported: {allowed}")
    return problems


def _rope(config: dict[str, Any], problems: list[str]) -> Rope:
    """Before transformers 5 `rope_theta` stands at the top and the rest in `rope_scaling`; since
    then all is in `rope_parameters`."""
    theta: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    sections = {key: dict(config.get(key) or {}) for key in ("rope_scaling", "rope_parameters")}
    found: list[tuple[str, dict[str, float]]] = []
    for name, section in sections.items():
        inner = section.pop("rope_theta", None)
        if inner is not None and theta["rope_theta"] not in (None, inner):
            problems.append(f"`rope_theta` is {theta['rope_theta']!r} but `{name}` says {inner!r}")
        theta["rope_theta"] = theta["rope_theta"] if inner is None else inner
        found.append(_rope_kind(name, section, problems))
    scaled = [each for each in found if each[0] != "default"]
    if len(scaled) == 2 and scaled[0] != scaled[1]:
        problems.append("`rope_scaling` and `rope_parameters` contradict each other")
    kind, values = scaled[0] if scaled else ("default", {})
    base = float(_number(theta, "rope_theta", float, problems, default=10_000.0))
    return Rope(base, kind, values)


def _rope_kind(
    name: str, section: dict[str, Any], problems: list[str]
) -> tuple[str, dict[str, float]]:
    given = (section.pop(key, None) for key in ("rope_type", "type"))
    kinds = {str(kind) for kind in given if kind is not None}
    kind = kinds.pop() if kinds else "default"
    if kinds:
        problems.append(f"`{name}` has two types: {kind!r} and {kinds.pop()!r}")
    if section.pop("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"`{name}.partial_rotary_factor` must be 1")
    if kind not in ROPES:
        problems.append(f"`{name}` has rope_type {kind!r}; supported: {', '.join(ROPES)}")
        return "default", {}
    values = {}
    for key, default in ROPES[kind].items():
        value = section.pop(key, None)
        values[key] = default if value is None and default is not None else value
        is_number = type(values[key]) in (int, float)
        if not is_number or not (0 < values[key] < float("inf") or values[key] == default):
            problems.append(
                f"`{name}.{key}` is {values[key]!r}; rope_type {kind!r} needs a number above 0"
            )
            values[key] = 1.0
    for key, value in section.items():
        problems.append(f"`{name}.{key}` is {value!r}: rope_type {kind!r} does not take it")
    return kind, values


FULL, SLIDING = "full_attention", "sliding_attention"


def _windows(
    family: Family, config: dict[str, Any], layers: int, problems: list[str]
) -> tuple[int | None, ...]:
    """transformers' rules: `layer_types` where given; else Qwen's windows start at layer
    `max_window_layers` and must be switched on, Mistral's are everywhere."""
    nowhere: tuple[int | None, ...] = (None,) * layers
    if not family.has_window or config.get("sliding_window", 4096) is None:
        return nowhere
    if family.model_type != "mistral" and not config.get("use_sliding_window", False):
        return nowhere
    window = int(_number(config, "sliding_window", int, problems, 4096))
    first = 0 if family.model_type == "mistral" else config.get("max_window_layers")
    first = 28 if first is None else first
    kinds = config.get("layer_types") or [FULL if i < first else SLIDING for i in range(layers)]
    other = sorted(set(kinds) - {FULL, SLIDING})
    if other:
        problems.append(f"`layer_types` has {other}; supported: {FULL!r}, {SLIDING!r}")
    if len(kinds) != layers:
        problems.append(f"`layer_types` has {len(kinds)} entries for {layers} layers")
        return nowhere
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _experts(config: dict[str, Any], layers: int, problems: list[str]) -> Experts:
    given = [k for k in ("num_local_experts", "num_experts") if config.get(k) is not None]
    count_key = given[0] if given else "num_experts"
    if len(given) == 2 and config[given[0]] != config[given[1]]:
        problems.append(f"`{given[0]}` is {config[given[0]]!r}, `{given[1]}` {config[given[1]]!r}")
    count = int(_number(config, count_key, int, problems, 128))
    step = int(_number(config, "decoder_sparse_step", int, problems, 1))
    per_token = int(_number(config, "num_experts_per_tok", int, problems, 8))
    if per_token > count:
        problems.append(f"`num_experts_per_tok` ({per_token}) exceeds `{count_key}` ({count})")
    dense = config.get("mlp_only_layers") or []
    return Experts(
        count=count,
        per_token=per_token,
        ffn=int(_number(config, "moe_intermediate_size", int, problems, 768)),
        normalize=bool(config.get("norm_topk_prob", False)),
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )
