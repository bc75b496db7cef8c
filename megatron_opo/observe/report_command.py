"""The sub-command `megatron-opo report`."""

import argparse
from pathlib import Path

DESCRIPTION = (
    "Write report.html of a run; of several runs, comparison.html with their curves over each "
    "other, those that differ only in the seed as one with a band. Either is one file that needs "
    "no network. A run may still go on."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run directories, e.g. runs/quickstart_cpu",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: RUN/report.html; of several runs comparison.html beside the first one",
    )


def run(options: argparse.Namespace) -> int:
    """Write the file and print where it is; the exit code."""
    from megatron_opo.observe.console import waiting

    first, *others = options.directories
    with waiting("write report"):
        from megatron_opo.observe.comparison import write_comparison
        from megatron_opo.observe.report import write_report

        if others:
            out = options.out or first.resolve().parent / "comparison.html"
            written = write_comparison(options.directories, out)
        else:
            written = write_report(first, options.out)
    print(written)
    return 0
