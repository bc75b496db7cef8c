"""A failure is one screen of text; what a developer needs of it is in a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_opo.errors import RecipeError, ServerError
from megatron_opo.failure import INDENT, MOST_LINES, Place, describe, error_text

ROOT = Path(__file__).parents[1]
FAULTY = """
import sys
from megatron_opo import cli

def run(options):
    {setup}
    raise {error}

cli.report_command.run = run
cli.main(["report", "x"])
"""


@given(st.lists(st.text(), min_size=1, max_size=60))
def test_it_is_clear_where_an_error_ends_and_it_fits_a_screen(lines):
    shown = error_text("\n".join(lines), Path("details.txt")).split("\n")
    assert shown[0].startswith("error: ") and shown[-1] == f"{INDENT}more about it: details.txt"
    assert all(line.startswith(INDENT) for line in shown[1:])
    assert len(shown) <= MOST_LINES + 2 < 24
    assert "\x1b[" not in "".join(shown)


def test_of_a_long_error_the_middle_is_left_out_and_said_so():
    lines = [f"line {i}" for i in range(100)]
    shown = error_text("\n".join(lines))
    assert "error: line 0\n  line 1\n" in shown and shown.endswith("\n  line 98\n  line 99")
    assert f"[... {100 - MOST_LINES} more lines]" in shown


def fail(error: str, setup: str = "pass") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", FAULTY.format(error=error, setup=setup)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def details_of(shown: str) -> Path:
    return Path(shown.splitlines()[-1].removeprefix("  more about it: "))


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        ("ZeroDivisionError('by zero')", "this was not foreseen"),
        ("MemoryError('no more')", "lower rollout.servers"),
        ("ImportError('torch')", "this was not foreseen"),
        ("OSError(28, 'No space left on device')", "the disk is full"),
        ("type('OutOfMemoryError', (RuntimeError,), {})('CUDA')", "actor.micro_batch_tokens"),
    ],
)
def test_what_nobody_foresaw_has_its_traceback_in_a_file(error, cure):
    ended = fail(error)
    assert ended.returncode == 1 and ended.stdout == ""
    assert "Traceback" not in ended.stderr and cure in ended.stderr
    assert ended.stderr.count("error: ") == 1 and len(ended.stderr.splitlines()) < 8
    file = details_of(ended.stderr)
    text = file.read_text()
    file.unlink()
    assert "Traceback (most recent call last):" in text and "in run" in text
    assert "\ncommand    megatron-opo report x\n" in text and "\nmegatron-opo " in text


def test_a_run_that_has_begun_keeps_the_details_with_its_logs(tmp_path):
    setup = (
        f"import pathlib; options.place.logs = pathlib.Path({str(tmp_path)!r}); "
        "options.place.recipe = pathlib.Path('r.yaml'); "
        "options.place.command += ['rollout.server_env.HF_TOKEN=abc', 'seed=7']"
    )
    ended = fail("KeyError('a')", setup)
    assert details_of(ended.stderr) == tmp_path / "error.txt"
    text = (tmp_path / "error.txt").read_text()
    assert f"recipe     {Path.cwd() / 'r.yaml'}\n" in text
    assert "abc" not in text and "HF_TOKEN=(hidden)" in text and "seed=7" in text


def test_an_error_of_the_user_s_needs_no_file_before_a_run_has_begun(tmp_path):
    place = Place(logs=tmp_path / "logs")
    assert describe(RecipeError("name: x\nseed: y"), place) == ("error: name: x\n  seed: y", None)
    (tmp_path / "logs").mkdir()
    shown, path = describe(ServerError("server 0 has ended"), place)
    assert path == tmp_path / "logs" / "error.txt"
    assert "server 0 has ended" in (tmp_path / "logs" / "error.txt").read_text()
    assert shown == f"error: server 0 has ended\n  more about it: {path}"


def test_the_innermost_place_of_this_package_is_named():
    try:
        error_text(None)  # pyright: ignore[reportArgumentType]
    except AttributeError as error:
        shown, path = describe(error, Place())
    assert path is not None and "in error_text, megatron_opo/failure.py line " in shown
    path.unlink()
