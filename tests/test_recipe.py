import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_opo.errors import RecipeError
from megatron_opo.model_fit import check_model
from megatron_opo.recipe import LogConfig
from megatron_opo.recipe_file import dump_recipe, field_paths, load_recipe

MINIMAL = """
name: demo
model: {path: models/demo}
data:
  train: {files: [train.jsonl]}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def message(path, *overrides) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_overrides_reach_their_fields_and_are_typed(write):
    recipe = load_recipe(
        write(MINIMAL),
        ["rollout.samples_per_prompt=16", "optimizer.lr=2e-6", "data.eval={files: [eval.jsonl]}"],
    )
    assert recipe.rollout.samples_per_prompt == 16
    assert recipe.optimizer.lr == 2e-6
    assert recipe.data.eval.files == ("eval.jsonl",)


@pytest.mark.parametrize(
    ("given", "loggers"),
    [
        ({}, ("tensorboard",)), ({"loggers": None}, ()), ({"loggers": []}, ()),
        ({"loggers": "wandb"}, ("wandb",)), ({"loggers": ["mlflow", "wandb"]}, ("mlflow", "wandb")),
    ],
)  # fmt: skip
def test_loggers_are_a_list_one_or_none(given, loggers):
    assert LogConfig.model_validate(given).loggers == loggers


@pytest.mark.parametrize("loggers", [["wandb", "wandb"], ["wand"], [1]])
def test_loggers_that_are_none(loggers):
    with pytest.raises(ValidationError, match=r"names one twice|Input should be 'tensorboard'"):
        LogConfig.model_validate({"loggers": loggers})


@pytest.mark.parametrize(
    ("given", "steps"),
    [("3-5", (3, 4, 5)), ("7", (7,)), ("12-12", (12,)), ("[3, 9]", (3, 9)), ("null", ())],
)
def test_steps_to_profile_are_one_or_a_range_or_a_list(write, given, steps):
    assert load_recipe(write(MINIMAL), [f"profile.steps={given}"]).profile.steps == steps


def test_scientific_notation_in_yaml_is_a_number_although_pyyaml_reads_a_string(write):
    assert yaml.safe_load("1e-6") == "1e-6"
    assert load_recipe(write(MINIMAL + "optimizer: {lr: 1e-6}\n")).optimizer.lr == 1e-6


def test_the_printed_recipe_shows_every_field_and_reads_back_equal(write, tmp_path):
    recipe = load_recipe(write(MINIMAL))
    text = dump_recipe(recipe)
    tree = yaml.safe_load(text)
    for path in field_paths():
        node = tree
        for part in path.split("."):
            if node is None:
                break
            assert part in node, path
            node = node[part]
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_recipe(again) == recipe


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.sample_per_prompt=4", "did you mean `rollout.samples_per_prompt`?"),
        ("rolout.temperature=1", "did you mean `rollout"),
        ("lr=1e-6", "did you mean `optimizer.lr`?"),
        ("actor.ppo_epochs=2", "one optimizer step per rollout"),
        ("actor.entropy_coeff=0.01", "no entropy bonus"),
        ("rollout.n=8", "rollout.samples_per_prompt"),
        ("rollout.samples_per_prompt=-1", "`rollout.samples_per_prompt`"),
        ("rollout.samples_per_prompt=1", "greater than or equal to 2"),
        ("rollout.prompts_per_step=0", "greater than 0"),
        ("rollout.prompts_per_step=many", "valid integer"),
        ("rollout.temperature=0", "greater than 0"),
        ("rollout.temperature=.nan", "finite"),
        ("rollout.top_p=0.9", "a truncated sampler draws from another distribution"),
        ("rollout.top_k=50", "a truncated sampler"),
        ("rollout.min_p=0.1", "a truncated sampler"),
        ("optimizer.lr=-1", "greater than or equal to 0"),
        ("optimizer.min_lr=1", "above `lr`"),
        ("optimizer.betas=[1.0, 0.9]", "less than 1"),
        ("seed=4294967296", "less than 4294967296"),
        ("rollout.port=70000", "less than or equal to 65535"),
        ("rollout={port: 65535, servers: 2}", "leaves no ports"),
        ("rollout.urls=[localhost:30000]", "must begin with http://"),
        ("rollout.urls=[http://a:1, http://a:1]", "names a server twice"),
        ("rollout={prompts_per_step: 4, extra_prompts: 5}", r"a step trains only 4"),
        ("rollout={nodes: 1, hand_over_memory: true}", "rollout.nodes is 1: those nodes only"),
        ("rollout={urls: [http://a:1], hand_over_memory: true}", "such servers outlive the run"),
        ("name=2024-13-45", "not valid YAML"),
        ("name=2024-06-01", "`name`"),
        ("algorithm.estimator=gae", "needs a critic"),
        ("algorithm.estimator=ppo", "'opo', 'opo_leave_one_out'"),
        ("algorithm.estimator=1", "'opo'"),
        ("algorithm.adv_estimator=opo", "algorithm.estimator"),
        ("algorithm.truncated=penalise", "penalise needs overlong_buffer"),
        ("algorithm.overlong_buffer=8", "nothing else uses it"),
        (
            "algorithm={truncated: penalise, overlong_buffer: 2000}",
            "exceeds rollout.max_response_tokens (1024)",
        ),
        ("rollout.dynamic_sampling.max_rounds=0", "greater than 0"),
        ("algorithm.loss_aggregation=mean", "token-mean"),
        ("actor.sequence_parallel=true", "raise tensor_parallel"),
        (
            "actor={expert_parallel: 2, data_parallel: 3}",
            "= 3 processes per pipeline stage, which is not a multiple of actor.expert_parallel 2",
        ),
        ("actor.virtual_pipeline=2", "raise pipeline_parallel or set virtual_pipeline to 1"),
        ("actor.data_parallel=100000", "each data-parallel rank needs at least one"),
        ("data.train={}", "exactly one source"),
        ("eval.every=5", "data.eval names no dataset"),
        ("profile.steps=3-", "write 3, 3-4 (first-last) or [3, 7] (got '3-')"),
        ("profile.steps=4-3", "write 3, 3-4"),
        ("profile.steps=0", "greater than 0"),
        ("profile.steps=[3, 4-5]", "`profile.steps.1`"),
        ("profile.steps=1.5", "`profile.steps`"),
        ("profile.steps=99-101", "profile.steps has step 101 but train.steps is 100"),
        ("profile.torch=true", "`torch` is true but `steps` names no step"),
        ("profile={servers: true, steps: null}", "`servers` is true but `steps` names no step"),
        ("profile={steps: 3, torch: 2.5}", "`profile.torch`"),
        ("run_dir=runs/{nme}", "only {name}"),
        ("name=a/b", "name"),
        ("model.path.x=1", "is a value, not a section"),
        ("rollout.temperature", "section.field=value"),
        ("train.steps=[", "not valid YAML"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(write, override, expected):
    text = message(write(MINIMAL), override)
    assert expected in text
    assert "recipe" in text or "override" in text


@pytest.mark.parametrize(
    ("device", "overrides", "expected"),
    [
        ("cuda", [], (True, "shared_memory")),
        ("cpu", [], (False, "distributed")),
        ("cuda", ["rollout.nodes=1"], (False, "distributed")),
        ("cuda", ["rollout.urls=[http://a:1]"], (False, "distributed")),
        ("cuda", ["rollout.hand_over_memory=false", "sync.transport=disk"], (False, "disk")),
        ("cpu", ["rollout.hand_over_memory=true"], (True, "distributed")),
    ],
)
def test_servers_that_share_gpus_with_the_trainer_share_memory(write, device, overrides, expected):
    recipe = load_recipe(write(MINIMAL), overrides)
    assert (recipe.rollout.hands_over(device), recipe.transport(device)) == expected


def test_shared_memory_does_not_reach_servers_on_nodes_of_their_own(write):
    text = message(write(MINIMAL), "rollout.nodes=2", "sync.transport=shared_memory")
    assert "sync.transport is shared_memory but rollout.nodes is 2" in text


def test_yaml_anchors_and_merges_work(write):
    text = MINIMAL + "optimizer: &o {lr: 1e-5}\neval: {<<: {every: 0}, at_start: false}\n"
    recipe = load_recipe(write(text), ["eval.at_end=false"])
    assert (recipe.optimizer.lr, recipe.eval.every, recipe.eval.at_start) == (1e-5, 0, False)


def test_all_mistakes_are_reported_at_once(write):
    text = message(write(MINIMAL), "rollout.prompts_per_step=0", "optimizer.lr=x", "trian.steps=1")
    assert len(text.splitlines()) == 3
    assert "did you mean `train" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("name: x\nname: y\n", "stands twice"),
        ("name: x\n", "`model` is required"),
        ("? [a]\n: b\n", "recipe"),
    ],
)
def test_a_broken_file_is_a_clear_error(write, text, expected):
    assert expected in message(write(text))


def test_a_missing_file_is_a_clear_error(tmp_path):
    assert "no such file" in message(tmp_path / "nowhere.yaml")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200), override=st.text(max_size=40))
def test_whatever_the_file_holds_only_recipe_errors_reach_the_user(
    tmp_path_factory, text, override
):
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(RecipeError):
        load_recipe(path, [override])


CONFIG = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 72,
    "vocab_size": 10,
}


@pytest.fixture
def model_recipe(write, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    path = write(
        MINIMAL.replace("models/demo", str(directory)).replace(
            "data:", "data:\n  max_prompt_tokens: 32"
        )
    )
    return lambda *overrides: load_recipe(path, ["rollout.max_response_tokens=32", *overrides])


def test_a_fitting_model_passes(model_recipe):
    assert (
        check_model(model_recipe("actor.tensor_parallel=2", "actor.pipeline_parallel=2")) == CONFIG
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["actor.tensor_parallel=3"],
            "tensor_parallel: 3 does not fit the model's 6 attention heads, 2 key-value heads",
        ),
        (["actor.tensor_parallel=4"], "24 MLP channels (intermediate_size); allowed: 1, 2"),
        (["rollout.tensor_parallel=3"], "rollout.tensor_parallel: 3 does not fit"),
        (["actor.pipeline_parallel=3"], "does not divide the model's 4 layers; allowed: 1, 2, 4"),
        (
            ["actor.pipeline_parallel=2", "actor.virtual_pipeline=3"],
            "actor.virtual_pipeline: 3 does not divide the 2 layers of each of the 2 pipeline "
            "stages; allowed: 1, 2",
        ),
        (["actor.expert_parallel=2"], "actor.expert_parallel: 2, but the model has no experts"),
        (["actor.expert_tensor_parallel=2"], "actor.expert_tensor_parallel: 2, but the model has"),
        (
            ["rollout.max_response_tokens=33"],
            "= 65 exceeds the 64 tokens that the model's context of 72 leaves",
        ),
        (["actor.micro_batch_tokens=63"], "below the longest possible sequence (64"),
        (
            ["actor.micro_batch_tokens=31", "actor.context_parallel=2"],
            "actor.micro_batch_tokens (31) x actor.context_parallel (2) = 62 is below the longest",
        ),
        (["model.path=nowhere"], "is not a directory"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(model_recipe, overrides, expected):
    with pytest.raises(RecipeError, match=None) as caught:
        check_model(model_recipe(*overrides))
    assert expected in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 18}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"model_type": "mistral", "sliding_window": 63},
            "= 64 exceeds the model's sliding window of 63 tokens, which SGLang ignores in mistral",
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 3,
            },
            "sliding window of 16 tokens, which SGLang ignores in qwen2",
        ),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.0}},
            "`attention_factor` of its yarn rope is 1.0, but SGLang computes it from `factor` "
            "(1.13863)",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4}},
            "SGLang does not start with a whole number there; write 4.0",
        ),
        (
            {"model_type": "gpt2"},
            "config.json cannot be used:\nconfig.json: `model_type` is 'gpt2'",
        ),
    ],
)
def test_models_that_servers_compute_differently_or_that_are_unknown_are_refused(
    model_recipe, tmp_path, keys, expected
):
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | keys))
    with pytest.raises(RecipeError) as caught:
        check_model(model_recipe())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
        {"rope_scaling": YARN},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
)
def test_windows_that_no_sequence_reaches_and_derived_factors_pass(model_recipe, tmp_path, keys):
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | keys))
    assert check_model(model_recipe()) == CONFIG | keys


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 10}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.expert_parallel=5"], "not divide the model's 12 experts; allowed: 1, 2, 3, 4, 6"),
        (["actor.expert_tensor_parallel=4"], "expert_tensor_parallel: 4 (null: tensor_parallel)"),
        (["actor.tensor_parallel=2"], "actor.sequence_parallel: false, but a model with experts"),
    ],
)
def test_layouts_that_do_not_fit_the_experts_are_refused(
    model_recipe, tmp_path, overrides, expected
):
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    with pytest.raises(RecipeError) as caught:
        check_model(model_recipe(*overrides))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "overrides", "expected"),
    [
        (
            {"mlp_only_layers": [2, 3]},
            ["actor.pipeline_parallel=2"],
            "actor.pipeline_parallel: 2 leaves stage 1 no layer with experts",
        ),
        ({"decoder_sparse_step": 2}, [], "only layers 1, 3 have experts"),
        ({"tie_word_embeddings": True}, [], "`tie_word_embeddings` is true, but SGLang gives"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, [], "`norm_topk_prob` with"),
    ],
)
def test_experts_that_cannot_be_trained_or_served_are_refused(
    model_recipe, tmp_path, keys, overrides, expected
):
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | EXPERTS | keys))
    with pytest.raises(RecipeError) as caught:
        check_model(model_recipe(*overrides))
    assert expected in str(caught.value)


def test_layouts_that_fit_the_experts_pass(model_recipe, tmp_path):
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
    layout = ["actor.tensor_parallel=2", "actor.sequence_parallel=true", "actor.expert_parallel=4"]
    assert check_model(model_recipe(*layout))
    # Each stage has tensor_parallel x data_parallel ranks for expert_parallel x expert_tensor ones.
    assert check_model(model_recipe(*layout, "actor.data_parallel=4"))


@pytest.mark.parametrize(
    ("breakage", "expected"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (
            lambda d: (d / "config.json").write_text("{}"),
            "config.json cannot be used:\nconfig.json: `model_type` is None",
        ),
        (lambda d: (d / "config.json").write_text("[1]"), "must hold an object, got [1]"),
        (
            lambda d: (d / "config.json").write_text(
                json.dumps({**CONFIG, "num_attention_heads": "4"})
            ),
            "`num_attention_heads` is '4', must be a whole number above 0",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "has no *.safetensors weights"),
    ],
)
def test_a_broken_model_directory_is_refused(model_recipe, tmp_path, breakage, expected):
    recipe = model_recipe()
    breakage(tmp_path / "model")
    with pytest.raises(RecipeError) as caught:
        check_model(recipe)
    assert expected in str(caught.value)
