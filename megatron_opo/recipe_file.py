"""Recipes as files: YAML plus dotted overrides -> one frozen, fully validated `Recipe`.

`load_recipe` reports every mistake at once, each with the dotted field, what was found and what is
allowed.
"""

import difflib
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_opo.errors import RecipeError
from megatron_opo.recipe import Recipe, Section
from megatron_opo.redaction import hidden_fields, is_secret

# What a user of another trainer may write, and why it is not there.
HINTS = {
    "actor_rollout_ref": "a config of verl's; megatron-opo import-verl makes a recipe of it",
    "ppo_epochs": "exact on-policy RL takes one optimizer step per rollout; there are no epochs",
    "ppo_mini_batch_size": "a step trains on the whole rollout at once; drop it",
    "mini_batch_size": "a step trains on the whole rollout at once; drop it",
    "micro_batch_size": "micro-batches are filled by tokens: actor.micro_batch_tokens",
    "kl_loss_coef": "OPO has no KL term; drop it",
    "use_kl_loss": "OPO has no KL term; drop it",
    "use_kl_in_reward": "OPO has no KL term; drop it",
    "entropy_coeff": "OPO has no entropy bonus; drop it",
    "clip_ratio": "the importance ratio is exactly 1 on-policy; there is nothing to clip",
    "rollout_is": "it is called algorithm.correction; docs/on_policy.md has the formulas",
    "rollout_rs": "it is called algorithm.correction; docs/on_policy.md has the formulas",
    "tis_imp_ratio_cap": "it is called algorithm.correction.upper, with kind truncate",
    "use_tis": "it is called algorithm.correction.kind: truncate",
    "train_batch_size": "it is called rollout.prompts_per_step (prompts, as in verl)",
    "n": "it is called rollout.samples_per_prompt",
    "adv_estimator": "it is called algorithm.estimator",
    "wandb_project": "write log.loggers=[wandb] and log.project",
    "report_to": "it is called log.loggers",
    "filter_groups": "it is called rollout.dynamic_sampling",
    "norm_adv_by_std_in_grpo": "the estimator grpo divides by it, dr_grpo does not",
}


def field_paths(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every dotted field of the schema, sections included."""
    paths = []
    for name, info in model.model_fields.items():
        paths.append(prefix + name)
        section = section_of(info.annotation)
        if section is not None:
            paths += field_paths(section, f"{prefix}{name}.")
    return paths


def section_of(annotation) -> type[Section] | None:
    """The section that a field of this type holds; None for a value."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _nearest(path: str) -> str:
    leaf = path.rsplit(".", 1)[-1]
    if leaf in HINTS:
        return HINTS[leaf]
    known = field_paths()
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    if not close:
        same_leaf = [p for p in known if p.rsplit(".", 1)[-1] == leaf]
        leaves = {p.rsplit(".", 1)[-1]: p for p in known}
        near_leaf = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)
        close = same_leaf or [leaves[name] for name in near_leaf]
    if close:
        return f"did you mean `{close[0]}`?"
    parent = path.rpartition(".")[0]
    siblings = [p for p in known if p.rpartition(".")[0] == parent]
    return "allowed here: " + ", ".join(siblings or [p for p in known if "." not in p])


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win silently; a recipe must not."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RecipeError(f"recipe {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path}: cannot be read: {error}") from None
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise RecipeError(f"recipe {path}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise RecipeError(
            f"recipe {path}: must be a mapping of sections, got {type(tree).__name__}"
        )
    return tree


def _apply_override(tree: dict, override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError(f"override `{override}`: write it as section.field=value")
    try:
        value = yaml.safe_load(text) if text else ""
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"override `{override}`: the value is not valid YAML: {error}") from None
    *parents, leaf = path.split(".")
    node = tree
    for i, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise RecipeError(
                f"override `{override}`: `{'.'.join(parents[: i + 1])}` is a value, not a section"
            )
    node[leaf] = value


def _describe(error: ErrorDetails, source: str) -> str:
    location = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{source}: unknown key `{location}`: {_nearest(location)}"
    if error["type"] == "missing":
        return f"{source}: `{location}` is required and was not given"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "tuple_type":
        message = "must be a list, [a, b]"
    where = f"`{location}`: " if location else ""
    got = error.get("input")
    is_shown = not isinstance(got, dict | BaseModel) and not is_secret(location)
    shown = f" (got {got!r})" if is_shown else ""
    return f"{source}: {where}{message}{shown}"


def load_recipe(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Read a recipe and apply `section.field=value` overrides.

    Raises:
        RecipeError: with one line for every problem found.
    """
    path = Path(path)
    tree = _read_yaml(path)
    for override in overrides:
        _apply_override(tree, override)
    source = f"recipe {path}"
    if hidden := hidden_fields(tree):
        raise RecipeError(
            f"{source}: {', '.join(hidden)}: what stood here is hidden in what a run writes; give "
            "it anew"
        )
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(e, source) for e in error.errors(include_url=False)]
        raise RecipeError("\n".join(problems)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The whole resolved recipe as YAML, every default included; `load_recipe` reads it back,
    unless it has secrets, which are hidden."""
    return yaml.safe_dump(recipe.to_show(), sort_keys=False, width=100)
