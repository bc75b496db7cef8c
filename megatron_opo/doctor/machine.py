"""Cores, memory, limits and the clock of this machine, and of the container or job it is in."""

import os
import re
import resource
import shutil
import socket
import time
from pathlib import Path

from megatron_opo.doctor.findings import Finding, ask, gib, judged
from megatron_opo.environment import CLOCK_SECONDS

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/dev/infiniband")
LITTLE_MEMORY = 4 * 2**30
FEW_FILES = 4096
# No clock that is right shows less: this program is younger.
OLDEST_TIME = 1_767_225_600  # 2026-01-01


def check_machine(bucket_mb: int) -> list[Finding]:
    """`bucket_mb`: sync.bucket_mb, of the recipe or its default."""
    return [
        _cores(),
        _threads(),
        _memory(),
        _shared_memory(bucket_mb),
        *_limits(),
        _clock(),
    ]


def usable_cores() -> int:
    """That this process may run on at all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota() -> float | None:
    """Cores' worth of time that the container or job has; None: no limit."""
    if limit := _cgroup("cpu", "cpu.max"):
        quota, _, period = limit.partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    quota = _cgroup("cpu", "cpu.cfs_quota_us")
    period = _cgroup("cpu", "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def _cgroup(controller: str, file: str) -> str | None:
    """The value in this process's control group, of either version, or in the nearest above it."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        place = root / path.lstrip("/")
        while place != root.parent:
            try:
                return (place / file).read_text().strip()
            except OSError:
                place = place.parent
    return None


def _cores() -> Finding:
    there, mine, quota = os.cpu_count() or 1, usable_cores(), core_quota()
    found = f"{mine} of {there}" if mine < there else f"{there}"
    if quota is not None and quota < mine:
        found += f", limited to the time of {quota:g}"
    in_job = "SLURM_JOB_ID" in os.environ
    return judged(
        "cores",
        found,
        "note" if mine == 1 and there > 1 else "ok",
        "trainer and servers would share one core: "
        + ("srun --cpus-per-task=N" if in_job else "see `taskset -p $$`"),
    )


def _threads() -> Finding:
    name, given = "threads", os.environ.get("OMP_NUM_THREADS")
    cores = usable_cores()
    quota = core_quota()
    allowed = max(1, min(cores, round(quota))) if quota else cores
    if given is None:
        return judged(
            name,
            f"OMP_NUM_THREADS is not set: {cores} are shared by the ranks",
            "note" if allowed < cores else "ok",
            f"more threads than the {allowed} cores' time that there is wait for each other: "
            f"`export OMP_NUM_THREADS={allowed}`",
        )
    found = f"OMP_NUM_THREADS={given}"
    if not given.isdigit() or not int(given):
        return Finding(
            name, found, "note", "it must be a number of 1 or more: set it right, or unset it"
        )
    return judged(
        name,
        found,
        "note" if int(given) > allowed else "ok",
        f"more threads than cores ({allowed}) wait for each other: unset it, or "
        f"`export OMP_NUM_THREADS={allowed}`",
    )


def available_memory() -> int | None:
    """Bytes that programs can still have here, container limits included; None: not known."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"]) * 1024
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _cgroup("memory", limit_file), _cgroup("memory", used_file)
        if limit and used and limit.isdigit():
            available = min(available, max(0, int(limit) - int(used)))
    return available


def _memory() -> Finding:
    available = available_memory()
    if available is None:
        return Finding("free memory", "not known on this system")
    return judged(
        "free memory",
        gib(available),
        "note" if available < LITTLE_MEMORY else "ok",
        "trainer and servers are processes with torch in each of them, and short of memory the "
        "system ends one: close other programs, or give the container or job more",
    )


def _shared_memory(bucket_mb: int) -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding(str(SHARED_MEMORY), "none on this system")
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{gib(usage.free)} free of {gib(usage.total)}"
    needed = 2 * bucket_mb * 2**20
    return judged(
        str(SHARED_MEMORY),
        found,
        "problem" if usage.free < needed else "ok",
        f"weights go to servers of this machine by it, in two messages of {bucket_mb} MiB, and "
        "NCCL uses it: give the container more (docker --shm-size=8g, kubernetes: an emptyDir of "
        "medium Memory), remove what was left in it, or lower sync.bucket_mb",
    )


def _limits() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    raised = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    more = f"`ulimit -n {raised}`" if raised > soft else "the system's administrator can raise it"
    files = judged(
        "open files",
        "without limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at most",
        "note" if few else "ok",
        f"each request, rank and checkpoint file takes some; below {FEW_FILES:,} large runs may "
        f"run out: {more}",
    )
    findings = [files]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if INFINIBAND.exists() and soft != resource.RLIM_INFINITY:
        findings.append(
            Finding(
                "locked memory",
                f"{soft // 1024:,} KiB at most, and there is InfiniBand",
                "problem",
                "NCCL cannot register its buffers: `ulimit -l unlimited` (docker --ulimit "
                "memlock=-1; in Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
            )
        )
    return findings


def _clock() -> Finding:
    name, now = "clock", time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if now < OLDEST_TIME:
        cure = "set it: files would seem to come from the future"
        return Finding(name, shown, "problem", cure)
    if shutil.which("timedatectl"):
        answer = ask("timedatectl", "show", "--property=NTPSynchronized", "--value", seconds=5)
        if answer.code == 0 and answer.output.strip() == "no":
            return Finding(
                name,
                f"{shown}, not synchronised",
                "note",
                f"the nodes of a job must agree to {CLOCK_SECONDS:.0f} s: `timedatectl set-ntp "
                "true`",
            )
    return Finding(name, shown)


def check_ports() -> list[Finding]:
    """Can a program listen on loopback, be reached there, and is this machine's name known?"""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            with socket.create_connection(address, timeout=5) as connection:
                accepted, _ = listener.accept()
                with accepted:
                    connection.sendall(b"x")
                    works = accepted.recv(1) == b"x"
        found = f"listening on 127.0.0.1 works (tried port {address[1]})"
    except OSError as error:
        works, found = False, f"listening on 127.0.0.1 fails: {error.strerror or error}"
    loopback = judged(
        "ports",
        found,
        "ok" if works else "problem",
        "servers and ranks talk over it: does a sandbox or firewall forbid it, is `lo` up?",
    )
    return [loopback, _host_name()]


def _host_name() -> Finding:
    """Asked in a process of its own: a name server that is down holds a program for long."""
    host = socket.gethostname()
    answer = ask("getent", "ahostsv4", host, seconds=5) if shutil.which("getent") else None
    if answer is None:
        return Finding("host name", host)
    addresses = sorted({line.split()[0] for line in answer.output.splitlines() if line.split()})
    return judged(
        "host name",
        f"{host}, {', '.join(addresses) or 'which has no IPv4 address'}",
        "ok" if addresses else "note",
        "nodes of a job find each other by such names: add it to /etc/hosts, or name the network "
        "in GLOO_SOCKET_IFNAME",
    )
