"""The sub-command `megatron-opo data`."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_opo.errors import RecipeError
from megatron_opo.recipe import DataConfig, DatasetConfig
from megatron_opo.recipe_file import load_recipe

if TYPE_CHECKING:
    from megatron_opo.data.survey import Survey

EXIT_UNUSABLE = 1
RECIPES = (".yaml", ".yml")
SHOWN_ERRORS = 5
SHOWN_CHARACTERS = 400
DESCRIPTION = (
    "Shows and checks datasets: counts, lengths under the tokenizer, repeated and contradicting "
    "rows, missing answers, what train and eval have in common, examples. Exits with 0 if every "
    "row can be used, 1 if some cannot, 2 for a mistake in what was asked."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="FILE|RECIPE", help="parquet, jsonl, or a recipe's YAML"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="FILE|section.field=value",
        help="more files; or changes to the recipe",
    )
    parser.add_argument(
        "--split", choices=("train", "eval"), help="of a recipe; default: both of them"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="for files: count the tokens of this model's tokenizer"
    )
    parser.add_argument("--prompt-key", default=_default("prompt_key"), help="column, for files")
    parser.add_argument("--answer-key", default=_default("answer_key"), help="column, for files")
    parser.add_argument("--examples", type=int, default=2, metavar="N", help="rows to show")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the usable rows as .jsonl or .parquet"
    )
    parser.add_argument("--json", action="store_true", help="every number, for programs")


def _default(field: str) -> str:
    return DatasetConfig.model_fields[field].default


def run(options: argparse.Namespace) -> int:
    """Show what is in the data; the exit code."""
    from megatron_opo.observe.console import waiting

    with waiting("read data") as console:
        from megatron_opo.data.convert import write_rows
        from megatron_opo.data.survey import survey, usable_rows

        datasets, data, tokenizer = _asked_for(options)
        if options.out and len(datasets) > 1:
            raise RecipeError(
                "--out: this recipe has two datasets; add --split train or --split eval"
            )

        def on_rows(count: int) -> None:
            console.advance(count, None, f"{count:,} rows")

        surveys = [
            survey(dataset, data, tokenizer, split, max(0, options.examples), on_rows)
            for split, dataset in datasets.items()
        ]
    if options.json:
        print(json.dumps(as_dict(surveys, data), indent=2))
    else:
        show(surveys, data, sys.stdout)
    if options.out:
        split, dataset = next(iter(datasets.items()))
        count = write_rows(usable_rows(dataset, split, []), options.out)
        print(f"wrote {_rows(count)} to {options.out}", file=sys.stderr)
    return EXIT_UNUSABLE if any(s.unusable or not s.usable for s in surveys) else 0


def _asked_for(options: argparse.Namespace) -> tuple[dict[str, DatasetConfig], DataConfig, Any]:
    """The datasets, how their prompts are made, and the tokenizer, if there is one.

    Raises:
        RecipeError: files and a recipe together, or options that do not go with them.
    """
    if options.source.suffix in RECIPES:
        if options.model:
            raise RecipeError("--model: a recipe names its own: model.path=DIR")
        recipe = load_recipe(options.source, options.overrides)
        datasets = {"train": recipe.data.train}
        if recipe.data.eval is not None:
            datasets["eval"] = recipe.data.eval
        if options.split:
            if options.split not in datasets:
                raise RecipeError(f"--split: recipe {options.source} has no data.{options.split}")
            datasets = {options.split: datasets[options.split]}
        model = recipe.model.path
        return datasets, recipe.data, _tokenizer(model) if Path(model).is_dir() else None
    if options.split:
        raise RecipeError("--split: is for recipes; give the files that you mean")
    dataset = DatasetConfig(
        files=(str(options.source), *options.overrides),
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
    )
    tokenizer = _tokenizer(options.model) if options.model else None
    templated = tokenizer is not None and tokenizer.chat_template is not None
    return {"train": dataset}, DataConfig(train=dataset, apply_chat_template=templated), tokenizer


def _tokenizer(directory: str) -> Any:
    from megatron_opo.prompts import load_tokenizer

    return load_tokenizer(directory)


def as_dict(surveys: "list[Survey]", data: DataConfig) -> dict[str, Any]:
    """{"datasets": [{"split": ..., "rows": ..., ...}], "overlap": number of questions or null}"""
    from megatron_opo.data.survey import PERCENTILES

    return {
        "datasets": [
            {
                "split": s.split,
                "rows": s.rows,
                "usable": s.usable,
                "unusable": list(s.unusable),
                "empty_answers": s.unanswered,
                "sources": s.sources,
                "unit": s.unit,
                "lengths": {f"p{p}": s.percentile(p) for p in PERCENTILES} if s.usable else {},
                "max_prompt_tokens": data.max_prompt_tokens,
                "overlong": s.longer_than(data.max_prompt_tokens) if s.unit == "tokens" else None,
                "repeated": s.repeated,
                "contradicting": s.contradicting,
                "examples": [vars(example) for example in s.examples],
            }
            for s in surveys
        ],
        "overlap": overlap(surveys),
    }


def overlap(surveys: "list[Survey]") -> int | None:
    """Questions that train and eval both ask; None if only one of them is there."""
    if len(surveys) < 2:
        return None
    return len(surveys[0].questions & surveys[1].questions)


def show(surveys: "list[Survey]", data: DataConfig, file: TextIO) -> None:
    for each in surveys:
        _show_one(each, data, file)
    common = overlap(surveys)
    if common:
        does = "left out of training" if data.hold_out_eval else "trained on (data.hold_out_eval)"
        print(f"train and eval   questions that stand in both: {common:,}, {does}", file=file)
    elif common == 0:
        print("train and eval   have no question in common", file=file)


def _show_one(each: "Survey", data: DataConfig, file: TextIO) -> None:
    def line(name: str, text: str) -> None:
        print(f"  {name:14} {text}", file=file)

    print(f"{each.split}: {_rows(each.rows)}, {each.usable:,} can be used", file=file)
    for error in each.unusable[:SHOWN_ERRORS]:
        line("UNUSABLE", error)
    if len(each.unusable) > SHOWN_ERRORS:
        line("", f"... and {len(each.unusable) - SHOWN_ERRORS:,} more")
    if each.sources:
        line("sources", ", ".join(f"{name} ({n:,})" for name, n in each.sources.items()))
    if each.usable:
        line("length", _lengths(each, data))
    if each.unanswered:
        line("EMPTY ANSWERS", f"{each.unanswered:,}: what would a reward compare with?")
    if each.repeated:
        conflict = f"; with another answer: {each.contradicting:,}"
        text = f"{_rows(each.repeated)} with the question of an earlier one"
        line("repeated", text + (conflict if each.contradicting else ""))
    for example in each.examples:
        line("example", example.where)
        line("  prompt", _short(example.prompt))
        line("  answer", _short(example.answer))
    print(file=file)


def _rows(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"


def _lengths(each: "Survey", data: DataConfig) -> str:
    p = each.percentile
    text = (
        f"{p(0):,} to {p(100):,} {each.unit}, median {p(50):,}, 90 % up to {p(90):,}, 99 % up to "
    )
    text += f"{p(99):,}"
    if each.unit != "tokens":
        return f"{text} (there is no tokenizer to count tokens)"
    over = each.longer_than(data.max_prompt_tokens)
    if not over:
        return text
    outcome = "filtered" if data.overlong_prompts == "filter" else "refused"
    return f"{text}; {over:,} exceed data.max_prompt_tokens ({data.max_prompt_tokens:,}): {outcome}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
