"""A real Slurm cluster on one machine, for tests: munged, slurmctld, and a slurmd a node.

Nodes are Linux namespaces (machines.py), so no port of this machine is taken, two clusters never
meet, and a cluster always ends as a whole.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from machines import (
    HUB,
    SUBNET,
    BootError,
    Machine,
    Process,
    boot,
    connect,
    disconnect,
    make_hub,
    processes_with,
)

LOGIN = "login"
H200_NODES = 16
# CPUs and memory are those of a node with 8 H200, so that scripts for such nodes run unchanged.
NODE_SHAPE = "CPUs=192 Sockets=2 CoresPerSocket=96 RealMemory=2000000 Gres=gpu:h200:8"
START_TIMEOUT_S = 30.0
POLL_S = 0.2
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

# cred_expire: how long a requeued job waits. MessageTimeout and SlurmdTimeout: when a silent node
# counts as dead. A node whose state is CLOUD, and that has no slurmd, is one that
# `sbatch --test-only` can plan with.
SLURM_CONF = """\
ClusterName=mini
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool.%n
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
SlurmdParameters=config_overrides
MessageTimeout=5
SlurmdTimeout=8
ReturnToService=2
KillWait=15
MinJobAge=3600
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=8000
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
GresTypes=gpu
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=INFINITE
{nodes}
NodeName=h[001-{h200:03}] {shape} State=CLOUD
PartitionName=debug Nodes={names} Default=YES State=UP
PartitionName=h200 Nodes=h[001-{h200:03}] State=UP
PartitionName=h200_half Nodes=h[001-{half:03}] State=UP
{extra}
"""


class SlurmError(Exception):
    """Slurm did not do what a test needs; the text holds what it said."""


class MiniCluster:
    """`with MiniCluster(directory, nodes=3) as slurm:` nodes n1 to n3 with 8 pretend GPUs each.

    Partitions: debug (these nodes), h200 and h200_half (16 and 8 nodes x 8 GPUs, only for
    `sbatch --test-only`). Jobs run as root. Logs of the daemons stay in `directory`.

    Raises:
        SlurmError: on entry, it did not start; the text holds the ends of its logs.
    """

    def __init__(self, directory: Path, nodes: int = 3, extra_conf: str = "") -> None:
        self.directory = directory
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        self.conf = directory / "slurm.conf"
        self._extra_conf = extra_conf
        self._machines: dict[str, Machine] = {}

    def __enter__(self) -> Self:
        try:
            self._write_configuration()
            self._start_login()
            for name in self.nodes:
                self.start_node(name)
            self._until(self._all_idle, "all nodes idle", START_TIMEOUT_S)
        except BaseException as error:
            self.stop()
            if isinstance(error, SlurmError | BootError | subprocess.SubprocessError):
                raise SlurmError(f"{error}\n{self.log_tails()}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all nodes and everything on them; a second call does nothing."""
        while self._machines:
            self._machines.popitem()[1].kill()

    def reset(self) -> None:
        """No jobs, and all nodes up and idle."""
        self.run("scancel", "--user=root")
        for name in self.nodes:
            if not self._slurmd_runs(name):
                self.start_node(name)
        self._until(self._all_idle, "all nodes idle", START_TIMEOUT_S)

    def log_tails(self, lines: int = 10) -> str:
        tails = []
        for log in sorted(self.directory.glob("*.log")):
            text = log.read_text(errors="replace").splitlines()[-lines:]
            tails.append("\n".join([f"== {log.name}", *text]))
        return "\n".join(tails)

    # Nodes

    def start_node(self, name: str) -> None:
        """Boot it, or if only its slurmd is gone, start that."""
        if name not in self._machines:
            address = f"{SUBNET}.{self.nodes.index(name) + 1}"
            connect(self._boot(name), self._machines[LOGIN], address)
        self._daemon(name, "slurmd", "-N", name, "-f", self.conf)

    def kill_slurmd(self, name: str) -> None:
        """As a crash of the daemon: the node and the jobs on it go on."""
        self.run("kill", "-KILL", self._slurmd_pid(name), node=name)

    def power_off(self, name: str) -> None:
        """As a power cut: the node falls silent (no connection is closed) and is gone."""
        machine = self._machines.pop(name)
        disconnect(machine, self._machines[LOGIN])
        machine.kill()

    # Jobs

    def run(
        self,
        *words: str | Path,
        node: str = LOGIN,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, with `env` added to the environment.

        Raises:
            SlurmError: it failed, unless `check` is False.
        """
        done = subprocess.run(
            self._machines[node].command(words, cwd or self.directory),
            env=self._environment() | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            command = " ".join(map(str, words))
            said = f"{done.stdout}{done.stderr}".rstrip()
            raise SlurmError(f"{command}: exit code {done.returncode}\n{said}")
        return done

    def sbatch(
        self, *words: str | Path, env: dict[str, str] | None = None, cwd: str | Path | None = None
    ) -> int:
        """Submit: options, the script, its arguments. Returns the job id."""
        submitted = self.run("sbatch", "--parsable", *words, env=env, cwd=cwd)
        return int(submitted.stdout.split(";")[0])

    def scancel(self, job: int, *options: str) -> None:
        self.run("scancel", *options, str(job))

    def jobs(self, job: int) -> list[dict[str, str]]:
        """What Slurm knows of a job; of a job array, an entry for each task that has started."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job)).stdout
        # A value may hold spaces: it ends where the next name begins.
        field = re.compile(r"(?<!\S)([A-Za-z][\w:/]*)=(.*?)(?=\s+[A-Za-z][\w:/]*=|\s*$)")
        return [dict(field.findall(line)) for line in shown.splitlines()]

    def job(self, job: int) -> dict[str, str]:
        return self.jobs(job)[0]

    def output(self, job: int) -> str:
        """What a job has written so far; empty before its first output."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self, job: int) -> list[Process]:
        """All processes on the nodes that a job started and that still run."""
        return processes_with(f"SLURM_JOB_ID={job}", list(self._machines.values()))

    # Waiting: each raises SlurmError, with the job's output, when it has been in vain

    def shared_memory(self, node: str) -> list[str]:
        """Names of the files in /dev/shm of a node."""
        return sorted(os.listdir(f"/proc/{self._machines[node].pid}/root/dev/shm"))

    def wait(self, job: int, *states: str, timeout: float = 30.0) -> dict[str, str]:
        """Return the job once its state, or that of all tasks of an array, is one of `states`."""

        def reached() -> bool:
            found = {entry["JobState"] for entry in self.jobs(job)}
            if found <= ENDED and not found <= set(states):
                story = self._story(job)
                raise SlurmError(f"job {job} is {', '.join(found)}, not {states}:\n{story}")
            return found <= set(states)

        self._until(reached, f"job {job} {' or '.join(states)}", timeout, job)
        return self.job(job)

    def wait_output(self, job: int, text: str, timeout: float = 30.0) -> str:
        """Return the output once it contains `text`."""
        self._until(lambda: text in self.output(job), f"{text!r} from job {job}", timeout, job)
        return self.output(job)

    def wait_processes(self, job: int, node: str, timeout: float = 30.0) -> None:
        """Return once a process of the job runs on a node; to Slurm it runs a little earlier."""

        def run_there() -> bool:
            return any(process.machine == node for process in self.processes(job))

        self._until(run_there, f"processes of job {job} on {node}", timeout, job)

    def _until(
        self, reached: Callable[[], bool], what: str, timeout: float, job: int | None = None
    ) -> None:
        deadline = time.monotonic() + timeout
        while not reached():
            if time.monotonic() > deadline:
                story = self._story(job) if job else self.run("sinfo", "-N", "-l").stdout
                raise SlurmError(f"not within {timeout:g} s: {what}\n{story}")
            time.sleep(POLL_S)

    def _story(self, job: int) -> str:
        return f"{self.job(job)}\n{self.output(job)[-2000:]}"

    # How it is made

    def _write_configuration(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        addresses = {LOGIN: HUB}
        addresses |= {name: f"{SUBNET}.{i}" for i, name in enumerate(self.nodes, 1)}
        addresses |= {f"h{i:03}": f"{SUBNET}.{200 + i}" for i in range(1, H200_NODES + 1)}
        hosts = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in addresses.items())]
        (self.directory / "hosts").write_text("\n".join(hosts) + "\n")
        self.conf.write_text(
            SLURM_CONF.format(
                login=LOGIN,
                directory=self.directory,
                nodes="\n".join(f"NodeName={n} {NODE_SHAPE} State=UNKNOWN" for n in self.nodes),
                names=",".join(self.nodes),
                shape=NODE_SHAPE,
                h200=H200_NODES,
                half=H200_NODES // 2,
                extra=self._extra_conf,
            )
        )
        for i in range(8):  # to Slurm, any device is a GPU
            (self.directory / f"gpu{i}").symlink_to("/dev/null")
        gpus = f"Name=gpu Type=h200 File={self.directory}/gpu[0-7]\n"
        (self.directory / "gres.conf").write_text(gpus)
        (self.directory / "cgroup.conf").write_text(f"CgroupPlugin={_least_cgroup_plugin()}\n")
        (self.directory / "munge.key").write_bytes(os.urandom(1024))
        (self.directory / "munge.key").chmod(0o400)

    def _start_login(self) -> None:
        make_hub(self._boot(LOGIN))
        paths = {
            "socket": "munge.sock",
            "key-file": "munge.key",
            "seed-file": "munge.seed",
            "pid-file": "munge.pid",
            "log-file": "munged.log",
        }
        options = (f"--{option}={self.directory}/{name}" for option, name in paths.items())
        self._daemon(LOGIN, "munged", "--force", *options)
        self._daemon(LOGIN, "slurmctld", "-c", "-f", self.conf)

    def _boot(self, name: str) -> Machine:
        log = self.directory / f"boot.{name}.log"
        machine = boot(name, self.directory / "hosts", log, self._environment())
        self._machines[name] = machine
        return machine

    def _daemon(self, node: str, *command: str | Path) -> None:
        """Start one; the command returns when the daemon stands in the background."""
        # No pipe: it would stay open as long as the daemon lives.
        with (self.directory / f"{command[0]}.{node}.start.log").open("a") as log:
            done = subprocess.run(
                self._machines[node].command(command),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=START_TIMEOUT_S,
            )
        if done.returncode != 0:
            raise SlurmError(f"{command[0]} on {node}: exit code {done.returncode}")

    def _slurmd_pid(self, name: str) -> str:
        return (self.directory / f"slurmd.{name}.pid").read_text().strip()

    def _slurmd_runs(self, name: str) -> bool:
        if name not in self._machines:
            return False
        found = self.run("kill", "-0", self._slurmd_pid(name), node=name, check=False)
        return found.returncode == 0

    def _all_idle(self) -> bool:
        idle = self.run("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D", check=False)
        return idle.stdout.strip() == str(len(self.nodes))

    def _environment(self) -> dict[str, str]:
        """Of this process, as if it ran outside of any Slurm job."""
        foreign = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")
        kept = {name: v for name, v in os.environ.items() if not name.startswith(foreign)}
        return kept | {"PATH": _path(), "SLURM_CONF": str(self.conf)}


def _least_cgroup_plugin() -> str:
    """One that needs neither systemd nor any cgroup; left alone, slurmd asks for both."""
    said = subprocess.run(
        ["slurmd", "-V"], env=os.environ | {"PATH": _path()}, capture_output=True, text=True
    ).stdout
    year, month = re.findall(r"\d+", said)[:2]
    return "disabled" if (int(year), int(month)) >= (24, 5) else "cgroup/v1"


def _path() -> str:
    """Debian keeps daemons in directories that a user's PATH may lack."""
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
