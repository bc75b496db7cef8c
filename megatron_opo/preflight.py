"""Do the nodes of a job fit together? Asked before any GPU time is spent.

Every launcher says what its node is; node 0 compares and names the node that stands out. Then they
send each other a few megabytes, which finds the network that lets a handshake through but no load.
"""

import hashlib
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_opo.cluster import Board, ToldElsewhere, wait_for_all
from megatron_opo.environment import (
    CLOCK_SECONDS,
    FREE_GB,
    find_problems,
    gather_facts,
    versions,
)
from megatron_opo.errors import ClusterError, UnfitEnvironmentError

EXCHANGE_MB = 16
EXCHANGE_SECONDS = 60.0
FACTS_SECONDS = 300.0


def check_nodes(board: Board, directory: Path, recipe_text: str) -> list[dict[str, Any]]:
    """What each node is; on every launcher alike.

    Args:
        directory: of this attempt; the nodes write into it, and must see each other's files.

    Raises:
        UnfitEnvironmentError: on node 0, ToldElsewhere on the others, when a node is unfit or
            differs from the others; all problems are listed.
        ClusterError: the nodes' network fails.
    """
    wait_for_all(board)
    clock = time.time()  # read everywhere at once, so that clocks that differ show
    (directory / f"canary_{board.job.node}").write_text(board.job.host)
    facts = describe_node(board.job.host, directory, recipe_text)
    board.post_mine("facts", facts | {"time": clock})
    if board.job.node == 0:
        try:
            nodes = board.collect("facts", FACTS_SECONDS, "preflight")
            problems = [p for node in nodes for p in node["problems"]] + differences(nodes)
            problems += unseen_files(board.job.nodes, directory)
        except ClusterError as error:
            problems = [str(error)]
        board.post("verdict", problems)
    problems = _wait_for_verdict(board)
    if problems:
        kind = UnfitEnvironmentError if board.job.node == 0 else ToldElsewhere
        raise kind("preflight: " + "\n".join(problems))
    exchange(board)
    return board.collect("facts", FACTS_SECONDS, "preflight")


def describe_node(host: str, directory: Path, recipe_text: str) -> dict[str, Any]:
    facts = gather_facts()
    problems = [f"{host}: {problem}" for problem in find_problems(facts)]
    gpus = [] if facts.gpu is None else gpu_names()
    problems += [f"{host}: {problem}" for problem in sick_gpus(len(gpus))]
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if given.isdigit() and int(given) != len(gpus):
        problems.append(
            f"{host}: Slurm gave this node {given} GPUs, torch sees {len(gpus)}: is its driver "
            "loaded, is torch a CUDA build, does the container have the GPUs (--nv, pyxis)?"
        )
    free = shutil.disk_usage(directory).free / 1e9
    if free < FREE_GB:
        problems.append(f"{host}: run_dir: {directory} has {free:.1f} GB free")
    return {
        "host": host,
        "problems": problems,
        "gpus": gpus,
        "versions": versions(),
        "code": code_hash(Path(__file__).parent),
        "recipe": hashlib.sha256(recipe_text.encode()).hexdigest()[:12],
    }


def gpu_names() -> list[str]:
    return [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]


def sick_gpus(count: int) -> list[str]:
    """One line for each GPU that cannot multiply, or that reports uncorrected memory errors."""
    problems = []
    for i in range(count):
        try:
            ones = torch.ones(256, 256, device=f"cuda:{i}")
            if (ones @ ones != 256).any():
                problems.append(f"GPU {i} multiplies wrongly: have it replaced")
        except RuntimeError as error:
            problems.append(f"GPU {i} does not work: {str(error).splitlines()[0]}")
    if not count or not shutil.which("nvidia-smi"):
        return problems
    query = "--query-gpu=index,ecc.errors.uncorrected.volatile.total"
    answer = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=60
    )
    for line in answer.stdout.splitlines():
        index, _, errors = line.partition(", ")
        if errors.isdigit() and int(errors):
            problems.append(f"GPU {index} has {errors} uncorrected memory errors: reset the node")
    return problems


def code_hash(package: Path) -> str:
    """Of the installed source files: an editable install may differ from node to node."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def differences(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each fact in which nodes differ, naming those outside the majority."""
    lines = []
    for fact, what in (
        ("code", "the files of megatron_opo (hash)"),
        ("recipe", "the resolved recipe (hash)"),
        ("versions", "the installed versions"),
        ("gpus", "the GPUs"),
    ):
        values = [_shown(node[fact]) for node in nodes]
        usual, count = Counter(values).most_common(1)[0]
        if count < len(values):
            odd = [
                f"{node['host']} has {value}"
                for node, value in zip(nodes, values, strict=True)
                if value != usual
            ]
            lines.append(
                f"{what} differ: {'; '.join(odd)}; the others have {usual}. Install the same "
                "everywhere, or leave these nodes out (sbatch --exclude)"
            )
    return lines + clock_problems(nodes)


def clock_problems(nodes: Sequence[dict[str, Any]]) -> list[str]:
    middle = sorted(node["time"] for node in nodes)[len(nodes) // 2]
    return [
        f"{node['host']}: its clock is {node['time'] - middle:+.0f} s off the other nodes' "
        f"(allowed: {CLOCK_SECONDS:.0f} s); have it synchronised"
        for node in nodes
        if abs(node["time"] - middle) > CLOCK_SECONDS
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in sorted(value.items()))
    if isinstance(value, list):
        counts = Counter(value)
        return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
    return str(value)


def unseen_files(hosts: Sequence[str], directory: Path) -> list[str]:
    missing = []
    for node, host in enumerate(hosts):
        path = directory / f"canary_{node}"
        if not path.is_file() or path.read_text() != host:
            missing.append(host)
    if not missing:
        return []
    return [
        f"run_dir: {directory}: node 0 ({hosts[0]}) does not see what {', '.join(missing)} wrote "
        "there; run_dir must be on a file system that all nodes share"
    ]


def _wait_for_verdict(board: Board) -> list[str]:
    deadline = time.monotonic() + 2 * FACTS_SECONDS
    while time.monotonic() < deadline:
        verdict = board.read("verdict")
        if verdict is not None:
            return verdict
        time.sleep(0.1)
    raise ClusterError(f"preflight: node 0 ({board.job.nodes[0]}) gave no verdict")


def exchange(board: Board) -> None:
    """An all-reduce over the nodes' host network.

    Raises:
        ClusterError: naming the nodes that did not come through it.
    """
    job = board.job
    if len(job.nodes) == 1:
        return
    timeout = timedelta(seconds=EXCHANGE_SECONDS)
    data = torch.ones(EXCHANGE_MB * 2**18)
    error = ""
    try:
        store = dist.PrefixStore("exchange/", board.store)
        group = dist.ProcessGroupGloo(store, job.node, len(job.nodes), timeout)
        group.allreduce([data]).wait()  # pyright: ignore[reportAttributeAccessIssue]
        if not torch.all(data == len(job.nodes)):
            error = "got a wrong sum"
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
    board.post_mine("exchange", error)
    errors = board.collect("exchange", EXCHANGE_SECONDS, "preflight: all-reduce between nodes")
    failed = [f"{host}: {e}" for host, e in zip(job.nodes, errors, strict=True) if e]
    if failed:
        raise ClusterError(
            "preflight: an all-reduce between the nodes failed: " + "; ".join(failed)
        )
