"""The sub-command `megatron-opo watch`."""

import argparse
from contextlib import suppress
from pathlib import Path

DESCRIPTION = (
    "Show a run as it goes on, in the terminal, and with --port its report on "
    "http://127.0.0.1:PORT, made anew as steps are added. Only this machine reaches it; from "
    "another one: ssh -L PORT:127.0.0.1:PORT MACHINE. Ctrl-c ends it, not the run."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="RUN", help="run directory, e.g. runs/quickstart_cpu"
    )
    parser.add_argument(
        "--port", type=_port, metavar="PORT", help="serve the report there; 0: any free port"
    )


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 65535, got {text!r}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Watch until ctrl-c; the exit code."""
    from megatron_opo.observe.watch import watch

    with suppress(KeyboardInterrupt):  # the way it ends
        watch(options.directory, options.port)
    return 0
