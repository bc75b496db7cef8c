"""The sub-command `megatron-opo train`."""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_opo import BEGAN_VARIABLE
from megatron_opo.errors import LogError, OpoError, RecipeError
from megatron_opo.failure import describe
from megatron_opo.model_fit import check_model
from megatron_opo.output import only_for_json
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import dump_recipe, load_recipe
from megatron_opo.runs import (
    ATTEMPT_VARIABLE,
    is_restart,
    latest_checkpoint,
    only_run,
    recipe_facts,
)

if TYPE_CHECKING:
    from megatron_opo.actor.parallel import Parallel
    from megatron_opo.observe.console import Console
    from megatron_opo.rollout import Server

DESCRIPTION = "Run a recipe."
# What gloo says when a process at the other end is gone.
LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="YAML file, e.g. recipes/quickstart_cpu.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="changes to the recipe"
    )
    parser.add_argument(
        "--print", action="store_true", dest="print_only", help="show the resolved recipe and stop"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start anew; an earlier run of this name is moved aside, not deleted",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--replay",
        nargs="+",
        default=[],
        metavar="FILE",
        help="take the updates of these kept batches (RUN/batches/) and show their metrics: no "
        "servers, and nothing is written",
    )
    modes.add_argument(
        "--rollout-only",
        action="store_true",
        help="sample and score train.steps batches with the start weights: no training",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--quiet", action="store_true", help="say only warnings, errors and the last line"
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a line for each event, for programs (docs/terminal.md)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the recipe; the exit code. `options.place` and `options.console` are for whoever shows
    how it failed."""
    # Overrides may stand after the files.
    files = [Path(word) for word in options.replay if "=" not in word or Path(word).exists()]
    overrides = options.overrides + [w for w in options.replay if Path(w) not in files]
    options.place.recipe = options.recipe
    speaks = os.environ.get("RANK", "0") == "0" and not files and not options.print_only
    if speaks and options.json:
        options.console = _console(0, options)  # a mistake in the recipe is an event, too
    recipe = load_recipe(options.recipe, overrides)
    if options.print_only:
        print(dump_recipe(recipe), end="")
        return 0
    if files and options.fresh:
        raise RecipeError("--fresh would move the run aside that --replay looks at; drop one")
    if files and (options.json or options.quiet):
        raise RecipeError("--replay shows metrics as text alone; drop --json or --quiet")
    if speaks:
        options.console = options.console or _console(recipe.train.steps, options)
    if "RANK" in os.environ and not options.rollout_only:
        return _train_rank(recipe, files, options, fresh=options.fresh)
    return _train_here(recipe, files, overrides, options)


def _train_here(
    recipe: Recipe, files: list[Path], overrides: list[str], options: argparse.Namespace
) -> int:
    from megatron_opo.environment import check_environment
    from megatron_opo.launch import all_seats, run_ranks

    console: Console | None = options.console
    check_model(recipe)
    if not (files or options.fresh or options.rollout_only) and _is_finished(recipe, console):
        return 0
    if console:
        console.note(_beginning(recipe, trains=not options.rollout_only))
        console.start_phase("imports")
    check_environment()
    if options.rollout_only:
        return _rollout_only(recipe, options)
    if options.fresh:
        _move_aside(recipe.run_path, console)
    world_size = _world_size(recipe)
    if world_size == 1:
        return _train_rank(recipe, files, options)
    if console:
        console.close()  # rank 0 speaks
    command = [sys.executable, "-m", "megatron_opo", "train", str(options.recipe), *overrides]
    if not files:
        command += [*(["--json"] if options.json else []), *(["--quiet"] if options.quiet else [])]
        return run_ranks(command, all_seats(world_size), recipe.run_path / "logs")
    command += ["--replay", *map(str, files)]
    logs = Path(tempfile.mkdtemp(prefix="megatron_opo_replay_"))
    code = run_ranks(command, all_seats(world_size), logs)
    if code == 0:
        shutil.rmtree(logs)
    return code


def _console(total_steps: int, options: argparse.Namespace) -> "Console":
    from megatron_opo.observe.console import Console

    mode = "json" if options.json else "quiet" if options.quiet else "lines"
    return Console(total_steps, mode=mode)


def _beginning(recipe: Recipe, trains: bool) -> str:
    """Said at once: what follows takes seconds."""
    rollout = recipe.rollout
    count = len(rollout.urls) or rollout.servers
    servers = "1 server" if count == 1 else f"{count} servers"
    verb = "looking for" if rollout.urls else "starting"
    return f"{recipe.name}: {verb} {servers}" + (", loading the trainer" if trains else "")


def _world_size(recipe: Recipe) -> int:
    """What the recipe asks for; else as many as this machine's GPUs hold, the fewest on a CPU."""
    import torch

    if recipe.actor.data_parallel:
        return recipe.actor.replica_size * recipe.actor.data_parallel
    fewest = recipe.actor.smallest_world
    return fewest * max(1, torch.cuda.device_count() // fewest)


def _rollout_only(recipe: Recipe, options: argparse.Namespace) -> int:
    from megatron_opo.launch import stopped_code
    from megatron_opo.rollout_only import rollout_only, rollout_recipe

    recipe, console = rollout_recipe(recipe), options.console
    if options.fresh:
        _move_aside(recipe.run_path, console)
    _is_finished(recipe, console)
    _keep_stdout(console, options)
    return stopped_code(rollout_only(recipe, console, on_begin=lambda: _has_begun(recipe, options)))


def _train_rank(
    recipe: Recipe, files: list[Path], options: argparse.Namespace, fresh: bool = False
) -> int:
    with ExitStack() as held:
        begun = None
        if options.console:
            if options.console.ticker.phase is None:
                options.console.start_phase("imports")
            _keep_stdout(options.console, options)
            begun = _begin(recipe, fresh, held, options)
        elif not files:
            _has_begun(recipe, options)
        return _run_rank(recipe, files, begun, options)  # pyright: ignore[reportArgumentType]


def _keep_stdout(console: "Console", options: argparse.Namespace) -> None:
    if console.is_json:
        console.stream = options.held.enter_context(only_for_json())


def _has_begun(recipe: Recipe, options: argparse.Namespace) -> None:
    """What goes wrong from here on is described in the run's logs."""
    options.place.logs = recipe.run_path / "logs" / os.environ.get(ATTEMPT_VARIABLE, "")


def _begin(
    recipe: Recipe, fresh: bool, held: ExitStack, options: argparse.Namespace
) -> "Future[list[Server] | None]":
    """On rank 0, before the imports that take seconds: have its servers started; None when the run
    is finished already. An error is for all ranks to hear, so it waits."""
    import torch

    from megatron_opo.early import started_servers

    begun: Future[list[Server] | None] = Future()
    try:
        if fresh:
            _move_aside(recipe.run_path, options.console)
        servers = None
        if not _is_finished(recipe, options.console):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            servers = held.enter_context(started_servers(recipe, device))
            _has_begun(recipe, options)
        begun.set_result(servers)
    except OpoError as error:
        begun.set_exception(error)
    return begun


def _run_rank(
    recipe: Recipe,
    files: list[Path],
    begun: "Future[list[Server] | None]",
    options: argparse.Namespace,
) -> int:
    """`begun` and `options.console` are rank 0's; None elsewhere, as in `train`."""
    rank = int(os.environ.get("RANK", "0"))
    # Megatron's own warnings, about what a user can do nothing about.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\b")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    from megatron_opo.actor.parallel import initialize, shutdown
    from megatron_opo.launch import EXIT_CONSEQUENCE, stopped_code
    from megatron_opo.preflight import code_hash
    from megatron_opo.spmd import DriverFailed
    from megatron_opo.train import train
    from megatron_opo.train_only import replay

    facts = {"the code of megatron_opo (hash)": code_hash(Path(__file__).parent)}
    try:
        parallel = initialize(recipe.actor, seed=recipe.seed, facts=facts | recipe_facts(recipe))
        signum = 0
        if files:
            replay(recipe, files, parallel)
        elif not _is_done(begun, parallel):
            signum = train(recipe, parallel, (begun and begun.result()) or [], options.console)
    except DriverFailed:
        return EXIT_CONSEQUENCE
    except OpoError as error:
        if rank == 0:
            raise
        print(describe(error, options.place)[0], file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:
        if not LOST_PEER.search(str(error)):
            raise
        if _follows_interrupt(error):
            raise KeyboardInterrupt from None
        # Where a launcher of ours looks on, it names who failed first.
        if rank != 0 or BEGAN_VARIABLE not in os.environ:
            text = f"rank {rank} lost its connection to another rank, which has ended"
            print(text, file=sys.stderr)
        return EXIT_CONSEQUENCE
    shutdown()
    return stopped_code(signum)


def _is_done(begun: "Future[list[Server] | None]", parallel: "Parallel") -> bool:
    from megatron_opo.spmd import Driver

    driver = Driver(parallel.rank, parallel.control)
    return driver.agree(bool(driver.run(lambda: begun.result() is None)))


def _follows_interrupt(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _move_aside(run_path: Path, console: "Console | None") -> None:
    if run_path.exists():
        aside = run_path.with_name(f"{run_path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            with only_run(run_path):
                run_path.rename(aside)
        except OSError as error:
            raise LogError(f"{run_path}: cannot be moved to {aside}: {error.strerror}") from None
        if console:
            console.note(f"moved the earlier run to {aside}")


def _has_trained(run_path: Path) -> bool:
    from megatron_opo.observe.files import read_metrics

    return any(record["kind"] == "train" for record in read_metrics(run_path))


def _is_finished(recipe: Recipe, console: "Console | None") -> bool:
    """Say so if there is nothing to do.

    Raises:
        RecipeError: run_dir cannot be a directory, or holds metrics that no checkpoint could
            continue.
    """
    run_path = recipe.run_path
    there = next(path for path in (run_path, *run_path.absolute().parents) if path.exists())
    if not there.is_dir():
        raise RecipeError(
            f"run_dir: {run_path} cannot be a directory: {there} is a file; choose another run_dir="
        )
    checkpoint = latest_checkpoint(run_path)
    if checkpoint is None:
        # A job that was lost before its first checkpoint begins again; nobody else may.
        if _has_trained(run_path) and not is_restart(run_path):
            raise RecipeError(
                f"run_dir: {run_path} holds an earlier run that left no checkpoint to resume from; "
                "add --fresh to move it aside and start anew (in a job, which takes no --fresh: mv "
                "it), or choose another name= or run_dir="
            )
        return False
    if checkpoint.version < recipe.train.steps or checkpoint.owes_eval:
        return False
    # A run that was killed after its last checkpoint still owes the exported model.
    exported = run_path / "hf" / f"step_{checkpoint.version}"
    if recipe.checkpoint.export_hf and not exported.exists():
        return False
    if console:
        console.last(
            f"{run_path} already has all of its {recipe.train.steps} steps: raise train.steps to "
            "go on, or add --fresh to move it aside and start anew (in a job, which takes no "
            "--fresh: mv it)",
            run=str(run_path),
            step=checkpoint.version,
        )
    return True
