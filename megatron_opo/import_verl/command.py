"""The sub-command `megatron-opo import-verl`."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_opo.errors import VerlError
from megatron_opo.import_verl.convert import Conversion, Entry, Setting, convert
from megatron_opo.import_verl.rules import shown
from megatron_opo.import_verl.shell import OVERRIDE, read_script
from megatron_opo.import_verl.values import flatten, parse_value, primitive

DESCRIPTION = (
    "Read a run of verl (a shell script that starts it, its YAML config, or its overrides after "
    "--) and write the recipe that does the same, exactly on-policy. Says of every key what became "
    "of it. Nothing of the script is run."
)
WIDTH = 100
GROUPS = (
    ("unknown", "Unknown to this command, left out"),
    ("not supported", "Not supported"),
    ("changed", "Changed"),
    ("taken over", "Taken over"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="FILE|key=value",
        help="script, YAML, or - for a script on standard input; then overrides of verl's "
        "(-- before those that begin with -)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the recipe; default: shown")
    parser.add_argument("--json", action="store_true", help="recipe and keys, for programs")


def run(options: argparse.Namespace) -> int:
    """Write the recipe and say what became of each key; the exit code."""
    words = list(options.overrides)
    is_key = not words or (words[0] != "-" and words[0].startswith(("-", "+", "~")))
    source = "" if is_key or OVERRIDE.match(words[0]) else words.pop(0)
    settings, notes = read_source(source) if source else ([], [])
    settings += settings_of_words(words)
    if not settings:
        raise VerlError(
            f"{source or 'import-verl'}: no command of verl's trainer (a word such as "
            "verl.trainer.main_ppo) and no override (key=value) found; give a script, a YAML file, "
            "or the overrides after --"
        )
    conversion = convert(settings, notes, os.environ.get("HOME", "~"))
    recipe = recipe_text(conversion)
    if options.out is not None:
        _write(options.out, recipe)
    if options.json:
        print(json.dumps(_as_json(conversion), indent=2, default=str))
    elif options.out is not None:
        print("\n".join(report(conversion)))
        print(f"wrote {options.out}; see it whole: megatron-opo train {options.out} --print")
    else:
        print(recipe, end="")
    return 0


def read_source(source: str) -> tuple[list[Setting], list[str]]:
    """The settings of a script or YAML file, and what reading it showed.

    Raises:
        VerlError: it cannot be read.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise VerlError(
            f"{source}: cannot be read: {error}; give a shell script or a YAML file of verl's"
        ) from None
    if source.endswith((".yaml", ".yml")):
        return settings_of_yaml(text, source), []
    command = read_script(text, os.environ)
    return settings_of_words(command.words), list(command.notes)


def settings_of_yaml(text: str, source: str) -> list[Setting]:
    """Raises VerlError: not YAML, or no mapping."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise VerlError(f"{source}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise VerlError(f"{source}: must be a mapping of sections, got {type(tree).__name__}")
    found = [Setting(key, _yaml_value(value)) for key, value in flatten(tree)]
    return [each for each in found if each.key != "defaults"]


def _yaml_value(value: Any) -> Any:
    # PyYAML reads 1e-6 as text; verl does not.
    if isinstance(value, list):
        return [_yaml_value(each) for each in value]
    if isinstance(value, str) and value.lower() not in ("true", "false", "null"):
        number = primitive(value)
        return value if isinstance(number, str) else number
    return value


def settings_of_words(words: Sequence[str]) -> list[Setting]:
    """The settings of the words of a command line: overrides, and options of Hydra's."""
    settings: list[Setting] = []
    rest = iter(words)
    for word in rest:
        if word.startswith("-"):
            key, equals, value = word.partition("=")
            if word.strip("-"):
                settings.append(Setting(key, value if equals else next(rest, "")))
        elif word.startswith("~"):
            settings.append(Setting(word.partition("=")[0], None))
        elif OVERRIDE.match(word):
            key, _, value = word.lstrip("+").partition("=")
            settings.append(Setting(key, parse_value(value)))
        else:
            settings.append(Setting("-word", word))
    return settings


def recipe_text(conversion: Conversion) -> str:
    """The recipe as YAML; what became of the keys stands below it, in comments."""
    body = yaml.safe_dump(conversion.recipe, sort_keys=False, width=WIDTH, allow_unicode=False)
    lines = [f"# {line}".rstrip() for line in report(conversion)]
    return f"{body}\n" + "\n".join(lines) + "\n"


def report(conversion: Conversion) -> Iterator[str]:
    """The lines of the table of all keys, and before it what is left for the user."""
    if conversion.fill:
        yield "Fill in or check before the first run:"
        for field, what in conversion.fill.items():
            yield from _wrapped(f"{field}: {what}" if field else what, "  ")
        yield ""
    for note in conversion.notes:
        yield from _wrapped(f"Note: {note}", "")
    if conversion.notes:
        yield ""
    for status, title in GROUPS:
        for by_default in (False, True):
            entries = [
                e for e in conversion.entries if e.status == status and e.by_default == by_default
            ]
            if entries:
                origin = ", of verl's defaults" if by_default else ""
                yield f"{title}{origin} ({len(entries)}):"
                for entry in entries:
                    yield from _entry_lines(entry)
                yield ""


def _entry_lines(entry: Entry) -> Iterator[str]:
    yield from _wrapped(f"{entry.key}={_short(entry.value)}", "  ")
    fields = ", ".join(f"{name}: {_short(value)}" for name, value in entry.fields.items())
    parts = [f"-> {fields}" if fields else "", entry.why]
    yield from _wrapped("; ".join(filter(None, parts)), "    ")


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _wrapped(text: str, indent: str) -> list[str]:
    # What a script holds may be anything; a comment of a YAML file may not.
    plain = "".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in text)
    return textwrap.wrap(
        plain,
        WIDTH - 2,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _as_json(conversion: Conversion) -> dict[str, Any]:
    keys = [
        {
            "key": entry.key,
            "value": entry.value,
            "status": entry.status,
            "fields": dict(entry.fields),
            "why": entry.why,
            "by_default": entry.by_default,
        }
        for entry in conversion.entries
    ]
    return {
        "recipe": conversion.recipe,
        "keys": keys,
        "fill": conversion.fill,
        "notes": list(conversion.notes),
    }


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise VerlError(
            f"--out: {path} is there already; name another file, or remove it"
        ) from None
    except OSError as error:
        raise VerlError(f"--out: {path} cannot be written: {error.strerror}") from None
