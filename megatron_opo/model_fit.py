"""Does a recipe fit its model? Asked of config.json alone, before any process is started."""

import json
from pathlib import Path

from megatron_opo.checkpoint_source import find_checkpoint
from megatron_opo.errors import CheckpointError, RecipeError
from megatron_opo.recipe import ActorConfig, Recipe
from megatron_opo.weights.families import Architecture
from megatron_opo.weights.hf_config import read_architecture

SERVER_RESERVED_TOKENS = 8


def check_model(recipe: Recipe) -> dict:
    """Check the recipe against the model's config.json and return that config.

    Raises:
        RecipeError: the directory or a file is missing, the model is not supported, or a size does
            not divide.
    """
    directory = Path(recipe.model.path)
    if not directory.is_dir():
        raise RecipeError(
            f"model.path: {directory} is not a directory; give a Hugging Face model directory "
            f"(config.json, *.safetensors, tokenizer files). Relative paths begin at {Path.cwd()}"
        )
    config_path = directory / "config.json"
    try:
        config = json.loads(config_path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"model.path: {config_path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"model.path: {config_path} is not valid JSON: {error}") from None
    if not list(directory.glob("*.safetensors")):
        raise RecipeError(f"model.path: {directory} has no *.safetensors weights")
    if not isinstance(config, dict):
        raise RecipeError(f"model.path: {config_path} must hold an object, got {config!r:.60}")
    check_sizes(recipe, config, config_path)
    if recipe.model.megatron_checkpoint is not None:
        try:
            find_checkpoint(Path(recipe.model.megatron_checkpoint))
        except CheckpointError as error:
            raise RecipeError(f"model.megatron_checkpoint: {error}") from None
    return config


def check_sizes(recipe: Recipe, config: dict, config_path: Path) -> None:
    """Raises RecipeError, naming everything in the config that is not supported, or else every size
    of the recipe that the model rules out."""
    try:
        architecture = read_architecture(config)
    except RecipeError as error:
        raise RecipeError(f"model.path: {config_path} cannot be used:\n{error}") from None
    problems = training_problems(architecture, recipe.actor)
    problems += _server_problems(architecture, recipe)
    problems += _length_problems(architecture, recipe)
    if problems:
        raise RecipeError("\n".join(problems))


def training_problems(architecture: Architecture, actor: ActorConfig) -> list[str]:
    """Why the model cannot be trained in this layout."""
    experts, layers, pipeline = architecture.experts, architecture.layers, actor.pipeline_parallel
    problems = _tensor_problems("actor", actor.tensor_parallel, architecture)
    if layers % pipeline:
        allowed = [p for p in range(1, layers + 1) if layers % p == 0]
        problems.append(
            f"actor.pipeline_parallel: {pipeline} does not divide the model's {layers} layers; "
            f"allowed: {', '.join(map(str, allowed))}"
        )
    elif layers % (pipeline * actor.virtual_pipeline):
        allowed = [v for v in range(1, layers // pipeline + 1) if layers % (pipeline * v) == 0]
        problems.append(
            f"actor.virtual_pipeline: {actor.virtual_pipeline} does not divide the "
            f"{layers // pipeline} layers of each of the {pipeline} pipeline stages; allowed: "
            f"{', '.join(map(str, allowed))}"
        )
    problems += actor.expert_problems(
        count=experts.count if experts and experts.layers else 0,
        channels=experts.ffn if experts else 0,
    )
    if experts and experts.per_token == 1 and experts.normalize:
        problems.append(
            "config.json: `norm_topk_prob` with `num_experts_per_tok` 1 gives every chosen expert "
            "the weight 1, whatever the router says, so that it cannot be trained"
        )
    chunk = max(1, layers // (pipeline * actor.virtual_pipeline))
    with_experts = {i // chunk % pipeline for i in experts.layers} if experts else set()
    without = sorted({*range(pipeline)} - with_experts)
    if with_experts and without:
        problems.append(
            f"actor.pipeline_parallel: {pipeline} leaves stage {without[0]} no layer with experts, "
            "of which checkpoints need one on each stage; lower it, or raise virtual_pipeline"
        )
    return problems


def _tensor_problems(section: str, size: int, architecture: Architecture) -> list[str]:
    heads, kv_heads, ffn = architecture.heads, architecture.kv_heads, architecture.ffn

    def fits(ranks: int) -> bool:
        kv_fits = kv_heads % ranks == 0 or ranks % kv_heads == 0
        # Megatron cuts the matrix of query, key and value evenly, also within a head.
        rows = (heads + 2 * kv_heads) * architecture.head_dim
        return all((kv_fits, heads % ranks == 0, ffn % ranks == 0, rows % ranks == 0))

    if fits(size):
        return []
    allowed = ", ".join(str(ranks) for ranks in range(1, heads + 1) if fits(ranks))
    return [
        f"{section}.tensor_parallel: {size} does not fit the model's {heads} attention heads, "
        f"{kv_heads} key-value heads (which it must divide, or be a multiple of) and {ffn} MLP "
        f"channels (intermediate_size); allowed: {allowed}"
    ]


def _server_problems(architecture: Architecture, recipe: Recipe) -> list[str]:
    size, experts, rope = recipe.rollout.tensor_parallel, architecture.experts, architecture.rope
    problems = _tensor_problems("rollout", size, architecture)
    if experts and experts.ffn % size:
        problems.append(
            f"rollout.tensor_parallel: {size} does not divide the {experts.ffn} channels of an "
            "expert (moe_intermediate_size)"
        )
    if experts and len(experts.layers) < architecture.layers:
        problems.append(
            f"config.json: only layers {', '.join(map(str, experts.layers))} have experts "
            "(`mlp_only_layers`, `decoder_sparse_step`), but SGLang gives them to all: it would "
            "sample from random weights"
        )
    if experts and architecture.tied:
        problems.append(
            "config.json: `tie_word_embeddings` is true, but SGLang gives a model with experts a "
            "head of its own, which nothing would fill; save the model untied"
        )
    if rope.attention_factor != rope.derived_attention_factor:
        problems.append(
            f"config.json: the `attention_factor` of its yarn rope is {rope.attention_factor}, but "
            f"SGLang computes it from `factor` ({rope.derived_attention_factor:.6g}), so that its "
            "answers would come from another policy than the one that is trained; drop it if the "
            "model was made without"
        )
    if rope.kind == "linear" and isinstance(rope.values["factor"], int):
        factor = rope.values["factor"]
        problems.append(
            f"config.json: the `factor` of its linear rope is {factor}, and SGLang does not start "
            f"with a whole number there; write {float(factor)}"
        )
    return problems


def _length_problems(architecture: Architecture, recipe: Recipe) -> list[str]:
    context = architecture.max_positions
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    sum_of_both = (
        f"data.max_prompt_tokens ({recipe.data.max_prompt_tokens}) + "
        f"rollout.max_response_tokens ({recipe.rollout.max_response_tokens}) = {longest}"
    )
    problems = []
    # SGLang cuts a response silently at context - 2, and refuses prompts of context - 6 or more.
    if longest > context - SERVER_RESERVED_TOKENS:
        problems.append(
            f"{sum_of_both} exceeds the {context - SERVER_RESERVED_TOKENS} tokens that the model's "
            f"context of {context} leaves (servers keep {SERVER_RESERVED_TOKENS} to themselves)"
        )
    window = min((each for each in architecture.windows if each is not None), default=longest)
    if longest > window:
        problems.append(
            f"{sum_of_both} exceeds the model's sliding window of {window} tokens, which SGLang "
            f"ignores in {architecture.family.model_type} models: longer answers would come from "
            "another policy than the one that is trained; lower one of them (up to the window, it "
            "changes nothing)"
        )
    actor = recipe.actor
    fits = actor.micro_batch_tokens * actor.context_parallel
    if longest > fits:
        limit = f"actor.micro_batch_tokens ({actor.micro_batch_tokens})"
        if actor.context_parallel > 1:
            limit += f" x actor.context_parallel ({actor.context_parallel}) = {fits}"
        problems.append(
            f"{limit} is below the longest possible sequence ({longest} = data.max_prompt_tokens + "
            "rollout.max_response_tokens): raise it"
        )
    return problems
