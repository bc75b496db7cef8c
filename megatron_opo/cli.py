"""The command `megatron-opo`."""

import argparse
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_opo import __version__
from megatron_opo import compare as compare_command
from megatron_opo.completion import SHELLS, completion_script
from megatron_opo.data import command as data_command
from megatron_opo.doctor import command as doctor_command
from megatron_opo.errors import LogError, OpoError, RecipeError
from megatron_opo.evaluation import command as eval_command
from megatron_opo.import_verl import command as verl_command
from megatron_opo.model_fit import check_model
from megatron_opo.observe import report_command, watch_command
from megatron_opo.plan import command as plan_command
from megatron_opo.recipe import Recipe
from megatron_opo.recipe_file import dump_recipe, load_recipe
from megatron_opo.runs import is_restart, latest_checkpoint, only_run, recipe_facts
from megatron_opo.stop import Terminated

if TYPE_CHECKING:
    from megatron_opo.actor.parallel import Parallel
    from megatron_opo.rollout import Server

# What gloo says when a process at the other end is gone.
LOST_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and exit; errors meant for the user are shown without a traceback."""
    with _ending_with_its_reader():
        _main(arguments)


def _main(arguments: list[str] | None) -> None:
    parser = _parser()
    # argparse takes no further overrides once an option stood before them (--fresh name=x).
    options, rest = parser.parse_known_args(arguments)
    if rest and (any(word.startswith("-") for word in rest) or "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    try:
        code = options.run(options)
    except OpoError as error:
        _show_error(error)
        code = error.exit_code
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


# Modules with DESCRIPTION, add_options(parser) and run(options).
SUB_COMMANDS = (
    ("plan", plan_command, "what a recipe needs, without a GPU"),
    ("import-verl", verl_command, "a recipe from a run of verl's: its script, YAML or overrides"),
    ("doctor", doctor_command, "is this machine fit, and what to do where it is not"),
    ("data", data_command, "show, check and convert datasets"),
    ("eval", eval_command, "evaluate a checkpoint, or compare two evaluations"),
    ("report", report_command, "write a run, or several over each other, as one HTML file"),
    ("watch", watch_command, "a run as it goes on"),
    ("compare", compare_command, "a recipe under several estimators and seeds"),
)


class _Output(io.FileIO):
    """Standard output. When who reads it has ended (`| head`), so does this program, with the code
    that a shell gives to one that SIGPIPE ends; a broken connection is an error as ever."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            # What is still in buffers has to go somewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None


@contextmanager
def _ending_with_its_reader() -> Iterator[None]:
    before = sys.stdout
    if before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):
        yield  # captured, or closed
        return
    before.flush()
    output = _Output(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        output if before.write_through else io.BufferedWriter(output),  # pyright: ignore
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-opo", description="Exact on-policy RL on Megatron-Core and SGLang"
    )
    parser.add_argument("--version", action="version", version=f"megatron-opo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe", description="Run a recipe.")
    train.add_argument("recipe", type=Path, help="YAML file, e.g. recipes/quickstart_cpu.yaml")
    train.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="changes to the recipe"
    )
    train.add_argument(
        "--print", action="store_true", dest="print_only", help="show the resolved recipe and stop"
    )
    train.add_argument(
        "--fresh",
        action="store_true",
        help="start anew; an earlier run of this name is moved aside, not deleted",
    )
    modes = train.add_mutually_exclusive_group()
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
    train.set_defaults(run=_train)

    launch = commands.add_parser(
        "launch",
        help="take part in a job of several nodes (slurm/common.sh starts it by srun)",
        description="Run a recipe on the nodes of a Slurm job; srun starts this on each of them.",
    )
    launch.add_argument("recipe", type=Path)
    launch.add_argument("overrides", nargs="*", metavar="section.field=value")
    launch.add_argument(
        "--check-only", action="store_true", help="only compare the nodes and try their network"
    )
    launch.set_defaults(run=_launch)

    for name, module, about in SUB_COMMANDS:
        command = commands.add_parser(name, help=about, description=module.DESCRIPTION)
        module.add_options(command)
        command.set_defaults(run=module.run)

    logs = commands.add_parser(
        "logs",
        help="the logs of all nodes and processes of a run, as one",
        description="The logs of all nodes and processes of a run, in the order of their times.",
    )
    logs.add_argument("directory", type=Path, metavar="RUN", help="e.g. runs/opo_70b")
    logs.add_argument("--follow", "-f", action="store_true", help="go on as lines are added")
    logs.add_argument("--attempt", metavar="ID", help="a start of a job; default: the newest")
    logs.add_argument(
        "--only", default="", metavar="PATTERN", help="sources of such names: server_, 'node_1_*'"
    )
    logs.set_defaults(run=_logs)

    completion = commands.add_parser(
        "completion",
        help="a script that completes this command in a shell",
        description="Print a script; bash reads it from "
        "~/.local/share/bash-completion/completions/megatron-opo, zsh from a file _megatron-opo in "
        "a directory of its fpath.",
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)
    return parser


def _train(options: argparse.Namespace) -> int:
    from megatron_opo.environment import check_environment
    from megatron_opo.launch import all_seats, run_ranks, started_by_launcher

    # Overrides may stand after the files.
    files = [Path(word) for word in options.replay if "=" not in word or Path(word).exists()]
    overrides = options.overrides + [w for w in options.replay if Path(w) not in files]
    recipe = load_recipe(options.recipe, overrides)
    if options.print_only:
        print(dump_recipe(recipe), end="")
        return 0
    if files and options.fresh:
        raise RecipeError("--fresh would move the run aside that --replay looks at; drop one")
    if started_by_launcher() and not options.rollout_only:
        return _train_rank(recipe, files, fresh=options.fresh)
    check_environment()
    check_model(recipe)
    if options.rollout_only:
        return _rollout_only(recipe, options.fresh)
    if options.fresh:
        _move_aside(recipe.run_path)
    elif not files and _is_finished(recipe):
        return 0
    world_size = _world_size(recipe)
    if world_size == 1:
        return _train_rank(recipe, files)
    command = [sys.executable, "-m", "megatron_opo", "train", str(options.recipe), *overrides]
    if not files:
        return run_ranks(command, all_seats(world_size), recipe.run_path / "logs")
    command += ["--replay", *map(str, files)]
    logs = Path(tempfile.mkdtemp(prefix="megatron_opo_replay_"))
    code = run_ranks(command, all_seats(world_size), logs)
    if code == 0:
        shutil.rmtree(logs)
    return code


def _launch(options: argparse.Namespace) -> int:
    # Without this torch prints a C++ stack for every message to a node that has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron_opo.cluster import job_from_environment
    from megatron_opo.node import run_node

    job = job_from_environment()
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        check_model(recipe)
        command = [sys.executable, "-m", "megatron_opo", "train", str(options.recipe)]
        command += options.overrides
        return run_node(recipe, job, command, check_only=options.check_only)
    except RecipeError:
        # Every node found it; node 0 speaks for all.
        if job.node == 0:
            raise
        return EXIT_USER_ERROR


def _world_size(recipe: Recipe) -> int:
    """What the recipe asks for; else as many as this machine's GPUs hold, the fewest on a CPU."""
    import torch

    if recipe.actor.data_parallel:
        return recipe.actor.replica_size * recipe.actor.data_parallel
    fewest = recipe.actor.smallest_world
    return fewest * max(1, torch.cuda.device_count() // fewest)


def _rollout_only(recipe: Recipe, fresh: bool) -> int:
    from megatron_opo.launch import stopped_code
    from megatron_opo.rollout_only import rollout_only, rollout_recipe

    recipe = rollout_recipe(recipe)
    if fresh:
        _move_aside(recipe.run_path)
    _is_finished(recipe)
    return stopped_code(rollout_only(recipe))


def _train_rank(recipe: Recipe, files: list[Path], fresh: bool = False) -> int:
    with ExitStack() as held:
        begun = None
        if not files and os.environ.get("RANK", "0") == "0":
            begun = _begin(recipe, fresh, held)
        return _run_rank(recipe, files, begun)  # pyright: ignore[reportArgumentType]


def _begin(recipe: Recipe, fresh: bool, held: ExitStack) -> "Future[list[Server] | None]":
    """On rank 0, before the imports that take seconds: have its servers started; None when the run
    is finished already. An error is for all ranks to hear, so it waits."""
    import torch

    from megatron_opo.early import started_servers

    begun: Future[list[Server] | None] = Future()
    try:
        if fresh:
            _move_aside(recipe.run_path)
        servers = None
        if not _is_finished(recipe):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            servers = held.enter_context(started_servers(recipe, device))
        begun.set_result(servers)
    except OpoError as error:
        begun.set_exception(error)
    return begun


def _run_rank(recipe: Recipe, files: list[Path], begun: "Future[list[Server] | None]") -> int:
    """`begun` is rank 0's; None elsewhere, as in `train`."""
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
            signum = train(recipe, parallel, (begun and begun.result()) or [])
    except DriverFailed:
        return EXIT_CONSEQUENCE
    except OpoError as error:
        if rank == 0:
            raise
        _show_error(error)
        return error.exit_code
    except RuntimeError as error:
        if not LOST_PEER.search(str(error)):
            raise
        if _follows_interrupt(error):
            raise KeyboardInterrupt from None
        print(f"rank {rank} lost its connection to another rank, which has ended", file=sys.stderr)
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


def _move_aside(run_path: Path) -> None:
    if run_path.exists():
        aside = run_path.with_name(f"{run_path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            with only_run(run_path):
                run_path.rename(aside)
        except OSError as error:
            raise LogError(f"{run_path}: cannot be moved to {aside}: {error.strerror}") from None
        print(f"moved the earlier run to {aside}")


def _has_trained(run_path: Path) -> bool:
    from megatron_opo.observe.files import read_metrics

    return any(record["kind"] == "train" for record in read_metrics(run_path))


def _is_finished(recipe: Recipe) -> bool:
    """Say so if there is nothing to do.

    Raises:
        RecipeError: the run directory holds metrics that no checkpoint could continue.
    """
    run_path = recipe.run_path
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
    print(
        f"{run_path} already has all of its {recipe.train.steps} steps: raise train.steps to go "
        "on, or add --fresh to move it aside and start anew (in a job, which takes no --fresh: mv "
        "it)"
    )
    return True


def _logs(options: argparse.Namespace) -> int:
    from megatron_opo.observe.logs import Logs, show_logs

    try:
        show_logs(Logs(options.directory, options.attempt, options.only), options.follow)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _completion(options: argparse.Namespace) -> int:
    print(completion_script(_parser(), options.shell))
    return 0


def _show_error(error: OpoError) -> None:
    print(f"error: {error}", file=sys.stderr)
