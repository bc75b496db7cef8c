"""Megatron's config: what a recipe may set, and what is refused by name."""

import pytest
import torch

from megatron_opo.actor.model import padded_vocab, transformer_config
from megatron_opo.errors import RecipeError
from megatron_opo.recipe import ActorConfig
from tests.test_hf_config import BASE


def refused(layout: dict, dtype: str = "float32", **config) -> str:
    with pytest.raises(RecipeError) as error:
        transformer_config(BASE | config, ActorConfig(**layout), dtype)
    return str(error.value)


def test_fields_pass_through_under_their_own_names():
    actor = ActorConfig(transformer_config={"deallocate_pipeline_outputs": True})
    config = transformer_config(BASE, actor, "bfloat16")
    assert config.deallocate_pipeline_outputs
    assert config.params_dtype == torch.bfloat16 and config.bf16 and not config.fp16
    assert (config.kv_channels, config.num_query_groups) == (16, 4)


def test_fields_that_cannot_work_are_named():
    extra = {"hidden_dropuot": 0.1, "num_layers": 3, "attention_dropout": 0.1}
    lines = refused({"transformer_config": extra}).splitlines()
    assert "hidden_dropuot: TransformerConfig has no such field; did you mean" in lines[0]
    assert "`hidden_dropout`?" in lines[0]
    assert lines[1].startswith("actor.transformer_config.num_layers: set by the model")
    assert lines[2].startswith("actor.transformer_config.attention_dropout: set by the model")


def test_what_megatron_refuses_is_a_recipe_error_in_its_words():
    message = refused({"transformer_config": {"recompute_granularity": "some"}})
    assert "Megatron-Core refuses {'recompute_granularity': 'some'}" in message


@pytest.mark.parametrize(
    ("layout", "config", "named"),
    [
        (
            {"tensor_parallel": 3},
            {},
            "tensor_parallel: 3 does not fit the model's 4 attention heads",
        ),
        (
            {"tensor_parallel": 4},
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "6 key-value heads (which it must divide, or be a multiple of) and 96 MLP channels "
            "(intermediate_size); allowed: 1, 2, 3, 6, 12",
        ),
        ({"tensor_parallel": 2}, {"intermediate_size": 97}, "97 MLP channels (intermediate_size)"),
        (
            # (5 + 2) heads of 12 rows cannot be cut into 5 equal slices.
            {"tensor_parallel": 5},
            {"num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 100},
            "tensor_parallel: 5 does not fit the model's 5 attention heads",
        ),
        ({"pipeline_parallel": 3}, {}, "pipeline_parallel: 3 does not divide the model's 2 layers"),
    ],
)
def test_sizes_that_do_not_divide_are_named(layout, config, named):
    assert named in refused(layout, **config)


def test_an_unknown_dtype_is_named():
    assert "model.dtype: 'float8'; allowed: float32, bfloat16" in refused({}, "float8")


def test_the_vocabulary_is_padded_to_tensor_parallel_and_no_further():
    assert [padded_vocab(1003, tp) for tp in (1, 2, 3, 8)] == [1003, 1004, 1005, 1008]
