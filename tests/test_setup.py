"""The setup script: once, then never again until something it depends on changes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"^([A-Za-z0-9_.,\[\]-]+)==([A-Za-z0-9_.!+]+)(?: *;[^#]*)?(?:  #.*)?$")

# Stands in for pip: notes what it was asked, and fails when asked to.
RECORDING_PIP = """
import os, sys
from pathlib import Path
Path(os.environ["PIP_CALLS"]).open("a").write(" ".join(sys.argv[1:]) + "\\n")
if os.environ.get("PIP_FAILS"):
    sys.exit("no space left on device")
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files that the script reads, and an empty virtual environment."""
    root = tmp_path / "checkout"
    root.mkdir()
    shutil.copytree(ROOT / "requirements", root / "requirements")
    (root / "tools").mkdir()
    for name in ("requirements.txt", "pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / name, root / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    pip = tmp_path / "site" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").write_text("")
    (pip / "__main__.py").write_text(RECORDING_PIP)
    return root


def setup(root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "STACK")}
    environment = inherited | {
        "PYTHONPATH": str(root.parent / "site"),
        "PIP_CALLS": str(root.parent / "calls"),
        "STACK": "cpu",
    }
    return subprocess.run(
        ["bash", str(root / "tools" / "setup.sh")],
        env=environment | variables,
        capture_output=True,
        text=True,
    )


def pip_calls(root: Path) -> list[str]:
    calls = root.parent / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


def test_a_second_call_installs_nothing(checkout):
    first = setup(checkout)
    assert first.returncode == 0, first.stderr
    calls = pip_calls(checkout)
    assert any("-r requirements/cpu.txt" in call for call in calls)
    assert any("--no-deps" in call and "requirements/cpu-nodeps.txt" in call for call in calls)
    second = setup(checkout)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert pip_calls(checkout) == calls


def test_a_changed_pin_installs_again(checkout):
    setup(checkout)
    calls = pip_calls(checkout)
    with (checkout / "requirements" / "cpu.txt").open("a") as file:
        file.write("# changed\n")
    assert "Setting up" in setup(checkout).stdout
    assert len(pip_calls(checkout)) == 2 * len(calls)


def test_a_failed_install_is_shown_and_tried_again(checkout):
    failed = setup(checkout, PIP_FAILS="1")
    assert failed.returncode == 2
    assert "no space left on device" in failed.stdout
    assert "failed" in failed.stderr
    assert len(pip_calls(checkout)) == 1
    assert "Setting up" in setup(checkout).stdout


def test_the_cluster_stack_has_no_placeholders(checkout):
    assert setup(checkout, STACK="cluster").returncode == 0
    calls = pip_calls(checkout)
    assert any(call.startswith("uninstall") and "placeholders" in call for call in calls)
    assert not any(
        "install" in call and "./requirements/cpu_placeholders" in call for call in calls
    )
    assert "placeholder" not in (ROOT / "requirements.txt").read_text()


def test_an_unusable_python_is_named(checkout, tmp_path):
    shutil.rmtree(checkout / ".venv")
    missing = setup(checkout, PYTHON="/nonexistent/python3")
    assert missing.returncode == 2
    assert "PYTHON=/nonexistent/python3 does not run" in missing.stderr
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1;; esac\necho 3.9\n')
    old.chmod(0o755)
    refused = setup(checkout, PYTHON=str(old))
    assert refused.returncode == 2
    assert f"PYTHON={old} is Python 3.9; allowed: 3.11 or newer" in refused.stderr
    assert not (checkout / ".venv").exists()


def test_another_python_does_not_silently_use_the_old_environment(checkout, tmp_path):
    other = tmp_path / "python3.99"
    other.write_text("#!/bin/sh\necho 3.99\n")
    other.chmod(0o755)
    run = setup(checkout, PYTHON=str(other))
    assert run.returncode == 2
    assert "delete .venv" in run.stderr and "VENV=" in run.stderr


def test_an_unknown_stack_is_refused(checkout):
    run = setup(checkout, STACK="gpu")
    assert run.returncode == 2
    assert "STACK=gpu; allowed: cpu, cluster" in run.stderr


def pins(name: str) -> dict[str, set[str]]:
    """Package -> pinned versions (several where a marker chooses); every line must be a pin."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        match = PIN.match(line)
        assert match, f"{name}: not an exact pin: {line}"
        package = match[1].partition("[")[0].lower().replace("_", "-")
        found.setdefault(package, set()).add(match[2])
    return found


def test_everything_is_pinned_and_agrees():
    constraints = pins("requirements/constraints.txt")
    for name in ("requirements/cpu.txt", "requirements/dev.txt"):
        for package, versions in pins(name).items():
            if package not in ("torch", "megatron-core"):
                assert constraints[package] == versions, package
    cluster, cpu = pins("requirements.txt"), pins("requirements/cpu.txt")
    cpu |= pins("requirements/cpu-nodeps.txt")
    for package in cluster.keys() & cpu.keys() - {"torch"}:
        assert cluster[package] == cpu[package], package
