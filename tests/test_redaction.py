"""Secrets of a recipe are in no text that a run writes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.errors import RecipeError
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import dump_recipe, load_recipe
from megatron_opo.redaction import HIDDEN, hidden_fields, hide_secrets, is_secret
from megatron_opo.runs import changed_fields

RECIPE = """
name: x
model: {path: m}
data: {train: {files: [a]}}
reward: {kwargs: {judge_api_key: S3CRET, style: plain}}
rollout: {server_env: {HF_TOKEN: S3CRET, SGLANG_LOG: debug}}
"""


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "token", "api_key", "API-KEY", "AWS_SECRET_ACCESS_KEY", "password"),
        *("db_passwd", "client_secret", "credentials", "private_key", "auth_key", "openai_key"),
        *("OPENAI_API_KEY_2", "API_TOKENS", "SSH_PASSPHRASE", "MY_PASS", "password2"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name)


def test_no_field_of_a_recipe_is_taken_for_a_secret(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert hidden_fields(recipe.to_show()) == [
        "reward.kwargs.judge_api_key",
        "rollout.server_env.HF_TOKEN",
    ]
    assert recipe.reward.kwargs["judge_api_key"] == "S3CRET"
    assert "S3CRET" not in dump_recipe(recipe)
    assert recipe.to_show()["reward"]["kwargs"]["style"] == "plain"
    assert changed_fields(recipe.to_show(), recipe) == []


def test_a_hidden_secret_is_not_used_as_one(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "shown.yaml").write_text(dump_recipe(load_recipe(tmp_path / "r.yaml")))
    with pytest.raises(RecipeError, match=r"judge_api_key, rollout\.server_env\.HF_TOKEN: what"):
        load_recipe(tmp_path / "shown.yaml")
    given = ["reward.kwargs.judge_api_key=1", "rollout.server_env.HF_TOKEN=k"]
    assert load_recipe(tmp_path / "shown.yaml", given).rollout.server_env["HF_TOKEN"] == "k"


def test_an_error_does_not_show_a_secret(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE.replace("HF_TOKEN: S3CRET", "HF_TOKEN: [S3CRET]"))
    with pytest.raises(RecipeError, match=r"server_env\.HF_TOKEN") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "named"),
    [("port", "use rollout.port"), ("api-key", "MEGATRON_OPO_API_KEY"), ("config", "themselves")],
)
def test_options_of_a_server_that_are_not_the_users(name, named):
    sections = {"name": "x", "model": {"path": "m"}, "data": {"train": {"files": ["a"]}}}
    with pytest.raises(ValueError, match=named):
        Recipe.model_validate(sections | {"rollout": {"server_args": {name: "v"}}})


names = st.sampled_from(["token", "api_key", "lr", "kwargs", "list", "n"])
trees = st.recursive(
    st.none() | st.integers() | st.just("S3CRET") | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(names, inner),
)


@given(trees)
def test_all_under_such_names_is_hidden_but_counts(tree):
    def expected(node, name="lr"):
        is_count = isinstance(node, int) and name == "token"
        if name in ("token", "api_key") and node is not None and not is_count:
            return HIDDEN
        if isinstance(node, dict):
            return {key: expected(value, key) for key, value in node.items()}
        if isinstance(node, list):
            return [expected(value) for value in node]
        return node

    assert hide_secrets(tree) == expected(tree)
    assert json.dumps(hide_secrets(tree)).count("S3CRET") <= json.dumps(tree).count("S3CRET")
