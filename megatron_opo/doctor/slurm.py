"""Slurm: its commands, the job this runs in, and the cluster's nodes."""

import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opo.doctor.findings import Finding, ask, judged

COMMANDS = ("sbatch", "srun", "scontrol", "sinfo", "squeue")
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%c|%m|%G")
SECONDS = 10.0
# States that a job could get, now or after another one.
USABLE = ("idle", "mixed", "allocated", "completing", "reserved", "planned", "maint")


@dataclass(frozen=True)
class Node:
    """Of the cluster. `gpus` counts what its generic resources call gpu."""

    name: str
    state: str
    gpus: int
    gpu_kind: str


def parse_nodes(output: str) -> list[Node]:
    """The lines of SINFO; a node stands there once for each of its partitions."""
    nodes: dict[str, Node] = {}
    for line in output.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 5:
            gpus, kind = count_gpus(fields[4])
            nodes[fields[0]] = Node(fields[0], fields[1], gpus, kind)
    return list(nodes.values())


def count_gpus(resources: str) -> tuple[int, str]:
    """Of "gpu:h100:8(S:0-1),nvme:1": (8, "h100")."""
    gpus, kinds = 0, []
    # A comma also stands between sockets in brackets.
    for resource in re.sub(r"\([^)]*\)", "", resources).split(","):
        name, *rest = resource.split(":")
        if name == "gpu" and rest and rest[-1].isdigit():
            gpus += int(rest[-1])
            kinds += rest[:-1]
    return gpus, "+".join(dict.fromkeys(kinds))


def check_slurm(imports: dict[str, dict[str, Any]]) -> tuple[list[Finding], int]:
    """The findings, and how many nodes the cluster has (0: not known)."""
    found = [command for command in COMMANDS if shutil.which(command)]
    job = _job(imports)
    if not found:
        if job:
            return [
                Finding("Slurm", "in a job, but without its commands, as in a container"),
                *job,
            ], 0
        return [Finding("Slurm", "not here; only jobs of several machines need it")], 0
    missing = [command for command in COMMANDS if command not in found]
    version = ask(found[0], "--version", seconds=SECONDS).output.strip()
    commands = judged(
        "Slurm",
        (f"{version}: " if version else "") + ", ".join(found),
        "note" if missing else "ok",
        f"{', '.join(missing)} are not on the PATH, and slurm/common.sh uses them: load Slurm's "
        "module, or install the rest of its client",
    )
    nodes, cluster = _cluster() if "sinfo" in found else ([], [])
    return [commands, *cluster, *job], len(nodes)


def _cluster() -> tuple[list[Node], list[Finding]]:
    answer = ask(*SINFO, seconds=SECONDS)
    nodes = parse_nodes(answer.output)
    if answer.code != 0 or not nodes:
        return [], [
            Finding(
                "cluster",
                f"sinfo: {answer.last_line}",
                "note",
                "no jobs can be started from here: is this machine part of a cluster, and does its "
                "slurmctld run? On this machine alone: `megatron-opo train`",
            )
        ]
    usable = [node for node in nodes if _state(node.state) in USABLE]
    states = Counter(_state(node.state) for node in nodes)
    gpus = Counter(f"{node.gpus} x {node.gpu_kind or 'GPU'}" for node in nodes if node.gpus)
    kinds = ", ".join(f"{count} with {kind}" for kind, count in gpus.most_common())
    found = f"{len(nodes)} nodes ({', '.join(f'{n} {s}' for s, n in states.most_common())})"
    return nodes, [
        judged(
            "cluster",
            f"{found}; {kinds or 'none with GPUs'}",
            "ok" if usable else "note",
            "no node could take a job; `sinfo -R` says why",
        )
    ]


def _state(shown: str) -> str:
    """Without the marks that follow it: idle~ is powered down, mixed- planned."""
    return re.sub(r"[^a-z_].*", "", shown.lower())


def _job(imports: dict[str, dict[str, Any]]) -> list[Finding]:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return []
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    result = imports.get("gpus", {})
    seen = len(result.get("gpus", []))
    found = f"in job {job} of {nodes} node{'s' if nodes != '1' else ''}"
    found += f", {given} GPUs on this one" if given else ", no GPUs asked for"
    findings = [
        judged(
            "job",
            found if not given.isdigit() or int(given) == seen else f"{found}, torch sees {seen}",
            "problem" if given.isdigit() and int(given) != seen else "ok",
            "is the driver loaded, is torch a CUDA build, does the container have the GPUs (--nv, "
            "pyxis)?",
        )
    ]
    directory = os.environ.get("SLURM_SUBMIT_DIR")
    if directory and not Path(directory).is_dir():
        findings.append(
            Finding(
                "job's directory",
                f"{directory}, from where it was submitted, is not on this node",
                "problem",
                "submit from a directory on a file system that the nodes share",
            )
        )
    return findings
