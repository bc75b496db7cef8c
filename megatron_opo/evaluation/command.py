"""The sub-command `megatron-opo eval`."""

import argparse
import json
import sys
from pathlib import Path

from megatron_opo.errors import RecipeError
from megatron_opo.recipe_file import load_recipe
from megatron_opo.stop import StopRequest

DESCRIPTION = (
    "Sample responses of a checkpoint to every prompt of data.eval and score them: avg@k, pass@j, "
    "maj@k, response length and truncation, each with its uncertainty. Or compare two such "
    "evaluations prompt by prompt. Nothing is trained."
)
USAGE = """megatron-opo eval RECIPE [section.field=value ...] [--checkpoint DIR_OR_RUN[:STEP]]
                         [--samples K] [--out DIR] [--json | --quiet]
       megatron-opo eval --compare A B [--json]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.add_argument("recipe", nargs="?", type=Path, help="YAML file; not with --compare")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="changes to the recipe"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR_OR_RUN[:STEP]",
        help="a Hugging Face or Megatron directory, or a run, of which its newest step is taken; "
        "default: what the recipe starts from",
    )
    parser.add_argument(
        "--samples", type=int, metavar="K", help="of each prompt; default: eval.samples_per_prompt"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for the samples and the summary; default: eval/NAME_OF_CHECKPOINT in the run",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="two directories written before (--out): is B better?",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="every number, for programs")
    output.add_argument(
        "--quiet", action="store_true", help="say only warnings, errors and the result in a line"
    )


def run(options: argparse.Namespace) -> int:
    """Evaluate or compare; the exit code."""
    return _compare(options) if options.compare else _evaluate(options)


def _compare(options: argparse.Namespace) -> int:
    from megatron_opo.evaluation.compare import compare, comparison_rows, read_evaluation
    from megatron_opo.observe.console import summary

    given = (options.recipe, options.overrides, options.checkpoint, options.samples, options.out)
    if any(given) or options.quiet:
        raise RecipeError(
            "--compare reads two evaluations that are there already; drop what else is given "
            "(only --json goes with it)"
        )
    found = compare(*map(read_evaluation, options.compare))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        summary(comparison_rows(found))
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    # argparse takes an optional RECIPE for absent when an option stands before it.
    words = [*filter(None, [options.recipe]), *options.overrides]
    if not words:
        raise RecipeError("eval: no recipe is given; write megatron-opo eval RECIPE")
    if options.samples is not None and options.samples < 1:
        raise RecipeError(f"--samples: {options.samples}; it must be 1 or more")
    recipe = load_recipe(words[0], words[1:])
    from megatron_opo.observe.console import Console, summary

    # Closed by the command, however this ends.
    options.console = console = Console(
        0, quiet=options.quiet, stream=sys.stderr if options.json else sys.stdout
    )
    options.place.recipe = words[0]
    console.start_phase("imports")
    from megatron_opo.environment import check_environment
    from megatron_opo.evaluation.run import evaluate
    from megatron_opo.evaluation.source import find_source
    from megatron_opo.evaluation.summary import SUMMARY, short_result, summary_rows

    check_environment()
    source = find_source(options.checkpoint, recipe)
    samples = options.samples or recipe.eval.samples_per_prompt
    out = options.out or source.default_out(recipe)
    if not (out / SUMMARY).exists():
        options.place.logs = out / "logs"
    with StopRequest():  # SIGTERM, too, ends the servers and removes what was converted
        found = evaluate(recipe, source, samples, out, console)
    console.close()
    if options.json:
        print(json.dumps(found, indent=2))
    elif options.quiet:
        print(f"{short_result(found)}: {out / SUMMARY}")
    else:
        summary(summary_rows(found))
        print(f"  {out / 'summary.json'} and samples.jsonl have everything")
    return 0
