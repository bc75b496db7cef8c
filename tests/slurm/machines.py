"""Linux namespaces as machines: each has its own processes, host name, network and /dev/shm.

They share files, and a network of their own that nothing outside can see. A machine that is ended
takes with it everything that runs on it; and all are ended when this process ends, however that
happens.
"""

import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.99.0"
HUB = f"{SUBNET}.254"
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")

# Process 1 of a machine, which reaps what is orphaned there. It says its process id, as it is known
# outside, when all else is done.
INIT = """\
set -e
read -r pid _ </proc/self/stat
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
echo "$pid"
exec >/dev/null
sleep infinity &
wait
"""


class BootError(Exception):
    """A machine did not start; its log says why."""


@dataclass(frozen=True)
class Process:
    machine: str
    pid: int
    command: str


@dataclass(frozen=True)
class Machine:
    """`pid` is its process 1, whose end ends all others; `holder` waits for that."""

    name: str
    pid: int
    holder: subprocess.Popen

    @property
    def cable(self) -> str:
        """The end that is in the hub; no two machines ever share a name."""
        return f"veth{self.pid}"

    def command(self, words: Iterable[str | Path], cwd: str | Path = "/") -> list[str]:
        """What to run here, so that `words` runs there."""
        enter = ["nsenter", "--target", str(self.pid), *NAMESPACES]
        return [*enter, "env", "-C", str(cwd), *map(str, words)]

    def do(self, *words: str) -> None:
        subprocess.run(self.command(words), check=True, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """End all that runs on it, and return when it has ended."""
        if self.holder.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.holder.wait()


def boot(name: str, hosts: Path, log: Path, environment: dict[str, str]) -> Machine:
    """Start a machine without a network; `hosts` becomes its /etc/hosts.

    Raises:
        BootError: it did not start.
    """
    with log.open("w") as errors:
        holder = subprocess.Popen(
            # It dies with this process, and process 1 with it.
            [
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", *NAMESPACES, "--fork", "--kill-child"),
                *("bash", "-c", INIT, "init", str(hosts), name),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
    assert holder.stdout is not None
    with holder.stdout as said:
        pid = said.readline()
    if not pid:
        holder.wait()
        raise BootError(f"{name} did not boot")
    return Machine(name, int(pid), holder)


def make_hub(machine: Machine) -> None:
    """The machine that all others are connected to."""
    machine.do("ip", "link", "add", "hub", "type", "bridge")
    machine.do("ip", "address", "add", f"{HUB}/24", "dev", "hub")
    machine.do("ip", "link", "set", "hub", "up")


def connect(machine: Machine, hub: Machine, address: str) -> None:
    peer = ("peer", "name", "eth0", "netns", str(machine.pid))
    add = ("ip", "link", "add", machine.cable, "type", "veth", *peer)
    # Only the network of the hub: it cannot see the process ids of others.
    subprocess.run(["nsenter", "--target", str(hub.pid), "--net", *add], check=True)
    hub.do("ip", "link", "set", machine.cable, "master", "hub", "up")
    machine.do("ip", "address", "add", f"{address}/24", "dev", "eth0")
    machine.do("ip", "link", "set", "eth0", "up")


def disconnect(machine: Machine, hub: Machine) -> None:
    hub.do("ip", "link", "delete", machine.cable)


def processes_with(variable: str, machines: Sequence[Machine]) -> list[Process]:
    """All processes of the machines that have `variable` ("NAME=value") in their environment."""
    networks = {_network(machine.pid): machine.name for machine in machines}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            machine = networks.get(_network(int(entry.name)))
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # it has ended meanwhile
            continue
        if machine and variable.encode() in variables:
            command = words.decode(errors="replace").strip()
            found.append(Process(machine, int(entry.name), command))
    return found


def _network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")
