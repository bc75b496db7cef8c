"""Does a recipe fit its model? Asked of config.json alone, before any process is started."""

import json
from pathlib import Path

from megatron_opo.errors import RecipeError
from megatron_opo.recipe import Recipe

SERVER_RESERVED_TOKENS = 8


def check_model(recipe: Recipe) -> dict:
    """Check the recipe against the model's config.json and return that config.

    Raises:
        RecipeError: the directory or a file is missing, or a size does not divide.
    """
    directory = Path(recipe.model.path)
    if not directory.is_dir():
        raise RecipeError(
            f"model.path: {directory} is not a directory; give a Hugging Face model directory "
            "(config.json, *.safetensors, tokenizer files)"
        )
    config_path = directory / "config.json"
    try:
        config = json.loads(config_path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"model.path: {config_path} does not exist") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {config_path} is not valid JSON: {error}") from None
    if not list(directory.glob("*.safetensors")):
        raise RecipeError(f"model.path: {directory} has no *.safetensors weights")
    if not isinstance(config, dict):
        raise RecipeError(f"model.path: {config_path} must hold an object, got {config!r:.60}")
    check_sizes(recipe, config, config_path)
    return config


def check_sizes(recipe: Recipe, config: dict, config_path: Path) -> None:
    """Raises RecipeError, naming every size of the recipe that the model's config rules out."""
    names = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size")
    for name in names:
        if type(config.get(name)) is not int or config[name] < 1:
            raise RecipeError(
                f"model.path: {config_path}: `{name}` must be a positive whole number, got "
                f"{config.get(name)!r}"
            )
    heads, layers, context, _ = (config[name] for name in names)
    kv_heads = config.get("num_key_value_heads") or heads
    problems = []
    tensor, pipeline = recipe.actor.tensor_parallel, recipe.actor.pipeline_parallel
    valid = [t for t in range(1, heads + 1) if heads % t == 0 and kv_heads % t == 0]
    for field, size in (
        ("actor.tensor_parallel", tensor),
        ("rollout.tensor_parallel", recipe.rollout.tensor_parallel),
    ):
        if size not in valid:
            problems.append(
                f"{field}: {size} does not divide the model's {heads} attention heads and "
                f"{kv_heads} key-value heads; allowed: {', '.join(map(str, valid))}"
            )
    if layers % pipeline:
        allowed = [p for p in range(1, layers + 1) if layers % p == 0]
        problems.append(
            f"actor.pipeline_parallel: {pipeline} does not divide the model's {layers} layers; "
            f"allowed: {', '.join(map(str, allowed))}"
        )
    elif layers % (pipeline * recipe.actor.virtual_pipeline):
        allowed = [v for v in range(1, layers // pipeline + 1) if layers % (pipeline * v) == 0]
        problems.append(
            f"actor.virtual_pipeline: {recipe.actor.virtual_pipeline} does not divide the "
            f"{layers // pipeline} layers of each of the {pipeline} pipeline stages; allowed: "
            f"{', '.join(map(str, allowed))}"
        )
    problems += _expert_problems(recipe, config)
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    # SGLang cuts a response silently at context - 2, and refuses prompts of context - 6 or more.
    if longest > context - SERVER_RESERVED_TOKENS:
        problems.append(
            f"data.max_prompt_tokens ({recipe.data.max_prompt_tokens}) + "
            f"rollout.max_response_tokens ({recipe.rollout.max_response_tokens}) = {longest} "
            f"exceeds the {context - SERVER_RESERVED_TOKENS} tokens that the model's context of "
            f"{context} leaves (servers keep {SERVER_RESERVED_TOKENS} to themselves)"
        )
    if longest > recipe.actor.micro_batch_tokens:
        problems.append(
            f"actor.micro_batch_tokens ({recipe.actor.micro_batch_tokens}) is below the longest "
            f"possible sequence ({longest} = data.max_prompt_tokens + "
            "rollout.max_response_tokens): raise it"
        )
    if problems:
        raise RecipeError("\n".join(problems))


def _expert_problems(recipe: Recipe, config: dict) -> list[str]:
    """Where the sizes cannot be read, whoever reads the whole config says so."""
    count = config.get("num_local_experts", config.get("num_experts", 0))
    channels = config.get("moe_intermediate_size", 0)
    if type(count) is not int or type(channels) is not int:
        return []
    problems = recipe.actor.expert_problems(count, channels)
    servers = recipe.rollout.tensor_parallel
    if count and channels % servers:
        problems.append(
            f"rollout.tensor_parallel: {servers} does not divide the {channels} channels of an "
            "expert (moe_intermediate_size)"
        )
    return problems
