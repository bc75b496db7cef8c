"""A Hugging Face config.json as an Architecture: every key of it is understood, or refused."""

from typing import Any

from megatron_opo.errors import RecipeError
from megatron_opo.weights.families import FAMILIES, Architecture, Experts, Family, Rope
from megatron_opo.weights.text import shown_name

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
                f"`{shown_name(key)}` is {value!r}: a {family.model_type} model with it is not "
                "supported"
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
        problems.append(
            f"`{name}.{shown_name(key)}` is {value!r}: rope_type {kind!r} does not take it"
        )
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
