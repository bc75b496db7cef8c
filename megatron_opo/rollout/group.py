"""A process group of this process and all server ranks, and work that runs beside HTTP calls."""

import asyncio
import socket
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import torch
import torch.distributed as dist

from megatron_opo.errors import ServerError
from megatron_opo.rollout.process import Server
from megatron_opo.rollout.wire import call

LEAVE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Placement:
    """What the servers say of themselves: where they compute and over how many ranks each."""

    device: str
    tensor_parallel: tuple[int, ...]


@dataclass(frozen=True)
class WeightGroup:
    """The process group over which weights are broadcast: this process and every server rank.

    It is built beside torch.distributed's world, from the backend itself: the world may not exist
    here, and where it does, a group of it could only hold its own members.
    """

    name: str
    backend: Any
    store: dist.TCPStore

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send a contiguous tensor to every rank and wait until it has left."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        with torch.cuda.device(flat.device) if flat.is_cuda else nullcontext():
            self.backend.broadcast([flat], options).wait()
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()


def address_towards(url: str) -> str:
    """The IPv4 address of this machine on the way to `url`.

    A name would let both sides choose between IPv4 and IPv6, and they need not choose alike.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only asks the routing table.
        probe.connect(_address_of(url))
        return probe.getsockname()[0]


def is_here(url: str) -> bool:
    """Whether `url` is on this machine: then the way there begins where it ends."""
    return address_towards(url) == _address_of(url)[0]


def _address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        return socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]  # pyright: ignore[reportReturnType]
    except socket.gaierror as error:
        raise ServerError(f"{url}: {host} has no IPv4 address: {error.strerror}") from None


async def join_group(
    session: aiohttp.ClientSession,
    servers: list[Server],
    placement: Placement,
    timeout_s: float,
) -> WeightGroup:
    """Raises ServerError if a server refuses or does not come within `timeout_s`."""
    address = address_towards(servers[0].url)
    world_size = 1 + sum(placement.tensor_parallel)
    timeout = timedelta(seconds=timeout_s)
    store = _open_store(address, 0, timeout, is_master=True)
    port = store.port
    # A server that outlived a failed update still knows the names of earlier groups.
    name = f"weights-{uuid4().hex[:12]}"
    kind = "gloo" if placement.device == "cpu" else "nccl"
    requests, offset = [], 1
    for server, ranks in zip(servers, placement.tensor_parallel, strict=True):
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": offset,
            "world_size": world_size,
            "group_name": name,
            "backend": kind,
        }
        requests.append(
            call(session, server, "/init_weights_update_group", body, timeout_s=timeout_s)
        )
        offset += ranks

    def make() -> Any:
        client = _open_store(address, port, timeout, is_master=False)
        return _make_backend(client, name, kind, world_size, timeout)

    try:
        backend, *_ = await together(in_thread(make), *requests)
    except BaseException:
        # Ends the wait of the servers that did come. Being left would not do: the traceback
        # holds on to what this frame names.
        del store
        raise
    return WeightGroup(name, backend, store)


async def leave_group(session: aiohttp.ClientSession, servers: list[Server], name: str) -> None:
    """After a failed send: let every server close its end, so that none waits for another.

    Without effect on a server that hangs; it is the others' closing that frees it.
    """
    body = {"group_name": name}
    await asyncio.gather(
        *(
            call(session, server, "/destroy_weights_update_group", body, timeout_s=LEAVE_TIMEOUT_S)
            for server in servers
        ),
        return_exceptions=True,
    )


def _open_store(address: str, port: int, timeout: timedelta, *, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore(
        address, port, is_master=is_master, timeout=timeout, wait_for_workers=False
    )


def _make_backend(store, name: str, kind: str, world_size: int, timeout: timedelta) -> Any:
    # torch nests its keys like this (group, group again, device) on the servers' side.
    device = "cpu" if kind == "gloo" else "cuda"
    nested = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    nested = dist.PrefixStore(f"{device}/", nested)
    if kind == "gloo":
        return dist.ProcessGroupGloo(nested, 0, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(nested, 0, world_size, options)


async def in_thread(function) -> Any:
    """Like asyncio.to_thread, in a daemon thread: one that hangs must not keep the program."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result, error) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def run() -> None:
        result, caught = None, None
        try:
            result = function()
        except Exception as error:
            caught = error
        # The loop is closed when the caller gave up meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, caught)

    threading.Thread(target=run, daemon=True, name="weight-sync").start()
    return await future


async def together(*work) -> list[Any]:
    """All results in order. The first failure is raised at once; the rest is given up.

    A server's own words explain a failure better than the broadcast that it broke, so they win
    when both failed.
    """
    tasks = [asyncio.ensure_future(item) for item in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if pending or any(task.exception() for task in done):
        # A refusal may arrive a moment after the broadcast noticed the broken connection.
        if pending:
            late, pending = await asyncio.wait(pending, timeout=1.0)
            done |= late
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        errors = [task.exception() for task in done if task.exception()]
        raise next((e for e in errors if isinstance(e, ServerError)), errors[0])
    return [task.result() for task in tasks]
