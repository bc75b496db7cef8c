"""The sub-command `megatron-opo doctor`."""

import argparse
import dataclasses
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from megatron_opo.doctor.findings import Finding
from megatron_opo.recipe import Recipe, SyncConfig
from megatron_opo.recipe_file import load_recipe

EXIT_PROBLEMS = 1
IMPORT_SECONDS = 90.0
DESCRIPTION = (
    "Checks this machine and environment, and says what to do about what it finds; with a recipe "
    "also what that needs. Exits with 0 if there are no problems (notes do not count), 1 if there "
    "are, 2 for a mistake in what was asked."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", type=Path, nargs="?", help="YAML file whose needs are checked, too"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="changes to the recipe"
    )
    parser.add_argument(
        "--import-limit",
        type=float,
        default=IMPORT_SECONDS,
        metavar="SECONDS",
        help=f"for the import of each package; default: {IMPORT_SECONDS:.0f}",
    )
    parser.add_argument("--json", action="store_true", help="every finding, for programs")


def run(options: argparse.Namespace) -> int:
    """Print what was found; the exit code."""
    from megatron_opo.doctor.screen import print_findings

    recipe = None
    if options.recipe is not None:
        recipe = load_recipe(options.recipe, options.overrides)
    shows_wait = sys.stderr.isatty() and not options.json
    if shows_wait:
        print("looking, some seconds ...", end="\r", file=sys.stderr, flush=True)
    sections = examine(recipe, options.recipe, options.import_limit)
    if shows_wait:
        print(" " * 30, end="\r", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(as_dict(sections), indent=2))
    else:
        print_findings(sections, sys.stdout)
    statuses = {finding.status for findings in sections.values() for finding in findings}
    return EXIT_PROBLEMS if "problem" in statuses else 0


def examine(
    recipe: Recipe | None, recipe_path: Path | None, import_seconds: float
) -> dict[str, list[Finding]]:
    """All findings, by section."""
    from megatron_opo.doctor import for_recipe, gpus, machine, packages, slurm, storage
    from megatron_opo.doctor.imports import try_imports
    from megatron_opo.environment import facts_without_torch

    run_path = recipe.run_path if recipe else Path("runs")
    bucket = (recipe.sync if recipe else SyncConfig()).bucket_mb
    facts = facts_without_torch()
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        # The rest is looked at while packages are imported in another process.
        importing = pool.submit(try_imports, packages.steps_of(facts), import_seconds, stop)
        try:
            driver = gpus.check_driver()
            of_machine = machine.check_machine(bucket) + machine.check_ports()
            of_storage = storage.check_storage(run_path)
            imports = importing.result()
        finally:
            stop.set()
    facts = packages.with_torch(facts, imports)
    of_slurm, nodes = slurm.check_slurm(imports)
    sections = {
        "Packages": packages.check_packages(facts, imports),
        "GPUs and compilers": [
            *driver,
            *gpus.check_cuda(facts, imports),
            *gpus.check_compilers(facts),
        ],
        "Machine": of_machine,
        "Files and cluster": [*of_storage, storage.check_shared(run_path, nodes), *of_slurm],
    }
    if recipe and recipe_path:
        sections[f"Recipe {recipe_path}"] = for_recipe.check_recipe(recipe, recipe_path, imports)
    return sections


def as_dict(sections: dict[str, list[Finding]]) -> dict[str, object]:
    """{"fit": bool, "problems": int, "notes": int, "findings": [{"section": ..., "name": ...}]}"""
    findings = [
        {"section": section, **dataclasses.asdict(finding)}
        for section, found in sections.items()
        for finding in found
    ]
    problems = sum(finding["status"] == "problem" for finding in findings)
    notes = sum(finding["status"] == "note" for finding in findings)
    return {"fit": not problems, "problems": problems, "notes": notes, "findings": findings}
