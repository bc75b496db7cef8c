"""One launcher on each node of a job: what several nodes need that a single machine does not.

srun starts `megatron-opo launch` once on every node. The launchers meet in a store that node 0's
holds; its address is a file in the run directory, which all nodes must share anyway. There they
compare what they are (`preflight`), start their servers, say where these listen, start their
trainer ranks, and watch over each other: when one of them fails or falls silent, all of them end.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from megatron_opo.errors import ClusterError, RecipeError, UnfitEnvironmentError
from megatron_opo.recipe import Recipe

RENDEZVOUS = "rendezvous.json"
# From the first launcher to the last: all read the same environment, perhaps from a slow disk.
JOIN_SECONDS = 120.0
# Of a launcher that is gone, as if it had been killed.
EXIT_LOST = 137
GREETING_BYTES = 32


class ToldElsewhere(ClusterError):
    """Another node's launcher has said what is wrong."""


@dataclass(frozen=True)
class Job:
    """Where this launcher stands. `nodes` are host names, node 0 first; `attempt` is unique to this
    start of the job: "<job id>.<restart count>"."""

    nodes: tuple[str, ...]
    node: int
    attempt: str

    @property
    def host(self) -> str:
        return self.nodes[self.node]


def job_from_environment(environment: Mapping[str, str] = os.environ) -> Job:
    """What slurm/common.sh and srun say.

    Raises:
        ClusterError: the command was not started by srun through slurm/common.sh.
    """
    names = ("MEGATRON_OPO_NODES", "SLURM_NODEID", "SLURM_JOB_ID")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ClusterError(
            f"the environment has no {', '.join(missing)}: `megatron-opo launch` is started on "
            "every node by srun, as slurm/common.sh does; on one machine use `megatron-opo train`"
        )
    nodes = tuple(environment["MEGATRON_OPO_NODES"].split())
    number = environment["SLURM_NODEID"]
    node = int(number) if number.isdigit() else len(nodes)
    if node >= len(nodes):
        raise ClusterError(
            f"SLURM_NODEID is {number}, but MEGATRON_OPO_NODES names {counted(len(nodes))} "
            f"({' '.join(nodes)}): start one task on each of them"
        )
    restarts = environment.get("SLURM_RESTART_COUNT") or "0"
    return Job(nodes, node, f"{environment['SLURM_JOB_ID']}.{restarts}")


@dataclass(frozen=True)
class Layout:
    """Who does what.

    Example, 4 nodes of 8 GPUs with rollout.nodes 1 and servers 4: nodes 0 to 2 have 8 ranks each
    (world_size 24); node 3 has the servers 0 to 3.
    """

    trainer_nodes: int
    ranks_per_node: int
    servers_by_node: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return self.trainer_nodes * self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        if node >= self.trainer_nodes:
            return range(0)
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def lay_out(recipe: Recipe, nodes: int, gpus_per_node: int) -> Layout:
    """Spread ranks and servers over the nodes of a job; 0 GPUs means the CPU.

    Raises:
        RecipeError: the recipe does not fit the nodes; every problem is listed.
    """
    rollout, replica = recipe.rollout, recipe.actor.replica_size
    apart = rollout.nodes
    if apart >= nodes:
        raise RecipeError(
            f"rollout.nodes: {apart} of the job's {counted(nodes)} to generate only leave none to "
            "train: ask for more nodes (sbatch --nodes) or lower it"
        )
    trainers = nodes - apart
    problems = []
    world = trainers * gpus_per_node or replica * (recipe.actor.data_parallel or 1)
    if world % trainers:
        problems.append(
            f"{world} trainer processes ({recipe.actor.replica_shape} x actor.data_parallel) do "
            f"not spread evenly over {trainers} nodes"
        )
    if world % replica:
        problems.append(
            f"{counted(trainers)} x {gpus_per_node} GPUs = {world} trainer processes, which is no "
            f"multiple of {replica} ({recipe.actor.replica_shape})"
        )
    hosts = range(trainers, nodes) if apart else range(nodes)
    if rollout.urls:
        hosts = range(0)
    elif rollout.servers % len(hosts):
        problems.append(
            f"rollout.servers: {rollout.servers} do not spread evenly over {len(hosts)} nodes; "
            f"make it a multiple of {len(hosts)}"
        )
    each = rollout.servers // max(1, len(hosts))
    if hosts and gpus_per_node and each * rollout.tensor_parallel > gpus_per_node:
        problems.append(
            f"rollout.servers: {each} servers a node x rollout.tensor_parallel "
            f"{rollout.tensor_parallel} need {each * rollout.tensor_parallel} GPUs, a node has "
            f"{gpus_per_node}"
        )
    if problems:
        raise RecipeError("\n".join(problems))
    servers: list[tuple[int, ...]] = [()] * nodes
    for place, node in enumerate(hosts):
        servers[node] = tuple(range(place * each, (place + 1) * each))
    return Layout(trainers, world // trainers, tuple(servers))


class Lifelines:
    """Connections of the other launchers to node 0's. They carry nothing but who it is: the kernel
    ends one with its launcher, which a killed one could not tell in any other way."""

    def __init__(self, address: str, nodes: int):
        self._listener = socket.create_server((address, 0))
        self._listener.setblocking(False)
        self._new: list[socket.socket] = []
        self._held: dict[int, socket.socket] = {}
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(8)
        self._greetings = {_greeting(self.token, node): node for node in range(1, nodes)}

    def ended(self) -> list[int]:
        """The nodes whose launchers are gone, whether or not they said so before."""
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._new.append(connection)
        for connection in list(self._new):
            try:
                greeting = connection.recv(GREETING_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                greeting = b""
            self._new.remove(connection)
            # A stranger, such as a port scanner, is let go.
            if (node := self._greetings.get(greeting)) is not None:
                self._held[node] = connection
        return sorted(node for node, held in self._held.items() if _is_ended(held))


def _greeting(token: str, node: int) -> bytes:
    return f"{token} {node}".ljust(GREETING_BYTES).encode()


def _is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def hold_lifeline(address: str, port: int, token: str, node: int) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=JOIN_SECONDS)
    connection.sendall(_greeting(token, node))
    return connection


def counted(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


class Board:
    """Small messages between the launchers, over torch's store.

    Every method raises ClusterError when node 0's launcher, which holds the store, is gone.
    """

    def __init__(
        self,
        job: Job,
        store: dist.TCPStore,
        address: str,
        leader: str,
        lifeline: Lifelines | socket.socket,
    ):
        """`address` is this machine's, `leader` node 0's."""
        self.job = job
        self.store = store
        self.address = address
        self.leader = leader
        self._lifeline = lifeline
        self._lost: set[int] = set()

    @property
    def port(self) -> int:
        return self.store.port

    def post(self, key: str, value: Any) -> None:
        with self._reachable():
            self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The value, or None where nothing was posted yet."""
        with self._reachable():
            return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def post_mine(self, key: str, value: Any) -> None:
        self.post(f"{key}/{self.job.node}", value)

    def read_all(self, key: str) -> list[Any]:
        return [self.read(f"{key}/{node}") for node in range(len(self.job.nodes))]

    def lost(self) -> list[int]:
        """On node 0, the nodes whose launchers are gone without having said how they end. It says
        so for them, so that nobody waits for them."""
        if not isinstance(self._lifeline, Lifelines):
            return []
        for node in self._lifeline.ended():
            if self.read(f"exit/{node}") is None:
                self._lost.add(node)
                self.post(f"exit/{node}", EXIT_LOST)
                self.post(f"read/{node}", True)
        return sorted(self._lost)

    def describe_lost(self) -> str | None:
        """What is wrong when a launcher is gone."""
        if not (lost := self.lost()):
            return None
        hosts = ", ".join(self.job.nodes[node] for node in lost)
        return f"the launcher on {hosts} ended without a word: it was killed, or its node was"

    def collect(self, key: str, timeout_s: float, what: str) -> list[Any]:
        """Every node's value, as soon as all have posted one.

        Raises:
            ClusterError: naming the nodes that did not within `timeout_s`, or that are gone.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            values = self.read_all(key)
            silent = [host for host, v in zip(self.job.nodes, values, strict=True) if v is None]
            if not silent:
                return values
            if failure := self.read("failure"):
                raise ToldElsewhere(failure)
            if failure := self.describe_lost():
                raise ClusterError(f"{what}: {failure}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{what}: no word from {', '.join(silent)} within {timeout_s:.0f} s; look at "
                    "the job's output of these nodes, or leave them out (sbatch "
                    f"--exclude={','.join(silent)})"
                )
            time.sleep(0.1)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ClusterError(
                f"{self.job.host} lost node 0 ({self.job.nodes[0]}), which leads the job: {reason}"
            ) from None


def own_address(host: str, towards: Sequence[str]) -> str:
    """An IPv4 address of this machine that other nodes can reach.

    Host names would let both sides choose between IPv4 and IPv6, and they need not choose alike.

    Raises:
        ClusterError: there is none, or not on the interface of GLOO_SOCKET_IFNAME.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _address_of(interface, host)
    for name in [*(other for other in towards if other != host), host]:
        try:
            target = socket.getaddrinfo(name, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket sends nothing; it only asks the routing table.
                probe.connect(target)
                return probe.getsockname()[0]
        except OSError:
            continue
    raise ClusterError(
        f"{host}: neither its own name nor another node's ({', '.join(towards)}) has an IPv4 "
        "address here"
    )


def _address_of(interface: str, host: str) -> str:
    found = psutil.net_if_addrs()
    for address in found.get(interface, []):
        if address.family == socket.AF_INET:
            return address.address
    raise ClusterError(
        f"{host}: GLOO_SOCKET_IFNAME: {interface} has no IPv4 address here; interfaces: "
        f"{', '.join(sorted(found))}"
    )


def meet(job: Job, directory: Path, timeout_s: float = JOIN_SECONDS) -> Board:
    """Join the job's store; node 0 makes it.

    Args:
        directory: of this attempt, on a file system that all nodes share.

    Raises:
        ClusterError: node 0 did not show up, cannot be reached, or the directory is not shared.
        UnfitEnvironmentError: the directory cannot be written.
    """
    path = directory / RENDEZVOUS
    address = own_address(job.host, job.nodes)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if job.node == 0:
            return _open_board(job, address, path)
        place = _wait_for_file(job, path, timeout_s)
    except OSError as error:
        raise UnfitEnvironmentError(
            f"{job.host}: run_dir: {directory} cannot be used: {error.strerror or error}; it must "
            "be on a file system that every node can write, with room"
        ) from None
    leader = place["address"]
    try:
        store = _store(leader, place["port"], is_master=False)
        lifeline = hold_lifeline(leader, place["lifeline"], place["token"], job.node)
    except (RuntimeError, OSError) as error:
        raise ClusterError(
            f"{job.host} cannot reach node 0 ({job.nodes[0]}) at {leader}:{place['port']}: "
            f"{str(error).splitlines()[0]}; do the nodes' networks let each other through?"
        ) from None
    return Board(job, store, address, leader, lifeline)


def wait_for_all(board: Board, timeout_s: float = JOIN_SECONDS) -> None:
    """Every launcher has joined; all return at about the same time.

    Raises:
        ClusterError: naming those that have not.
    """
    board.post_mine("joined", True)
    board.collect(
        "joined",
        timeout_s,
        "start on all nodes (each must see the run_dir that node 0 writes, and reach "
        f"{board.leader})",
    )


def _open_board(job: Job, address: str, path: Path) -> Board:
    # Port 0: another job may listen on any fixed one.
    store = _store(address, 0, is_master=True)
    lifelines = Lifelines(address, len(job.nodes))
    place = {
        "address": address,
        "port": store.port,
        "lifeline": lifelines.port,
        "token": lifelines.token,
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(place))
    partial.rename(path)
    return Board(job, store, address, address, lifelines)


def _store(address: str, port: int, *, is_master: bool) -> dist.TCPStore:
    timeout = timedelta(seconds=JOIN_SECONDS)
    return dist.TCPStore(
        address, port, is_master=is_master, timeout=timeout, wait_for_workers=False
    )


def _wait_for_file(job: Job, path: Path, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        # Listing the directory makes a network file system look again.
        if path.name in os.listdir(path.parent):
            return json.loads(path.read_text())
        time.sleep(0.2)
    raise ClusterError(
        f"{job.host} waited {timeout_s:.0f} s for node 0 ({job.nodes[0]}) to write {path}: either "
        "it did not start, or run_dir is not on a file system that both share"
    )
