"""What a rule is, and the common kinds of them. The rules themselves are in `table`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["taken over", "changed", "not supported", "unknown"]


@dataclass(frozen=True)
class Script:
    """All settings of a verl run by their dotted keys: those given, and verl's defaults for those
    that are not. `home` is what ~ stands for."""

    settings: Mapping[str, Any]
    home: str = "~"

    def get(self, key: str) -> Any:
        return self.settings.get(key)

    def whole(self, key: str, default: int) -> int:
        """A positive integer, or the default where there is none."""
        try:
            value = whole(self.settings.get(key))
        except ValueError:
            return default
        return value if value > 0 else default


@dataclass(frozen=True)
class Outcome:
    """What became of one key: `fields` of our recipe, why, and what the user must `fill` in."""

    status: Status
    why: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    fill: Mapping[str, str] = field(default_factory=dict)


Apply = Callable[[Any, Script, str], Outcome]


@dataclass(frozen=True)
class Rule:
    """`key` may end in `.*`: all keys below it. `becomes` and `note` are for the documentation."""

    key: str
    becomes: str
    note: str
    apply: Apply


def whole(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise ValueError("must be a whole number")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def text(value: Any) -> str:
    if value is None or isinstance(value, list | dict):
        raise ValueError("must be text")
    return str(value)


def shown(value: Any) -> str:
    """As verl's users write it."""
    return "null" if value is None else str(value)


def takes(key: str, to: str, cast: Callable[[Any], Any], note: str = "") -> Rule:
    """The same thing under another name; null leaves the default."""

    def apply(value: Any, script: Script, key: str) -> Outcome:
        if value is None:
            return Outcome("taken over", "null: the default is left")
        return Outcome("taken over", note, {to: cast(value)})

    return Rule(key, f"`{to}`", note, apply)


def always(key: str, value: Any, meaning: str, otherwise: str) -> Rule:
    """A key that has one possible value here, which needs no field."""

    def apply(given: Any, script: Script, key: str) -> Outcome:
        if given == value or given is None:
            return Outcome("taken over", meaning)
        return Outcome("changed", otherwise)

    return Rule(key, "", f"{shown(value)}: {meaning}; else: {otherwise}", apply)


def lacks(key: str, off: tuple[Any, ...], instead: str) -> Rule:
    """Something that is not there; `off` are the values that do not ask for it."""

    def apply(value: Any, script: Script, key: str) -> Outcome:
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in off):
            return Outcome("taken over", "off, and there is none here")
        return Outcome("not supported", instead)

    return Rule(key, "", f"not supported: {instead}", apply)


def moot(key: str, why: str) -> Rule:
    """Nothing is lost without it."""
    return Rule(key, "", why, lambda value, script, key: Outcome("changed", why))


def look(key: str, becomes: str, note: str, apply: Apply) -> Rule:
    """One that looks at more than its own value."""
    return Rule(key, becomes, note, apply)


def below(prefix: str, rules: list[Rule]) -> list[Rule]:
    return [Rule(f"{prefix}.{rule.key}", rule.becomes, rule.note, rule.apply) for rule in rules]
