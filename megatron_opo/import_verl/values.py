"""Values as Hydra writes them: `[a,'b']`, `{k: 1}`, `null`, `1e-6`, `${data.max_prompt_length}`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 20
INTEGER = re.compile(r"[+-]?\d(?:_?\d)*", re.ASCII)
FLOAT = re.compile(
    r"[+-]?(?:\d(?:_?\d)*\.\d*|\.\d+|\d(?:_?\d)*)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)", re.ASCII
)
WORDS = {"true": True, "false": False, "null": None}
ESCAPED = re.compile(r"\\([\\'\", \t:=()\[\]{}])")
INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
LONGEST_NUMBER = 400
# Together they bound the work that a few keys which refer to each other can ask for.
DEEPEST_REFERENCE = 5
MOST_REFERENCES = 8


def parse_value(text: str) -> Any:
    """A value of a command-line override; text that follows no rule of Hydra's is text."""
    text = text.strip(" \t")
    try:
        value, end = _value(text, 0, 0, stops="")
        if end == len(text):
            return value
    except ValueError:
        pass
    return text


def _value(text: str, at: int, depth: int, stops: str) -> tuple[Any, int]:
    """One value from `at`, up to one of `stops`; and where it ended."""
    if depth > DEEPEST:
        raise ValueError("nested too deep")
    at = _skip(text, at)
    if text.startswith(("'", '"'), at):
        return _quoted(text, at)
    if text.startswith("[", at):
        return _sequence(text, at + 1, depth)
    if text.startswith("{", at):
        return _mapping(text, at + 1, depth)
    end, inside = at, 0
    while end < len(text) and (inside or text[end] not in stops):
        inside += text.startswith("${", end)
        inside -= bool(inside) and text[end] == "}"
        end += 2 if text[end] == "\\" else 1
    end = min(end, len(text))
    return primitive(text[at:end].strip(" \t")), end


def primitive(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if len(text) <= LONGEST_NUMBER:
        if INTEGER.fullmatch(text):
            return int(text)
        if FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    return ESCAPED.sub(r"\1", text)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n":
        at += 1
    return at


def _quoted(text: str, at: int) -> tuple[str, int]:
    quote, result = text[at], ""
    at += 1
    while at < len(text) and text[at] != quote:
        if text[at] == "\\" and text[at + 1 : at + 2] in (quote, "\\"):
            at += 1
        result += text[at]
        at += 1
    if at >= len(text):
        raise ValueError("a quote is not closed")
    return result, _skip(text, at + 1)


def _sequence(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _skip(text, at)
    while not text.startswith("]", at):
        item, at = _value(text, at, depth + 1, stops=",]")
        items.append(item)
        at = _next(text, at, "]")
    return items, _skip(text, at + 1)


def _mapping(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    at = _skip(text, at)
    while not text.startswith("}", at):
        key, at = _value(text, at, depth + 1, stops=":,}")
        if not text.startswith(":", at):
            raise ValueError("a key without a value")
        items[str(key)], at = _value(text, at + 1, depth + 1, stops=",}")
        at = _next(text, at, "}")
    return items, _skip(text, at + 1)


def _next(text: str, at: int, closing: str) -> int:
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if text.startswith(closing, at):
        return at
    raise ValueError(f"no , and no {closing}")


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a nested config; an empty mapping is a value."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path.count(".") < DEEPEST:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def resolve(value: Any, key: str, settings: Mapping[str, Any], depth: int = 0) -> Any:
    """`value` with ${other.key} and ${oc.select:other.key,default} replaced from `settings`; what
    cannot be resolved keeps its `$`."""
    if isinstance(value, list):
        return [resolve(item, key, settings, depth) for item in value]
    if not isinstance(value, str) or "${" not in value or depth > DEEPEST_REFERENCE:
        return value
    if value.count("${") > MOST_REFERENCES:
        return value
    whole = INTERPOLATION.fullmatch(value)
    if whole:
        return _look_up(whole[1], key, settings, depth)

    def text_of(found: re.Match[str]) -> str:
        inner = _look_up(found[1], key, settings, depth)
        return found[0] if inner is None else str(inner)

    return INTERPOLATION.sub(text_of, value)


def _look_up(inner: str, key: str, settings: Mapping[str, Any], depth: int) -> Any:
    name, _, default = inner.removeprefix("oc.select:").partition(",")
    name = name.strip()
    if name.startswith("."):
        name = f"{key.rpartition('.')[0]}{name}"
    if name in settings:
        return resolve(settings[name], name, settings, depth + 1)
    if inner.startswith("oc.select:"):
        return parse_value(default) if default else None
    return f"${{{inner}}}"
