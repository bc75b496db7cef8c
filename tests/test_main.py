"""The command where nothing but itself is installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_bare(*words: str) -> subprocess.CompletedProcess[str]:
    """Without site-packages (-S): as after `pip install --no-deps .`."""
    command = [sys.executable, "-S", "-m", "megatron_opo", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_missing_package_is_named_in_one_line():
    done = run_bare("--help")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: Python cannot find pydantic")
    assert "make setup" in done.stderr


def test_what_is_missing_of_the_package_itself_keeps_its_traceback(tmp_path):
    package = tmp_path / "megatron_opo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text((ROOT / "megatron_opo" / "__main__.py").read_text())
    command = [sys.executable, "-m", "megatron_opo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" in done.stderr and "No module named 'megatron_opo.cli'" in done.stderr
