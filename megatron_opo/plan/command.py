"""The sub-command `megatron-opo plan`."""

import argparse
import json
from pathlib import Path

from megatron_opo.errors import RecipeError
from megatron_opo.plan.hardware import GPUS, NETWORKS, find_gpu, find_network
from megatron_opo.recipe_file import load_recipe

EXIT_DOES_NOT_FIT = 1
DESCRIPTION = (
    "Memory of each GPU in both phases of a step, estimated seconds, and what to change where a "
    "recipe does not fit. Needs no GPU, and of the model only its config.json. Exits with 0 if the "
    "recipe fits, 1 if it does not, 2 for a mistake in what was asked."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="YAML file, e.g. recipes/opo_70b.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="changes to the recipe"
    )
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"{', '.join(GPUS)}")
    parser.add_argument(
        "--gpu-memory-gb", type=float, metavar="GIB", help="another memory size than that GPU's"
    )
    parser.add_argument(
        "--network",
        default="ib-ndr",
        metavar="NAME",
        help=f"between nodes: {', '.join(NETWORKS)}, or Gbit/s per GPU",
    )
    parser.add_argument("--nodes", type=int, help="default: the fewest that hold the recipe")
    parser.add_argument("--gpus-per-node", type=int, help="default: 8")
    parser.add_argument("--gpus", type=int, metavar="N", help="instead of --nodes")
    parser.add_argument(
        "--mean-response-tokens",
        type=int,
        metavar="N",
        help="for the seconds; default: half of rollout.max_response_tokens",
    )
    parser.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="the model's config.json; default: in model.path, else models/NAME.json beside the "
        "recipe",
    )
    parser.add_argument("--json", action="store_true", help="every number, for programs")


def run(options: argparse.Namespace) -> int:
    """Print the plan; the exit code."""
    from megatron_opo.plan.planner import cluster_of, find_config, make_plan
    from megatron_opo.plan.report import plan_as_dict, print_plan
    from megatron_opo.plan.search import suggest

    mean = options.mean_response_tokens
    if mean is not None and mean < 1:
        raise RecipeError(f"--mean-response-tokens: {mean}; it must be 1 or more")
    recipe = load_recipe(options.recipe, options.overrides)
    config_path, config = find_config(recipe, options.recipe, options.model_config)
    cluster = cluster_of(
        recipe,
        find_gpu(options.gpu, options.gpu_memory_gb),
        find_network(options.network),
        gpus=options.gpus,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
    )
    plan = make_plan(recipe, config, config_path, cluster, mean)
    suggestions = [] if plan.fits else suggest(plan, config, config_path)
    if options.json:
        print(json.dumps(plan_as_dict(plan, suggestions), indent=2))
    else:
        print_plan(plan, suggestions)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT
