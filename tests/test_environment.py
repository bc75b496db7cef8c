"""Each fault that would surface later, or never, is named before anything runs."""

import os
import platform
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_opo import __version__
from megatron_opo.environment import (
    Facts,
    check_environment,
    find_problems,
    gather_facts,
    versions,
)

ROOT = Path(__file__).resolve().parent.parent
FIT = Facts(
    python=(3, 12),
    packages={
        "torch": "2.14.1",
        "megatron-core": "0.19.2",
        "psutil": "7.2.2",
        "transformers": "5.19.0",
    },
    foreign_apex=None,
    gpu="NVIDIA H200",
    torch_cuda="13.0",
)


def without(name: str) -> Facts:
    return replace(FIT, packages={k: v for k, v in FIT.packages.items() if k != name})


def with_packages(facts: Facts, **packages: str) -> Facts:
    added = {k.replace("_", "-"): v for k, v in packages.items()}
    return replace(facts, packages=facts.packages | added)


def test_this_environment_is_fit():
    check_environment()


def test_a_gpu_machine_with_the_cluster_stack_is_fit():
    assert find_problems(FIT) == []


@pytest.mark.parametrize(
    ("python", "megatron_core"), [((3, 11), "0.16.1"), ((3, 12), "0.19.2"), ((3, 13), "0.19.0")]
)
def test_tested_pairs_are_accepted(python, megatron_core):
    facts = with_packages(replace(FIT, python=python), megatron_core=megatron_core)
    assert find_problems(facts) == []


@pytest.mark.parametrize(
    ("python", "megatron_core"), [((3, 11), "0.19.2"), ((3, 12), "0.16.1"), ((3, 12), "0.20.0")]
)
def test_other_pairs_are_refused(python, megatron_core):
    facts = with_packages(replace(FIT, python=python), megatron_core=megatron_core)
    (problem,) = find_problems(facts)
    assert f"megatron-core is {megatron_core} with Python {python[0]}.{python[1]}" in problem
    assert "0.16.x with Python 3.11, 0.19.x with Python 3.12 or newer" in problem
    assert "make setup" in problem


def test_old_python_is_refused_with_the_way_out():
    (problem,) = find_problems(replace(FIT, python=(3, 10)))
    assert problem.startswith("Python is 3.10; allowed: 3.11 or newer")
    assert "make setup PYTHON=" in problem


@pytest.mark.parametrize("name", ["torch", "megatron-core", "psutil", "transformers"])
def test_missing_packages_are_named(name):
    (problem,) = find_problems(without(name))
    assert problem.startswith(f"{name} is not installed")
    assert "make setup" in problem


def test_a_gpu_with_a_cpu_build_of_torch_is_refused():
    facts = with_packages(replace(FIT, torch_cuda=None), torch="2.13.0+cpu")
    (problem,) = find_problems(facts)
    assert "NVIDIA H200" in problem and "2.13.0+cpu" in problem
    assert "STACK=cluster" in problem and "CUDA_VISIBLE_DEVICES=" in problem


def test_a_cpu_build_without_a_gpu_is_fit():
    assert find_problems(replace(FIT, torch_cuda=None, gpu=None)) == []


def test_placeholders_on_a_gpu_machine_are_refused():
    (problem,) = find_problems(with_packages(FIT, megatron_opo_cpu_placeholders="0.1.0"))
    assert "hides SGLang's real kernels" in problem
    assert "pip uninstall megatron-opo-cpu-placeholders" in problem


def test_placeholders_without_a_gpu_are_fit():
    facts = with_packages(replace(FIT, gpu=None), megatron_opo_cpu_placeholders="0.1.0")
    assert find_problems(facts) == []


def test_all_problems_come_at_once():
    facts = replace(FIT, foreign_apex="0.9.10.dev0", torch_cuda=None, packages={"torch": "2.13.0"})
    problems = find_problems(facts)
    assert len(problems) == 5  # megatron-core, psutil, transformers, apex, the build of torch


def install_metadata(site: Path, name: str, version: str, files: list[str]) -> None:
    """What an installer leaves behind, with empty modules."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()


def test_the_apex_of_pypi_is_refused(tmp_path, monkeypatch):
    install_metadata(tmp_path, "apex", "0.9.10.dev0", ["apex/__init__.py", "apex/models.py"])
    monkeypatch.syspath_prepend(tmp_path)
    code = "from megatron_opo.environment import check_environment; check_environment()"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert (
        "UnfitEnvironmentError: the installed `apex` 0.9.10.dev0 is not NVIDIA Apex" in run.stderr
    )
    assert "pip uninstall apex" in run.stderr


def test_nvidia_apex_is_accepted(tmp_path, monkeypatch):
    install_metadata(tmp_path, "apex", "0.1", ["apex/__init__.py", "apex/optimizers/__init__.py"])
    monkeypatch.syspath_prepend(tmp_path)
    facts = gather_facts()
    assert facts.packages["apex"] == "0.1"
    assert facts.foreign_apex is None


def test_versions_are_the_installed_ones():
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["megatron-opo"] == __version__
    assert found["torch"] == version("torch")
    assert torch.__version__.startswith(found["torch"].partition("+")[0])
    for name in ("megatron-core", "sglang", "transformers"):
        assert found[name] == version(name)


def test_the_commit_is_git_s(tmp_path):
    """In a copy of the package inside a repository of its own."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    package = tmp_path / "megatron_opo"
    package.mkdir()
    for name in ("__init__.py", "environment.py", "errors.py"):
        (package / name).write_text((ROOT / "megatron_opo" / name).read_text())
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    code = "from megatron_opo.environment import versions; print(versions().get('commit'))"

    def commit() -> str:
        command = [sys.executable, "-c", code]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        run = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
        return run.stdout.strip()

    clean = commit()
    assert head.stdout.startswith(clean) and len(clean) == 12
    (package / "errors.py").write_text("class UnfitEnvironmentError(Exception): ...\n")
    assert commit() == f"{clean}-dirty"
    (tmp_path / ".git").rename(tmp_path / "not_git")
    assert commit() == "None"
