"""Configs of model families: what is understood, and what is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_opo.errors import RecipeError
from megatron_opo.weights.families import FAMILIES, PLAIN_DECODER
from megatron_opo.weights.hf_config import EXPERT_KEYS, ROPES, USED, WINDOW_KEYS, read_architecture

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    "cls", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig]
)
@pytest.mark.parametrize("whole", [True, False])
def test_every_key_that_transformers_writes_is_understood(cls, whole):
    config = cls(num_attention_heads=8, num_key_value_heads=2, head_dim=48, vocab_size=77)
    architecture = read_architecture(config.to_dict() if whole else config.to_diff_dict())
    assert (architecture.vocab, architecture.heads, architecture.kv_heads) == (77, 8, 2)
    assert architecture.sizes["q"] == 8 * 48 and architecture.sizes["kv"] == 2 * 48
    assert architecture.family.qk_norm == (cls in (Qwen3Config, Qwen3MoeConfig))
    assert architecture.family.qkv_bias == (cls is Qwen2Config)


def test_defaults_are_those_of_transformers():
    architecture = read_architecture(BASE)
    config = LlamaConfig(**BASE)
    assert architecture.kv_heads == config.num_key_value_heads
    assert architecture.head_dim == config.head_dim
    assert architecture.tied == config.tie_word_embeddings
    assert architecture.rope.theta == 10_000.0 == dict(config.rope_parameters or {})["rope_theta"]


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 500_000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta_is_found_in_old_and_new_configs(keys):
    assert read_architecture(BASE | keys).rope.theta == 5e5


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"model_type": "gpt2"},
            "`model_type` is 'gpt2'; allowed: llama, mistral, qwen2, qwen3, qwen3_moe",
        ),
        ({"model_type": None}, "`model_type` is None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "has rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "`rope_scaling` has two types"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "`rope_scaling.factor` is None"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "`rope_scaling.factor` is 0"),
        ({"rope_scaling": LLAMA3 | {"mscale": 1.0}}, "`rope_scaling.mscale` is 1.0"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"type": "linear", "factor": 2.0}},
            "`rope_scaling` and `rope_parameters` contradict",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor` must be 1"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "says 1000000.0"),
        ({"rope_theta": -1.0}, "`rope_theta` is -1.0, must be a number above 0"),
        ({"attention_bias": True}, "`attention_bias` is True; supported: False"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; supported: 'silu'"),
        ({"sliding_window": 4096}, "`sliding_window` is 4096"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "`layer_types` is ['full_attention', 'sliding_attention']",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "`quantization_config`"),
        ({"residual_multiplier": 0.2}, "`residual_multiplier` is 0.2: a llama model with it"),
        ({"hidden_size": "64"}, "`hidden_size` is '64', must be a whole number above 0"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"vocab_size": None}, "`vocab_size` is None"),
        ({"rms_norm_eps": None}, "`rms_norm_eps` is None"),
        ({"num_key_value_heads": 3}, "(4) is not a multiple of `num_key_value_heads` (3)"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(keys, named):
    with pytest.raises(RecipeError) as error:
        read_architecture(BASE | keys)
    assert named in str(error.value)
    assert str(error.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": ["llama"]}, "`model_type` is ['llama'], must be a text"),
        ({"rope_scaling": "llama3"}, "`rope_scaling` is 'llama3', must be an object"),
        ({"rope_parameters": [1]}, "`rope_parameters` is [1], must be an object"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "has rope_type \"['x']\""),
        ({"layer_types": 5}, "`layer_types` is 5, must be a list of texts"),
        ({"max_window_layers": "x"}, "`max_window_layers` is 'x', must be a whole number"),
        ({"rope_parameters": {"\x85": 1}}, r"`rope_parameters.'\x85'` is 1"),
        ({"a\nb": 1}, r"`'a\nb'` is 1"),
        ({"mlp_only_layers": 3}, "`mlp_only_layers` is 3, must be a list of layer numbers"),
        ({"mlp_only_layers": ["a"]}, "`mlp_only_layers` is ['a'], must be"),
        ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` is 'false', must be true or"),
        ({"num_hidden_layers": 10_000_000}, "is 10000000, must be a whole number above 0, at most"),
        (
            {"model_type": "qwen3_moe", "num_experts": 5, "num_local_experts": 4},
            "`num_local_experts` is 4, `num_experts` 5",
        ),
    ],
)
def test_values_of_another_kind_are_refused_by_name(keys, named):
    with pytest.raises(RecipeError) as error:
        read_architecture(BASE | keys)
    assert named in str(error.value)


def test_a_wrong_number_has_no_second_error():
    with pytest.raises(RecipeError) as error:
        read_architecture(BASE | {"num_attention_heads": 0, "num_key_value_heads": 2})
    assert len(str(error.value).splitlines()) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
KEYS = sorted(USED | WINDOW_KEYS | EXPERT_KEYS | set(PLAIN_DECODER))
ROPE_KEYS = sorted({"rope_type", "type", "rope_theta", *(k for r in ROPES.values() for k in r)})
ROPE = st.dictionaries(
    st.sampled_from(ROPE_KEYS), JSON | st.sampled_from(sorted(ROPES)), max_size=4
)


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(KEYS), JSON | ROPE, max_size=4),
)
def test_any_config_is_read_or_refused_in_words(family, changes):
    config = BASE | {"model_type": family} | changes
    try:
        architecture = read_architecture(config)
    except RecipeError as error:
        assert all(line.startswith("config.json: `") for line in str(error).splitlines())
    else:
        assert architecture.parameter_count() > 0


def test_all_problems_are_listed():
    with pytest.raises(RecipeError) as error:
        read_architecture(BASE | {"attention_bias": True, "mlp_bias": True, "vocab_size": -3})
    assert len(str(error.value).splitlines()) == 3


def test_a_disabled_sliding_window_is_none():
    keys = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0}
    for family in ("qwen2", "qwen3", "qwen3_moe", "llama"):
        assert read_architecture(BASE | keys | {"model_type": family}).windows == (None, None)
    with pytest.raises(RecipeError, match="use_sliding_window"):
        read_architecture(BASE | keys | {"model_type": "qwen3_moe", "use_sliding_window": True})


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(num_hidden_layers=3, sliding_window=7),
        MistralConfig(num_hidden_layers=3, sliding_window=None),
        Qwen2Config(
            num_hidden_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=1
        ),
        Qwen3Config(
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ],
    ids=["mistral", "mistral without", "qwen2", "qwen3 by layer"],
)
def test_windows_are_those_of_transformers(config):
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 3
    expected = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert read_architecture(config.to_dict()).windows == tuple(expected)
    assert read_architecture(config.to_diff_dict()).windows == tuple(expected)


def test_old_and_new_places_of_a_scaled_rope_agree():
    old = read_architecture(BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = read_architecture(BASE | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old.rope == new.rope
    assert (old.rope.kind, old.rope.values["high_freq_factor"]) == ("llama3", 4.0)


def test_layers_with_experts_are_those_of_transformers():
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=12,
        moe_intermediate_size=6,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=3,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    )
    architecture = read_architecture(config.to_dict())
    model = AutoModelForCausalLM.from_config(config)
    sparse = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert architecture.experts is not None
    assert architecture.experts.layers == tuple(
        i for i, is_sparse in enumerate(sparse) if is_sparse
    )
    assert architecture.parameter_count() == sum(p.numel() for p in model.parameters())


def published(model_type: str, architecture: str, sizes: tuple[int, ...], **more) -> dict:
    """A config.json as published. `sizes` are hidden, MLP, layers, heads, key-value heads,
    vocabulary and positions; a key in `more` that is None here is a null there."""
    hidden, ffn, layers, heads, kv_heads, vocab, positions = sizes
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "tie_word_embeddings": False,
        **more,
    }


def llama(*sizes: int, **more) -> dict:
    return published(
        "llama",
        "LlamaForCausalLM",
        sizes,
        **{"bos_token_id": 128_000, "eos_token_id": 128_001, "pretraining_tp": 1}
        | {"rms_norm_eps": 1e-5, "attention_bias": False, "attention_dropout": 0.0}
        | more,
    )


def qwen2(*sizes: int, **more) -> dict:
    return published(
        "qwen2",
        "Qwen2ForCausalLM",
        sizes,
        **{"bos_token_id": 151_643, "eos_token_id": 151_643, "attention_dropout": 0.0}
        | {"max_window_layers": sizes[2], "use_sliding_window": False, "rms_norm_eps": 1e-6}
        | more,
    )


def qwen3(model_type: str, architecture: str, *sizes: int, **more) -> dict:
    return published(
        model_type,
        architecture,
        sizes,
        **{"bos_token_id": 151_643, "eos_token_id": 151_645, "attention_bias": False}
        | {"attention_dropout": 0.0, "head_dim": 128, "max_window_layers": sizes[2]}
        | {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1_000_000}
        | {"sliding_window": None, "use_sliding_window": False}
        | more,
    )


def qwen3_moe(*sizes: int, moe_intermediate_size: int) -> dict:
    return qwen3(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        *sizes,
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
        | {"num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False}
        | {"router_aux_loss_coef": 0.001, "moe_intermediate_size": moe_intermediate_size},
    )


def mistral(*sizes: int, **more) -> dict:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return published("mistral", "MistralForCausalLM", sizes, rms_norm_eps=1e-5, **ids, **more)


LLAMA_31 = {"mlp_bias": False, "rope_scaling": LLAMA3, "rope_theta": 500_000.0}
LLAMA_70B = (8192, 28_672, 80, 64, 8, 128_256, 131_072)
QWEN_7B = (3584, 18_944, 28, 28, 4, 152_064)
PUBLISHED = {
    "Llama-2-7B": (
        llama(
            *(4096, 11_008, 32, 32, 32, 32_000, 4096),
            **{"bos_token_id": 1, "eos_token_id": 2, "rope_scaling": None},
            _name_or_path="meta-llama/Llama-2-7b-hf",
        ),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        llama(4096, 14_336, 32, 32, 8, 128_256, 131_072, **LLAMA_31),
        8_030_261_248,
    ),
    "Llama-3.3-70B": (
        llama(*LLAMA_70B, **LLAMA_31, head_dim=128, eos_token_id=[128_001, 128_008, 128_009]),
        70_553_706_496,
    ),
    "DeepSeek-R1-Distill-Llama-70B": (
        llama(*LLAMA_70B, **LLAMA_31, head_dim=128),
        70_553_706_496,
    ),
    "DeepSeek-R1-Distill-Qwen-7B": (
        qwen2(*QWEN_7B, 131_072, rope_theta=10_000, sliding_window=4096, use_mrope=False),
        7_615_616_512,
    ),
    "DeepSeek-R1-Distill-Qwen-32B": (
        qwen2(
            *(5120, 27_648, 64, 40, 8, 152_064, 131_072),
            **{"rope_theta": 1_000_000.0, "sliding_window": 131_072, "rms_norm_eps": 1e-5},
        ),
        32_763_876_352,
    ),
    "Qwen2.5-7B": (
        qwen2(*QWEN_7B, 131_072, rope_theta=1_000_000.0, sliding_window=131_072, use_mrope=False),
        7_615_616_512,
    ),
    "Qwen2.5-Math-7B": (
        qwen2(*QWEN_7B, 4096, rope_theta=10_000, sliding_window=4096, use_mrope=False),
        7_615_616_512,
    ),
    "Qwen3-8B": (
        qwen3("qwen3", "Qwen3ForCausalLM", 4096, 12_288, 36, 32, 8, 151_936, 40_960),
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        qwen3_moe(2048, 6144, 48, 32, 4, 151_936, 40_960, moe_intermediate_size=768),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        qwen3_moe(4096, 12_288, 94, 64, 4, 151_936, 40_960, moe_intermediate_size=1536),
        235_093_634_560,
    ),
    "Mistral-7B-v0.1": (
        mistral(*(4096, 14_336, 32, 32, 8, 32_000, 32_768), rope_theta=1e4, sliding_window=4096),
        7_241_732_096,
    ),
    "Mistral-7B-v0.3": (
        mistral(
            *(4096, 14_336, 32, 32, 8, 32_768, 32_768),
            **{"rope_theta": 1e6, "sliding_window": None, "attention_dropout": 0.0},
        ),
        7_248_023_552,
    ),
    "SmolLM2-135M": (
        llama(
            *(576, 1536, 30, 9, 3, 49_152, 8192),
            **{"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.041666666666666664},
            **{"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None},
            **{"rope_theta": 100_000, "tie_word_embeddings": True},
        ),
        134_515_008,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_understood_and_have_their_parameter_count(name):
    config, parameters = PUBLISHED[name]
    architecture = read_architecture(config)
    assert architecture.parameter_count() == parameters
    assert architecture.head_dim == (64 if "SmolLM2" in name else 128)
    assert architecture.rope.kind == ("llama3" if config.get("rope_scaling") else "default")
    assert architecture.rope.theta == config.get("rope_theta", 10_000)
    window = 4096 if name == "Mistral-7B-v0.1" else None
    assert architecture.windows == (window,) * config["num_hidden_layers"]
