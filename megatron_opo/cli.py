"""The command `megatron-opo`."""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron_opo import BEGAN_VARIABLE, __version__, train_command
from megatron_opo import compare as compare_command
from megatron_opo.completion import SHELLS, completion_script
from megatron_opo.data import command as data_command
from megatron_opo.doctor import command as doctor_command
from megatron_opo.errors import OpoError, RecipeError
from megatron_opo.evaluation import command as eval_command
from megatron_opo.failure import EXIT_BUG, Place, describe
from megatron_opo.import_verl import command as verl_command
from megatron_opo.model_fit import check_model
from megatron_opo.observe import report_command, watch_command
from megatron_opo.output import ending_with_its_reader
from megatron_opo.plan import command as plan_command
from megatron_opo.recipe_file import load_recipe
from megatron_opo.stop import Terminated

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and exit; what fails is shown without a traceback."""
    with ending_with_its_reader():
        _main(arguments)


def _main(arguments: list[str] | None) -> None:
    parser = _parser()
    # argparse takes no further overrides once an option stood before them (--fresh name=x).
    options, rest = parser.parse_known_args(arguments)
    if rest and (any(word.startswith("-") for word in rest) or "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    options.place, options.console = Place(), None
    if arguments is not None:
        options.place.command = ["megatron-opo", *arguments]
    with ExitStack() as options.held:
        code = _run(options)
        # A rank's launcher says how all of them have ended.
        if options.console and not ("RANK" in os.environ and BEGAN_VARIABLE in os.environ):
            options.console.event("end", exit_code=code)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _run(options: argparse.Namespace) -> int:
    """The exit code. A command may set `options.console`, which is closed, and say in
    `options.place` where a failure is to be described; `options.held` is left at the end."""
    try:
        try:
            return options.run(options)
        finally:
            if options.console:
                options.console.close()
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
    except Exception as error:
        text, details = describe(error, options.place)
        print(text, file=sys.stderr)
        if options.console:
            about = {"details": str(details)} if details else {}
            options.console.event("error", text=str(error), kind=type(error).__name__, **about)
        return error.exit_code if isinstance(error, OpoError) else EXIT_BUG


# Modules with DESCRIPTION, add_options(parser) and run(options).
SUB_COMMANDS = (
    ("train", train_command, "run a recipe"),
    ("plan", plan_command, "what a recipe needs, without a GPU"),
    ("import-verl", verl_command, "a recipe from a run of verl's: its script, YAML or overrides"),
    ("doctor", doctor_command, "is this machine fit, and what to do where it is not"),
    ("data", data_command, "show, check and convert datasets"),
    ("eval", eval_command, "evaluate a checkpoint, or compare two evaluations"),
    ("report", report_command, "write a run, or several over each other, as one HTML file"),
    ("watch", watch_command, "a run as it goes on"),
    ("compare", compare_command, "a recipe under several estimators and seeds"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-opo", description="Exact on-policy RL on Megatron-Core and SGLang"
    )
    parser.add_argument("--version", action="version", version=f"megatron-opo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

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
