"""The fixture `slurm`: a real Slurm cluster of three nodes, started once a session."""

import os
import shutil
import subprocess
from functools import cache

import pytest
from cluster import MiniCluster
from debian import install
from machines import NAMESPACES

COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "setpriv")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux")


def pytest_runtest_setup() -> None:
    # Here and not in the fixture, so that pytest's summary has one line for all tests.
    if obstacle := why_not_here():
        pytest.skip(f"no Slurm cluster for tests: {obstacle}")


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    with MiniCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster):
    """All nodes are up and idle, whatever the test before has done."""
    yield slurm_cluster
    slurm_cluster.reset()


@cache
def why_not_here() -> str | None:
    """What keeps a cluster from being made here, after installing Slurm where it is missing."""
    if os.geteuid() != 0:
        return "its nodes are Linux namespaces, which needs root"
    if missing() and (failure := install(PACKAGES)):
        return f"{', '.join(missing())} not found, and {failure}"
    if missing():
        return f"{', '.join(missing())} not found"
    mount = ("mount", "-t", "proc", "proc", "/proc")
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", *mount], capture_output=True, text=True
    )
    if tried.returncode != 0:
        reason = tried.stderr.strip()
        return f"this container may not make namespaces (docker run --privileged may): {reason}"
    return None


def missing() -> list[str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [command for command in COMMANDS if shutil.which(command, path=path) is None]
