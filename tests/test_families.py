"""Configs of model families: what is understood, and what is refused by name."""

import pytest
from transformers import LlamaConfig, Qwen3Config

from megatron_opo.errors import RecipeError
from megatron_opo.weights.families import read_architecture

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


@pytest.mark.parametrize("cls", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("whole", [True, False])
def test_every_key_that_transformers_writes_is_understood(cls, whole):
    config = cls(num_attention_heads=8, num_key_value_heads=2, head_dim=48, vocab_size=77)
    architecture = read_architecture(config.to_dict() if whole else config.to_diff_dict())
    assert (architecture.vocab, architecture.heads, architecture.kv_heads) == (77, 8, 2)
    assert architecture.sizes["q"] == 8 * 48 and architecture.sizes["kv"] == 2 * 48
    assert architecture.family.qk_norm == (cls is Qwen3Config)


def test_defaults_are_those_of_transformers():
    architecture = read_architecture(BASE)
    config = LlamaConfig(**BASE)
    assert architecture.kv_heads == config.num_key_value_heads
    assert architecture.head_dim == config.head_dim
    assert architecture.tied == config.tie_word_embeddings
    assert architecture.rope_theta == config.rope_parameters["rope_theta"]


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
    assert read_architecture(BASE | keys).rope_theta == 5e5


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
        ({"model_type": "gpt2"}, "`model_type` is 'gpt2'; allowed: llama, qwen3"),
        ({"model_type": None}, "`model_type` is None"),
        ({"rope_scaling": LLAMA3}, "`rope_scaling` is {'rope_type': 'llama3'"),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, "`rope_parameters` is {'rope_type'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "`rope_parameters` is"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "says 1000000.0"),
        ({"rope_theta": -1.0}, "`rope_theta` is -1.0, must be a number above 0"),
        ({"attention_bias": True}, "`attention_bias` is True; supported: False"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; supported: 'silu'"),
        ({"sliding_window": 4096}, "`sliding_window` is 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "['sliding_attention']"),
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


def test_all_problems_are_listed():
    with pytest.raises(RecipeError) as error:
        read_architecture(BASE | {"attention_bias": True, "mlp_bias": True, "vocab_size": -3})
    assert len(str(error.value).splitlines()) == 3


def test_a_disabled_sliding_window_is_none():
    keys = {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 4096}
    assert read_architecture(BASE | keys).family.model_type == "qwen3"
    with pytest.raises(RecipeError, match="use_sliding_window"):
        read_architecture(BASE | keys | {"use_sliding_window": True})
