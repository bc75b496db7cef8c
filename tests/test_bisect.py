"""Faults that are put into one side are found where they were put."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import tiny_qwen3
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from megatron_opo.bisect import comparison, server_side
from megatron_opo.bisect.command import prompts_of, resolve
from megatron_opo.bisect.operations import operations, queries_keys_values
from megatron_opo.bisect.recording import Sequences
from megatron_opo.errors import RecipeError
from megatron_opo.recipe_file import load_recipe
from megatron_opo.rollout import close_servers, wait_healthy
from megatron_opo.weights.hf_config import read_architecture

RECIPE = """
name: bisect
run_dir: {run}
model: {{path: {model}, dtype: float32}}
rollout: {{temperature: 0.8, server_args: {{max_total_tokens: 8192, max_running_requests: 16}}}}
data: {{train: {{files: [unused.jsonl]}}}}
"""
PROMPTS = [[5, 9, 12, 44, 7], list(range(2, 60))]
START_TIMEOUT_S = 240.0
RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def copy_with(model: Path, target: Path, weights=None, config=None) -> Path:
    """A copy of a model directory with other tensors or other fields of its config."""
    shutil.copytree(model, target)
    file = target / "model.safetensors"
    save_file(load_file(file) | (weights or {}), file, metadata={"format": "pt"})
    changed = config_of(target) | (config or {})
    (target / "config.json").write_text(json.dumps(changed))
    return target


def compare_in_turn(recipe_path: str, asked: server_side.Asked, cases: list):
    """The comparison with the trainer of each case: overrides, and its model directory."""
    from megatron_opo.bisect import trainer_side

    found = []
    recipe = load_recipe(recipe_path)
    with trainer_side.open_job(recipe) as device:
        for overrides, directory in cases:
            recipe = load_recipe(recipe_path, overrides)
            config = config_of(Path(directory))
            wanted = operations(read_architecture(config))
            mine = trainer_side.record(
                recipe, config, Path(directory), wanted, asked.sequences, device
            )
            found.append(
                comparison.compare(
                    wanted, asked.recording, mine, asked.sequences, torch.float32
                ).as_data()
            )
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """By the name of a fault, the comparison of a server without it with a trainer that has it."""
    scratch = tmp_path_factory.mktemp("bisect")
    model = tiny_qwen3(scratch / "model")
    recipe_path = scratch / "recipe.yaml"
    recipe_path.write_text(RECIPE.format(run=scratch / "run", model=model))
    recipe = load_recipe(recipe_path)
    architecture = read_architecture(config_of(model))
    wanted = operations(architecture)
    server = server_side.launch(recipe, wanted, scratch / "server", "cpu")
    try:
        weights = load_file(model / "model.safetensors")
        down = "model.layers.2.mlp.down_proj.weight"
        changed = weights[down].clone()
        changed[3, 5] += 0.5
        embedding = weights["model.embed_tokens.weight"]
        rope = config_of(model)["rope_parameters"] | {"rope_theta": 5e4}
        cases = {
            # First: what replaces torch's products stays.
            "other operations": (["rollout.deterministic=false"], model),
            "none": ([], model),
            "weight": ([], copy_with(model, scratch / "weight", {down: changed})),
            "rope": ([], copy_with(model, scratch / "rope", config={"rope_parameters": rope})),
            "temperature": (["rollout.temperature=1.0"], model),
            "untied": (
                [],
                copy_with(
                    model,
                    scratch / "untied",
                    {"lm_head.weight": embedding + 0.01},
                    {"tie_word_embeddings": False},
                ),
            ),
        }
        wait_healthy([server], START_TIMEOUT_S)
        asked = server_side.ask(
            server, recipe, wanted, PROMPTS, 6, scratch / "server", architecture.vocab
        )
    finally:
        close_servers([server])
    given = [(overrides, str(directory)) for overrides, directory in cases.values()]
    (results,) = run_ranks(1, compare_in_turn, str(recipe_path), asked, given)
    return dict(zip(cases, results, strict=True))


def test_without_a_fault_every_operation_is_found_on_both_sides_and_equal(found):
    without = found["none"]
    assert without["first"] is None
    assert len(without["operations"]) == 4 + 4 * 14
    for line in without["operations"]:
        assert line["problem"] == ""
        assert line["prefill"]["equal"] == line["decode"]["equal"] == 1


def test_other_operations_of_the_same_model_differ_by_rounding_only(found):
    others = found["other operations"]
    assert others["first"] in ("layer 0: qkv projection", "layer 0: attention")
    assert others["first_beyond_rounding"] is None


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("weight", "layer 2: down projection"),
        ("rope", "layer 0: rotated query"),
        ("temperature", "logprob"),
        ("untied", "logits"),
    ],
)
def test_a_fault_of_one_side_is_named(found, fault, operation):
    assert found[fault]["first"] == found[fault]["first_beyond_rounding"] == operation


def test_queries_keys_and_values_come_apart():
    """Two groups of two queries each, of one channel."""
    architecture = read_architecture(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 9,
            "hidden_size": 4,
            "intermediate_size": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
    )
    mixed = torch.tensor([[1, 2, 10, 20, 3, 4, 30, 40]])
    arranged = queries_keys_values(mixed, architecture)
    assert arranged.tolist() == [[1, 2, 3, 4, 10, 30, 20, 40]]


def made(differences: dict[str, float], missing: str = "") -> comparison.Comparison:
    """Of recordings of one prompt of two tokens and one decoded token."""
    sequences = Sequences(((1, 2),), ((3, 4),), ((-1.0, -1.0),), 1.0)
    wanted = operations(read_architecture(ARCHITECTURE))
    server = {each.title: torch.ones(3, 2) for each in wanted}
    server["logits"], server["logprob"] = torch.ones(2, 9), torch.ones(2, 1)
    trainer = {title: values.clone() for title, values in server.items()}
    for title, difference in differences.items():
        trainer[title][-1] += difference
    trainer.pop(missing, None)
    return comparison.compare(wanted, server, trainer, sequences, torch.float32)


ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 9,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 1,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_the_verdict_tells_rounding_from_more():
    text = comparison.verdict(made({"layer 0: attention": 1e-6, "final norm": 0.1}))
    first, causes, large, _ = text.splitlines()
    assert first == "The first operation that differs: layer 0: attention (equal in prefill)."
    assert "kernel" in causes
    assert "more than rounding" in large and large.endswith("final norm.")


def test_the_verdict_names_what_could_not_be_looked_at():
    text = comparison.verdict(made({"layer 0: attention": 1e-6}, missing="layer 0: rotated key"))
    assert "may also be one that could not be looked at: layer 0: rotated key." in text
    assert "No difference is larger than rounding makes" in text


def test_equal_recordings_are_called_equal():
    assert comparison.verdict(made({})) == "all 18 operations are equal to the bit, for all tokens"


@pytest.mark.parametrize("text", ["", "1,", "7,9", "-1", "a"])
def test_what_is_no_token_is_refused(text):
    with pytest.raises(RecipeError, match="--tokens"):
        prompts_of([text], vocab=9)


def test_prompts_are_as_given_or_of_several_lengths():
    assert prompts_of(["1,2", " 8"], vocab=9) == [[1, 2], [8]]
    assert {len(prompt) for prompt in prompts_of(None, vocab=9)} == {1, 17, 64}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_any_recipe_becomes_one_of_one_rank(path, tmp_path):
    options = SimpleNamespace(recipe=path, model=None, overrides=["seed=3"], dtype="bfloat16")
    recipe = resolve(options, tmp_path)
    assert recipe.actor.smallest_world == recipe.actor.replica_size == 1
    assert recipe.rollout.servers == recipe.rollout.tensor_parallel == 1
    assert (recipe.seed, recipe.model.dtype) == (3, "bfloat16")


def test_a_model_needs_no_recipe(tmp_path):
    model = tmp_path / "a 'model'"
    options = SimpleNamespace(recipe=None, model=model, overrides=[], dtype=None)
    recipe = resolve(options, tmp_path)
    assert recipe.model.path == str(model)
    assert recipe.model.dtype == "float32"
