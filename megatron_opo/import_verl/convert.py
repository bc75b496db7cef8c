"""Settings of verl -> a recipe, and what became of every one of them."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_opo.errors import VerlError
from megatron_opo.import_verl.rules import Outcome, Rule, Script, Status, moot, shown
from megatron_opo.import_verl.table import ALIASES, DEFAULTS, MEGATRON_DEFAULTS, RULES
from megatron_opo.import_verl.values import flatten, resolve
from megatron_opo.recipe import Recipe, TrainConfig
from megatron_opo.redaction import HIDDEN, is_secret

BY_KEY = {rule.key: rule for rule in RULES}
CLASS_NAME = moot("_target_", "the name of a class of verl's")
# What a recipe cannot be without.
REQUIRED = {
    "name": "from_verl",
    "model.path": "models/MODEL",
    "data.train.files": ["data/train.parquet"],
}
# These keep a text that is not known to its end, for the user to complete.
COMPLETED_BY_USER = {"path", "train_files", "val_files", "experiment_name", "default_local_dir"}


@dataclass(frozen=True)
class Setting:
    """One key as it was given."""

    key: str
    value: Any


@dataclass(frozen=True)
class Entry:
    """What became of one key; `by_default`: it was not given, verl's default counts."""

    key: str
    value: Any
    status: Status
    fields: Mapping[str, Any]
    why: str
    by_default: bool = False


@dataclass(frozen=True)
class Conversion:
    """`recipe` is what the recipe file holds; `fill` says by field what the user must see to."""

    recipe: dict[str, Any]
    entries: tuple[Entry, ...]
    fill: dict[str, str]
    notes: tuple[str, ...]


@dataclass
class _Draft:
    tree: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    fill: dict[str, str] = field(default_factory=dict)


def canonical(key: str) -> str:
    """The name that the rules know: of several names that verl has or had for it."""
    for name, other in ALIASES.items():
        if key.startswith(name) if name.endswith(".") else key == name:
            return other + key[len(name) :]
    return key


def rule_for(key: str) -> Rule | None:
    """The rule of a key: its own, or that of the longest part of it that has one for all below."""
    if key in BY_KEY:
        return BY_KEY[key]
    if key.rpartition(".")[2] == "_target_":
        return CLASS_NAME
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if found := BY_KEY.get(".".join(parts[:length]) + ".*"):
            return found
    return None


def nearest(key: str) -> str:
    """A known key that an unknown one may be a slip of; "" if none is close."""
    known = [rule.key for rule in RULES if not rule.key.endswith("*")]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    if not close:
        leaf = key.rpartition(".")[2]
        leaves = {each.rpartition(".")[2]: each for each in reversed(known)}
        close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, 1, 0.8)]
    return close[0] if close else ""


def convert(settings: Iterable[Setting], notes: Iterable[str] = (), home: str = "~") -> Conversion:
    """Make the recipe. Of two settings of one key the later counts, as in verl.

    Raises:
        VerlError: together the settings make a recipe that is refused, and no single one is why.
    """
    expanded = [
        Setting(canonical(path), inner)
        for each in settings
        for path, inner in flatten({each.key: each.value})
    ]
    expanded = _without_deleted(expanded)
    given = {each.key: each.value for each in expanded}
    resolved = {key: resolve(value, key, given) for key, value in given.items()}
    defaults = DEFAULTS | (MEGATRON_DEFAULTS if _is_megatron(resolved) else {})
    unset = {key: value for key, value in defaults.items() if key not in resolved}
    script = Script({**unset, **resolved}, home)
    draft = _Draft()
    for key, value in unset.items():
        _take(draft, key, value, script, by_default=True)
    last = {each.key: index for index, each in enumerate(expanded)}
    for index, each in enumerate(expanded):
        if last[each.key] != index:
            why = "given again later, which counts"
            value = HIDDEN if _is_secret(each.key, each.value) else each.value
            draft.entries.append(Entry(each.key, value, "taken over", {}, why))
        else:
            _take(draft, each.key, resolved[each.key], script, by_default=False)
    _complete(draft)
    _validate(draft)
    _forget_absent(draft)
    return Conversion(_ordered(draft.tree, Recipe), tuple(draft.entries), draft.fill, tuple(notes))


def _without_deleted(settings: Iterable[Setting]) -> list[Setting]:
    """`~key` takes back what stood before it for this key and for all below."""
    kept: list[Setting] = []
    for each in settings:
        if each.key.startswith("~"):
            name = canonical(each.key[1:])
            kept = [k for k in kept if not f"{k.key}.".startswith(f"{name}.")]
        kept.append(each)
    return kept


def _is_megatron(settings: Mapping[str, Any]) -> bool:
    if "megatron" in shown(settings.get("actor_rollout_ref.actor.strategy")):
        return True
    selects = ("--config-name", "-cn", "model_engine")
    return any(
        key.startswith("actor_rollout_ref.actor.megatron.")
        or ((key in selects or "@" in key) and "megatron" in shown(value))
        for key, value in settings.items()
    )


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and is_secret(key.rpartition(".")[2])


def _take(draft: _Draft, key: str, value: Any, script: Script, by_default: bool) -> None:
    outcome = _outcome(key, value, script)
    if _is_secret(key, value):
        fill = dict.fromkeys(outcome.fields, "a secret is not copied: give it anew")
        status: Status = "changed" if outcome.fields else outcome.status
        outcome, value = Outcome(status, "a secret is not copied", {}, fill), HIDDEN
    for path, each in outcome.fields.items():
        _set(draft.tree, path, each)
    draft.fill.update(outcome.fill)
    if by_default and not outcome.fields and not outcome.fill:
        return
    fields = dict(outcome.fields)
    draft.entries.append(Entry(key, value, outcome.status, fields, outcome.why, by_default))


def _outcome(key: str, value: Any, script: Script) -> Outcome:
    if key.startswith("-"):
        return _option(key, value)
    if key.startswith("~"):
        return Outcome("taken over", "deleted: what stood for it before does not count")
    if "@" in key:
        return Outcome("taken over", "a group of verl's own config; its defaults count")
    rule = rule_for(key)
    if rule is None:
        near = nearest(key)
        hint = f"did you mean {near}?" if near else "no key of this name is known; it is left out"
        return Outcome("unknown", hint)
    field_name = rule.becomes.strip("`")
    if "$" in shown(value):
        if key.rpartition(".")[2] not in COMPLETED_BY_USER or "custom_reward" in key:
            fill = {field_name: f"was {shown(value)}"} if field_name else {}
            return Outcome("changed", f"{shown(value)} cannot be known here", {}, fill)
        outcome = rule.apply(value, script, key)
        fill = {**outcome.fill, field_name: f"{shown(value)} cannot be known here"}
        return replace(outcome, fill=fill)
    try:
        return rule.apply(value, script, key)
    except (ValueError, TypeError, OverflowError) as error:
        why = f"{error}; it is left out"
        return Outcome(
            "not supported", why, {}, {field_name: f"was {shown(value)}"} if field_name else {}
        )


def _option(key: str, value: Any) -> Outcome:
    if key in ("--config-name", "-cn"):
        if shown(value).removesuffix(".yaml") in ("ppo_trainer", "ppo_megatron_trainer"):
            return Outcome("taken over", "verl's own config; its defaults count")
        why = "its keys are not here: give that YAML too, before the overrides"
        return Outcome("not supported", why, {}, {"": f"the keys of {shown(value)}.yaml"})
    if key in ("--config-path", "--config-dir", "-cp", "-cd"):
        return Outcome("taken over", "where --config-name lies")
    if key == "-word":
        return Outcome("unknown", "not written as key=value")
    return Outcome("changed", "an option of Hydra's command line, not a setting")


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        if not isinstance(tree.get(parent), dict):
            tree[parent] = {}
        tree = tree[parent]
    tree[leaf] = value


def _get(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _drop(draft: _Draft, path: str, why: str, status: Status) -> bool:
    """Take a field out of the recipe again, and say so where it came from."""
    *parents, leaf = path.split(".")
    node = _get(draft.tree, ".".join(parents)) if parents else draft.tree
    if not isinstance(node, dict) or leaf not in node:
        return False
    del node[leaf]
    for index, entry in enumerate(draft.entries):
        if any(f == path or f.startswith(f"{path}.") for f in entry.fields):
            left = {f: v for f, v in entry.fields.items() if f != path}
            left = {f: v for f, v in left.items() if not f.startswith(f"{path}.")}
            draft.entries[index] = replace(entry, status=status, fields=left, why=why)
    return True


def _complete(draft: _Draft) -> None:
    """Put in what a recipe needs, and make fields fit each other that do not."""
    for path, value in REQUIRED.items():
        if not _get(draft.tree, path):
            _set(draft.tree, path, value)
            draft.fill.setdefault(path, "not in the command")
    if not _get(draft.tree, "data.eval.files"):
        _drop(draft, "data.eval", "dropped: data.val_files names no evaluation data", "changed")
        _drop(draft, "eval", "dropped: data.val_files names no evaluation data", "changed")
    optimizer = draft.tree.get("optimizer", {})
    lr, lowest = optimizer.get("lr", 1e-6), optimizer.get("min_lr", 0.0)
    if not lowest <= lr:
        _drop(draft, "optimizer.min_lr", f"dropped: it is above lr ({lr})", "changed")
    warmup = optimizer.get("warmup_steps", 0)
    steps = _get(draft.tree, "train.steps")
    default = TrainConfig.model_fields["steps"].default
    if optimizer.get("schedule", "constant") == "constant" or warmup <= (steps or default):
        return
    if steps is None:
        _set(draft.tree, "train.steps", warmup)
    else:
        why = f"dropped: {warmup} steps of warmup are more than train.steps ({steps})"
        _drop(draft, "optimizer.warmup_steps", why, "changed")


def _validate(draft: _Draft) -> None:
    """Leave out what the recipe's schema refuses, until it refuses nothing."""
    while True:
        try:
            Recipe.model_validate(draft.tree)
            return
        except ValidationError as error:
            problems = error.errors(include_url=False)
        dropped = False
        for problem in problems:
            why = f"not possible here: {problem['msg'].removeprefix('Value error, ')}"
            parts = [str(part) for part in problem["loc"]]
            for length in range(len(parts), 0, -1):
                path = ".".join(parts[:length])
                # A section as a whole is at fault when its fields do not fit each other.
                if path in draft.tree and isinstance(draft.tree[path], dict):
                    break
                if _drop(draft, path, why, "not supported"):
                    draft.fill.setdefault(path, why)
                    dropped = True
                    break
        if not dropped:
            texts = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems)
            raise VerlError(f"the recipe that this makes is refused: {texts}; change the settings")


def _forget_absent(draft: _Draft) -> None:
    """An evaluation that there is none of needs nothing filled in."""
    if "eval" not in draft.tree.get("data", {}):
        draft.fill = {
            f: w for f, w in draft.fill.items() if not f.startswith(("eval.", "data.eval"))
        }


def _ordered(tree: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """In the order of the schema; empty sections are left out."""
    result: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if name not in tree or tree[name] == {}:
            continue
        kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
        section = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        is_section = bool(section) and isinstance(tree[name], Mapping)
        result[name] = _ordered(tree[name], section[0]) if is_section else tree[name]
    return result
