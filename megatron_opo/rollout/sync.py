"""New weights for the servers: paused, sent, verified, and only then sampled from.

Every step happens on all servers at once. Until the last one the servers carry the version
"updating", which no sample may have: whatever goes wrong in between, and whoever resumes such a
server, nothing sampled from half-replaced weights can be taken for on-policy.
"""

import asyncio
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_opo.errors import ServerError, WeightError
from megatron_opo.recipe import ModelConfig, SyncConfig
from megatron_opo.rollout.buckets import (
    Bucket,
    Message,
    Progress,
    Weights,
    buckets,
    messages,
    sendable,
)
from megatron_opo.rollout.checksum import ExpectedChecksums
from megatron_opo.rollout.group import (
    Placement,
    WeightGroup,
    in_thread,
    is_here,
    join_group,
    leave_group,
    together,
)
from megatron_opo.rollout.process import Server
from megatron_opo.rollout.shared_memory import Filled, SharedBucket
from megatron_opo.rollout.wire import all_of, call, call_all
from megatron_opo.spans import Spans

T = TypeVar("T")

AHEAD = "rank 0, weights ahead"
UPDATING = "updating"
FLUSH_TIMEOUT_S = 60.0
WEIGHTS, KV_CACHE = "weights", "kv_cache"


@dataclass(frozen=True)
class SyncStats:
    """One weight update. `checksums` is how many were compared, 0 when sync.verify is off."""

    seconds: float
    bytes: int
    tensors: int
    checksums: int


async def ask_placement(
    session: aiohttp.ClientSession, servers: list[Server], timeout_s: float
) -> Placement:
    """Raises ServerError if the servers compute on different kinds of devices."""
    infos = await call_all(session, servers, "/server_info", timeout_s=timeout_s)
    devices = {info["device"] for info in infos}
    if len(devices) != 1:
        raise ServerError(
            f"rollout.urls: the servers run on different devices ({sorted(devices)}); weights can "
            "be sent to one kind at a time"
        )
    return Placement(devices.pop(), tuple(int(info["tp_size"]) for info in infos))


async def send_message(
    session: aiohttp.ClientSession,
    servers: list[Server],
    group: WeightGroup,
    message: Message,
    timeout_s: float,
) -> None:
    """Broadcast it while every server loads it."""
    if not message.entries:
        return
    body = {
        "names": [entry.name for entry in message.entries],
        "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in message.entries],
        "shapes": [list(entry.shape) for entry in message.entries],
        "group_name": group.name,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    await together(
        in_thread(lambda: group.broadcast(message.data)),
        *(
            call(
                session,
                server,
                "/update_weights_from_distributed",
                body,
                timeout_s=timeout_s,
            )
            for server in servers
        ),
    )


async def each_ahead(
    parts: Generator[T, None, None], send: Callable[[T], Awaitable[None]], spans: Spans
) -> None:
    """Send them one after the other; while one is sent the next is made, in a thread.

    Of the spans "gather" is the wait for one to be made, and AHEAD the track of the thread.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def make() -> T | None:
        # Which device is the current one is each thread's own matter.
        on_device = torch.cuda.device(device) if device is not None else nullcontext()
        with on_device, spans.on(AHEAD, "gather"):
            return next(parts, None)

    making = asyncio.ensure_future(in_thread(make))
    try:
        while True:
            with spans.of("gather"):
                part = await making
            if part is None:
                break
            making = asyncio.ensure_future(in_thread(make))
            with spans.of("send"):
                await send(part)
    finally:
        # Whoever goes on with the iterator after an error cannot while it runs.
        await asyncio.wait([making])
        if not making.cancelled():
            making.exception()  # or asyncio would complain that nobody looked
        parts.close()


async def open_update(
    session: aiohttp.ClientSession, servers: list[Server], timeout_s: float
) -> None:
    """Stop sampling, mark the weights as being replaced, drop what the old ones computed."""
    await call_all(session, servers, "/pause_generation", {"mode": "abort"}, timeout_s=timeout_s)
    await _set_version(session, servers, UPDATING, timeout_s)
    path = f"/flush_cache?timeout={FLUSH_TIMEOUT_S:.0f}"
    await call_all(session, servers, path, {}, timeout_s=timeout_s)


async def _set_version(session, servers, version: str, timeout_s: float) -> None:
    body = {"new_version": version, "abort_all_requests": False}
    await call_all(session, servers, "/update_weight_version", body, timeout_s=timeout_s)


async def begin_session(
    session: aiohttp.ClientSession, servers: list[Server], timeout_s: float
) -> None:
    async def begin(server: Server) -> None:
        try:
            await call(session, server, "/begin_weight_update", {}, timeout_s=timeout_s)
        except ServerError as error:
            if "already open" not in str(error):
                raise
            # Left open by an update that failed; this one replaces every weight anyway.
            await call(session, server, "/end_weight_update", {}, timeout_s=timeout_s)
            await call(session, server, "/begin_weight_update", {}, timeout_s=timeout_s)

    await asyncio.gather(*(begin(server) for server in servers))


async def verify(
    session: aiohttp.ClientSession,
    servers: list[Server],
    expected: ExpectedChecksums,
    timeout_s: float,
) -> int:
    """The number of checksums compared.

    Raises:
        WeightError: a server's weights are not the ones that were sent.
    """
    body = {"action": "checksum"}
    answers = await call_all(session, servers, "/weights_checker", body, timeout_s=timeout_s)
    return sum(
        expected.compare(f"{server.name} ({server.url})", answer["ranks"])
        for server, answer in zip(servers, answers, strict=True)
    )


async def close_update(
    session: aiohttp.ClientSession, servers: list[Server], version: int, timeout_s: float
) -> None:
    """Stamp the version and sample again.

    Raises:
        ServerError: a server does not report the new version afterwards.
    """
    await _set_version(session, servers, str(version), timeout_s)
    infos = await call_all(session, servers, "/model_info", timeout_s=timeout_s)
    for server, info in zip(servers, infos, strict=True):
        if info["weight_version"] != str(version):
            raise ServerError(
                f"{server.name} ({server.url}) reports weight version {info['weight_version']!r} "
                f"after it was set to {version}; does another trainer update it?"
            )
    await call_all(session, servers, "/continue_generation", {}, timeout_s=timeout_s)


def write_model(parts: Iterator[Bucket], directory: Path, model: ModelConfig) -> None:
    """Write buckets as a Hugging Face model directory, which appears only when complete.

    Raises:
        WeightError: the directory cannot be written.
    """
    partial = directory.with_name(directory.name + ".partial")
    weight_map: dict[str, str] = {}
    size = 0
    try:
        partial.mkdir(parents=True)
        for i, bucket in enumerate(parts):
            file = f"model-{i:05d}.safetensors"
            save_file(dict(bucket), partial / file, metadata={"format": "pt"})
            weight_map |= {name: file for name, _ in bucket}
            size += sum(tensor.nbytes for _, tensor in bucket)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(Path(model.path) / "config.json", partial)
        os.replace(partial, directory)
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"sync.transport is disk, but {directory} cannot be written: {error}. The servers "
            "need a directory that both sides see, with room for a copy of the model"
        ) from None


class WeightSync:
    """Sends weights by the recipe's transport; keeps the process group between updates, and knows
    what memory the servers have given back."""

    def __init__(
        self,
        config: SyncConfig,
        model: ModelConfig,
        kv_heads: int,
        load_timeout_s: float,
        disk: Path,
        shared: SharedBucket | None,
        spans: Spans,
    ):
        """
        Args:
            load_timeout_s: for a server to read a whole model from disk.
            shared: given where the transport is shared_memory; "auto" stands for distributed.
        """
        self._config = config
        self._model = model
        self._kv_heads = kv_heads
        self._timeout_s = config.timeout_s
        self._load_timeout_s = load_timeout_s
        self._disk = disk / "weights"
        self._shared = shared
        self._spans = spans
        self._group: WeightGroup | None = None
        self._members: list[Server] = []
        self._placement: tuple[list[Server], Placement] | None = None
        self._buffers: list[torch.Tensor] = []
        self._released: dict[Server, list[str]] = {}
        self._frozen: set[Server] = set()
        self._verified: ExpectedChecksums | None = None

    def forget(self, server: Server) -> None:
        """It was lost, and what answers now has all of its memory, and is in no group."""
        self._released.pop(server, None)
        self._frozen.discard(server)
        if server in self._members:
            self._members = []
        self._placement = None

    async def release(self, servers: list[Server]) -> None:
        """Stop sampling and give the memory of weights and cache back; see `Rollout.release`."""
        tags, timeout_s = [KV_CACHE, WEIGHTS], self._timeout_s

        async def release(server: Server) -> None:
            await open_update(session, [server], timeout_s)
            path = "/release_memory_occupation"
            await call(session, server, path, {"tags": tags}, timeout_s=timeout_s)
            self._released[server] = list(tags)

        async with aiohttp.ClientSession() as session:
            await all_of(release(server) for server in servers if server not in self._released)

    async def _resume(
        self, session: aiohttp.ClientSession, servers: list[Server], tag: str
    ) -> None:
        async def resume(server: Server) -> None:
            path, body = "/resume_memory_occupation", {"tags": [tag]}
            await call(session, server, path, body, timeout_s=self._timeout_s)
            self._released[server].remove(tag)

        # A server does not survive being asked for what it has.
        await all_of(resume(s) for s in servers if tag in self._released.get(s, ()))

    async def _placed(self, session: aiohttp.ClientSession, servers: list[Server]) -> Placement:
        if self._placement is None or self._placement[0] != servers:
            self._placement = (
                list(servers),
                await ask_placement(session, servers, self._timeout_s),
            )
        return self._placement[1]

    async def _freeze(self, session: aiohttp.ClientSession, servers: list[Server]) -> None:
        """Have launched servers take what they hold for good out of Python's search for garbage.
        On a CPU each flush of the cache makes one, which otherwise takes half a second."""
        for server in servers:
            if server.launched and server not in self._frozen:
                with suppress(ServerError):  # it only costs time
                    await call(session, server, "/freeze_gc", {}, timeout_s=self._timeout_s)
                self._frozen.add(server)

    async def differing(self, servers: list[Server]) -> str | None:
        """What `servers` hold else than the latest update sent them, "" if nothing; None where that
        cannot be told: none was verified, or a server has given its memory back.

        Raises:
            ServerError: a server does not answer.
        """
        if self._verified is None or any(self._released.get(server) for server in servers):
            return None
        async with aiohttp.ClientSession() as session:
            try:
                await verify(session, servers, self._verified, self._timeout_s)
            except WeightError as error:
                return str(error)
        return ""

    async def update(self, servers: list[Server], weights: Weights, version: int) -> SyncStats:
        """Replace all weights; see `Rollout.sync`."""
        start, spans = time.monotonic(), self._spans
        timeout_s = self._timeout_s
        async with aiohttp.ClientSession() as session:
            with spans.of("open"):
                placement = await self._placed(session, servers)
                await self._freeze(session, servers)
                sampling = [server for server in servers if not self._released.get(server)]
                await open_update(session, sampling, timeout_s)
                await self._resume(session, servers, WEIGHTS)
            expected = self._verified = None
            if self._config.verify:
                expected = ExpectedChecksums(
                    placement.tensor_parallel,
                    cuda=placement.device == "cuda",
                    kv_heads=self._kv_heads,
                )
            progress = Progress()
            outgoing = self._noted(weights, placement.device, expected, progress)
            await self._send(session, servers, placement, outgoing, version)
            compared = 0
            if expected is not None:
                with spans.of("verify"):
                    compared = await verify(session, servers, expected, timeout_s)
                self._verified = expected
            with spans.of("close"):
                # What this process's allocator still holds may be what the cache needs.
                torch.cuda.empty_cache()
                await self._resume(session, servers, KV_CACHE)
                self._released = {s: tags for s, tags in self._released.items() if tags}
                await close_update(session, servers, version, timeout_s)
        seconds = time.monotonic() - start
        return SyncStats(seconds, progress.bytes, progress.tensors, compared)

    def _noted(
        self, weights: Weights, device: str, expected: ExpectedChecksums | None, progress: Progress
    ) -> Weights:
        """The weights as they are sent, counted and expected."""
        on_disk = self._config.transport == "disk"
        dtype = getattr(torch, self._model.dtype)
        for name, tensor in sendable(weights, dtype, "cpu" if on_disk else device):
            progress.count(tensor)
            if expected is not None:
                expected.add(name, tensor)
            yield name, tensor

    async def _send(
        self,
        session: aiohttp.ClientSession,
        servers: list[Server],
        placement: Placement,
        weights: Weights,
        version: int,
    ) -> None:
        if self._config.transport == "shared_memory":
            await self._by_shared_memory(session, servers, placement, weights)
            return
        if self._config.transport == "disk":
            parts = self._spans.each("gather", buckets(weights, self._config.bucket_mb * 2**20))
            await self._by_disk(session, servers, parts, version)
        else:
            await self._by_broadcast(session, servers, placement, weights)

    async def _by_broadcast(self, session, servers, placement, weights: Weights) -> None:
        # Kept only after success: a group in which a send failed may hold a stuck message.
        group, self._group = self._group, None
        if group is not None and servers != self._members:
            await leave_group(session, servers, group.name)
            group = None
        if group is None:
            with self._spans.of("join"):
                group = await join_group(session, servers, placement, self._timeout_s)
        name = group.name
        try:
            await self._begin(session, servers)
            buffers = self._buffers or [
                torch.empty(
                    self._config.bucket_mb * 2**20, dtype=torch.uint8, device=placement.device
                )
                for _ in range(2)
            ]
            if placement.device == "cpu":  # whose memory is slow to get, and not needed elsewhere
                self._buffers = buffers
            parts = messages(weights, buffers, alignment=1, larger_alone=True)
            await each_ahead(
                parts,
                lambda part: send_message(session, servers, group, part, self._timeout_s),
                self._spans,
            )
            await self._end(session, servers)
        except BaseException:
            del group
            await leave_group(session, servers, name)
            raise
        self._group, self._members = group, servers

    async def _by_shared_memory(self, session, servers, placement, weights: Weights) -> None:
        shared, timeout_s = self._shared, self._timeout_s
        assert shared is not None
        shared.check_reach(servers, is_here)
        ranks = dict(zip(servers, placement.tensor_parallel, strict=True))
        ranks_by_node: Counter[int] = Counter()
        for server, count in ranks.items():
            ranks_by_node[server.node] += count
        await self._begin(session, servers)

        async def send(filled: Filled) -> None:
            if not filled.entries:
                return
            shared.publish(filled, max(ranks_by_node.values()))
            messages = {node: shared.message(node, filled) for node in ranks_by_node}
            await asyncio.gather(
                *(
                    call(
                        session,
                        server,
                        "/update_weights_from_tensor",
                        {
                            "serialized_named_tensors": [messages[server.node]] * count,
                            "load_format": "flattened_bucket",
                            "flush_cache": False,
                        },
                        timeout_s=timeout_s,
                    )
                    for server, count in ranks.items()
                )
            )

        await each_ahead(shared.fill(weights), send, self._spans)
        await self._end(session, servers)

    async def _begin(self, session, servers) -> None:
        with self._spans.of("begin"):
            await begin_session(session, servers, self._timeout_s)

    async def _end(self, session, servers) -> None:
        with self._spans.of("end"):
            await call_all(session, servers, "/end_weight_update", {}, timeout_s=self._timeout_s)

    async def _by_disk(self, session, servers, parts: Iterator[Bucket], version: int) -> None:
        # Only now, not right after the last update: a server answers when its first rank has
        # read the files, and the others may still be reading.
        shutil.rmtree(self._disk, ignore_errors=True)
        directory = (self._disk / f"version_{version}").absolute()
        with self._spans.of("write"):
            write_model(parts, directory, self._model)
        body = {"model_path": str(directory), "load_format": "auto"}
        with self._spans.of("send"):
            await call_all(
                session, servers, "/update_weights_from_disk", body, timeout_s=self._load_timeout_s
            )

    def close(self) -> None:
        """Forget the process group and remove the weights that were written for the servers."""
        self._group, self._buffers = None, []
        shutil.rmtree(self._disk, ignore_errors=True)
        if self._shared is not None:
            self._shared.close()
