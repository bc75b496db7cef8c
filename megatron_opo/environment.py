"""Is this Python environment fit for training, and which versions is it made of?

Only package metadata is read until torch has to be asked, so every fault is named before an
import crashes on it.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path

from megatron_opo import __version__
from megatron_opo.errors import UnfitEnvironmentError

OLDEST_PYTHON = (3, 11)
# The project relies on parts of Megatron-Core that change between its minor releases.
MEGATRON_CORE = {"0.16": "Python 3.11", "0.19": "Python 3.12 or newer"}
PLACEHOLDERS = "megatron-opo-cpu-placeholders"
INSTALL = "run `make setup`"
# Of a run's directory, and of clocks of machines that work together.
FREE_GB = 1.0
CLOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Facts:
    """What the checks look at.

    Example: Facts(python=(3, 12), packages={"torch": "2.14.1", "psutil": "7.2.2"},
    foreign_apex=None, gpu="NVIDIA H200", torch_cuda="13.0").
    """

    python: tuple[int, int]
    packages: dict[str, str]  # normalised name -> version
    foreign_apex: str | None  # version of an installed `apex` that is not NVIDIA's
    gpu: str | None  # name of the first GPU that this process may use
    torch_cuda: str | None  # CUDA version torch was built for


def check_environment() -> None:
    """Refuse an environment that would fail later, or hang.

    Raises:
        UnfitEnvironmentError: with one line for every problem found.
    """
    problems = find_problems(gather_facts())
    if problems:
        raise UnfitEnvironmentError("\n".join(problems))


def versions() -> dict[str, str]:
    """Versions that a result depends on, for logs; packages that are absent are left out."""
    packages = {_name(d): d.version for d in distributions()}
    found = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "sglang", "transformers", "transformer-engine"):
        if name in packages:
            found[name] = packages[name]
    found["megatron-opo"] = __version__
    commit = _git_commit(Path(__file__).resolve().parent.parent)
    if commit:
        found["commit"] = commit
    return found


def gather_facts() -> Facts:
    facts = facts_without_torch()
    return replace(facts, torch_cuda=_torch_cuda()) if "torch" in facts.packages else facts


def facts_without_torch() -> Facts:
    """All but `torch_cuda`, which is None; nothing is imported."""
    installed = list(distributions())
    packages: dict[str, str] = {}
    for distribution in installed:
        packages.setdefault(_name(distribution), distribution.version)
    return Facts(
        python=sys.version_info[:2],
        packages=packages,
        foreign_apex=_foreign_apex(installed),
        gpu=_first_gpu(),
        torch_cuda=None,
    )


def find_problems(facts: Facts) -> list[str]:
    """One line for each fault: what, what was found, what is allowed, what to do."""
    return [text for _, text in find_faults(facts)]


def find_faults(facts: Facts) -> list[tuple[str, str]]:
    """The package that each fault concerns, such as "torch" (or "python"), and the fault's line."""
    return [
        *_python_and_megatron(facts),
        *_missing_packages(facts),
        *_foreign_packages(facts),
        *_gpu_stack(facts),
    ]


def _python_and_megatron(facts: Facts) -> Iterator[tuple[str, str]]:
    python = ".".join(map(str, facts.python))
    if facts.python < OLDEST_PYTHON:
        yield (
            "python",
            f"Python is {python}; allowed: 3.11 or newer (tested: 3.11 and 3.12). Create the "
            "environment with another one: `make setup PYTHON=python3.12`",
        )
        return
    found = facts.packages.get("megatron-core")
    if found is None:
        return
    wanted = "0.16" if facts.python == (3, 11) else "0.19"
    if found.split(".")[:2] != wanted.split("."):
        allowed = ", ".join(f"{version}.x with {which}" for version, which in MEGATRON_CORE.items())
        yield (
            "megatron-core",
            f"megatron-core is {found} with Python {python}; allowed: {allowed}. Install the "
            f"pinned one: {INSTALL}",
        )


def _missing_packages(facts: Facts) -> Iterator[tuple[str, str]]:
    reasons = {
        "torch": "everything computes with it",
        "megatron-core": "the trainer is built on it",
        "psutil": "Megatron-Core's checkpoint writer hangs without it and does not declare it",
        "transformers": "it reads tokenizers and model configs",
    }
    for name, reason in reasons.items():
        if name not in facts.packages:
            yield name, f"{name} is not installed, but needed ({reason}): {INSTALL}"


def _foreign_packages(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.foreign_apex is not None:
        yield (
            "apex",
            f"the installed `apex` {facts.foreign_apex} is not NVIDIA Apex: the package of that "
            "name on PyPI is an unrelated web toolkit, and Megatron-Core would try to import it. "
            "Run `pip uninstall apex`. NVIDIA Apex is optional beside Transformer Engine; "
            "requirements.txt says how to build it",
        )


def _gpu_stack(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.gpu is None or "torch" not in facts.packages:
        return
    if facts.torch_cuda is None:
        yield (
            "torch",
            f"this machine has a GPU ({facts.gpu}) but torch {facts.packages['torch']} is a build "
            "without CUDA. Install the cluster stack (`make setup STACK=cluster`), or hide the "
            "GPU to train on the CPU: `export CUDA_VISIBLE_DEVICES=`",
        )
    elif PLACEHOLDERS in facts.packages:
        yield (
            PLACEHOLDERS,
            f"{PLACEHOLDERS} is installed on a machine with a GPU ({facts.gpu}): its sgl_kernel "
            f"hides SGLang's real kernels. Run `pip uninstall {PLACEHOLDERS}`, then "
            "`make setup STACK=cluster`",
        )


def _name(distribution: Distribution) -> str:
    return (distribution.metadata["Name"] or "").lower().replace("_", "-")


def _foreign_apex(installed: list[Distribution]) -> str | None:
    for distribution in installed:
        if _name(distribution) == "apex":
            files = distribution.files
            # NVIDIA's own build may come without a list of files; it never was 0.9.
            ours = any(f.parts[:2] == ("apex", "optimizers") for f in files or ())
            if not ours and (files is not None or distribution.version.startswith("0.9.")):
                return distribution.version
    return None


def _first_gpu() -> str | None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = answer.stdout.strip().splitlines()
    return names[0] if answer.returncode == 0 and names else None


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _git_commit(root: Path) -> str | None:
    """Short hash of the checkout, marked when files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
