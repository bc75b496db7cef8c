"""Write docs/recipe.md, the reference of every field of a recipe, from the schema itself."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from megatron_opo.recipe import Recipe, Section
from megatron_opo.recipe_file import section_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipe.md"
HEAD = """\
<!-- Written by tools/make_recipe_reference.py from megatron_opo/recipe.py: change it there. -->

# Recipe reference

A recipe is a YAML file of sections. Only `name`, `model.path` and `data.train` must be given; the
rest has a default. `megatron-opo train RECIPE --print` shows a recipe with all of them, and
`section.field=value` behind it changes a field: `optimizer.lr=2e-6`, `data.train.limit=100`,
`'profile.steps=[3, 7]'`. A field that does not exist is refused with the nearest one that does.
"""
BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}
NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def reference() -> str:
    """The whole page, in Markdown."""
    definitions = Recipe.model_json_schema()["$defs"]
    parts = [HEAD, _table("At the top", Recipe, Recipe.model_json_schema())]
    for section, paths in _sections().items():
        heading = ", ".join(f"`{path}`" for path in paths)
        parts.append(_table(heading, section, definitions[section.__name__]))
    return "\n".join(parts)


def _sections() -> dict[type[Section], list[str]]:
    """Each section and the dotted paths at which it stands, in the order of the recipe."""
    found: dict[type[Section], list[str]] = {}

    def visit(model: type[Section], prefix: str) -> None:
        for name, field in model.model_fields.items():
            if section := section_of(field.annotation):
                found.setdefault(section, []).append(prefix + name)
                visit(section, f"{prefix}{name}.")

    visit(Recipe, "")
    return found


def _table(heading: str, section: type[Section], schema: dict[str, Any]) -> str:
    lines = [f"## {heading}", ""]
    if section is not Recipe:
        lines += [_sentence(section.__doc__ or ""), ""]
    lines += ["| field | allowed | default | |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        if section is Recipe and section_of(field.annotation):
            continue  # each has a table of its own below
        default = "required" if field.is_required() else _value(field.get_default())
        cells = [f"`{name}`", _allowed(schema["properties"][name]), default]
        cells.append(_sentence(field.description or ""))
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _sentence(text: str) -> str:
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", " ".join(text.split()))


def _value(default: Any) -> str:
    if isinstance(default, Section):
        return "that of its fields"
    return f"`{json.dumps(default)}`"


def _allowed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"])
    if "$ref" in schema:
        return "section"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        if "prefixItems" in schema:
            return "list: " + "; ".join(_allowed(item) for item in schema["prefixItems"])
        return f"list of: {_allowed(schema['items'])}"
    if schema["type"] == "object":
        return "mapping"
    bounds = [f"{sign} {schema[key]}" for key, sign in BOUNDS.items() if key in schema]
    if "pattern" in schema:
        bounds.append(f"`{schema['pattern']}`")
    return " ".join([NAMES[schema["type"]], ", ".join(bounds)]).strip()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(reference())
    print(PAGE)


if __name__ == "__main__":
    main()
