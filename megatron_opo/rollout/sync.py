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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_opo.errors import ServerError, WeightError
from megatron_opo.recipe import ModelConfig, SyncConfig
from megatron_opo.rollout.checksum import ExpectedChecksums
from megatron_opo.rollout.group import (
    Placement,
    WeightGroup,
    in_thread,
    join_group,
    leave_group,
    together,
)
from megatron_opo.rollout.server import Server
from megatron_opo.rollout.wire import call, call_all

UPDATING = "updating"
FLUSH_TIMEOUT_S = 60.0

Weights = Iterator[tuple[str, torch.Tensor]]


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


def buckets(weights: Weights, limit_bytes: int, dtype: torch.dtype, device: str):
    """Group the weights into lists of up to `limit_bytes`, or of one larger tensor.

    Floating-point tensors are cast to `dtype`, the one that the servers compute in.

    Raises:
        WeightError: a tensor that is not finite, or a name that comes twice.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise WeightError(f"{name}: exported twice; each weight must be sent once")
        seen.add(name)
        tensor = tensor.detach()
        if tensor.is_floating_point():
            if not torch.isfinite(tensor).all():
                raise WeightError(
                    f"{name}: holds values that are not finite; the last optimizer step broke it, "
                    "so nothing may be sampled from it. Lower optimizer.lr or resume earlier"
                )
            tensor = tensor.to(dtype)
        tensor = tensor.to(device).contiguous()
        if bucket and size + tensor.nbytes > limit_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if not seen:
        raise WeightError("no weights were exported, so there is nothing to send to the servers")
    yield bucket


async def send_bucket(
    session: aiohttp.ClientSession,
    servers: list[Server],
    group: WeightGroup,
    bucket: list[tuple[str, torch.Tensor]],
    timeout_s: float,
) -> None:
    """Broadcast one bucket as one message while every server loads it."""
    # The receiver views slices of one byte buffer, which need the alignment of the widest dtype.
    bucket = sorted(bucket, key=lambda item: -item[1].element_size())
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
    body = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": group.name,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }
    await together(
        in_thread(lambda: group.broadcast(flat)),
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


async def close_update(
    session: aiohttp.ClientSession,
    servers: list[Server],
    expected: ExpectedChecksums | None,
    version: int,
    timeout_s: float,
) -> int:
    """Verify, stamp the version, resume; the number of checksums compared.

    Raises:
        WeightError: a server's weights are not the ones that were sent.
        ServerError: a server does not report the new version afterwards.
    """
    compared = 0
    if expected is not None:
        answers = await call_all(
            session,
            servers,
            "/weights_checker",
            {"action": "checksum"},
            timeout_s=timeout_s,
        )
        for server, answer in zip(servers, answers, strict=True):
            compared += expected.compare(f"{server.name} ({server.url})", answer["ranks"])
    await _set_version(session, servers, str(version), timeout_s)
    infos = await call_all(session, servers, "/model_info", timeout_s=timeout_s)
    for server, info in zip(servers, infos, strict=True):
        if info["weight_version"] != str(version):
            raise ServerError(
                f"{server.name} ({server.url}) reports weight version {info['weight_version']!r} "
                f"after it was set to {version}; does another trainer update it?"
            )
    await call_all(session, servers, "/continue_generation", {}, timeout_s=timeout_s)
    return compared


@dataclass
class Progress:
    """What an update has sent so far."""

    bytes: int = 0
    tensors: int = 0

    def count(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        self.bytes += sum(tensor.nbytes for _, tensor in bucket)
        self.tensors += len(bucket)


def write_model(parts, directory: Path, model: ModelConfig, progress: Progress, on_bucket) -> None:
    """Write buckets as a Hugging Face model directory, which appears only when complete.

    Raises:
        WeightError: the directory cannot be written.
    """
    partial = directory.with_name(directory.name + ".partial")
    weight_map: dict[str, str] = {}
    try:
        partial.mkdir(parents=True)
        for i, bucket in enumerate(parts):
            on_bucket(bucket)
            progress.count(bucket)
            file = f"model-{i:05d}.safetensors"
            save_file(dict(bucket), partial / file, metadata={"format": "pt"})
            weight_map |= {name: file for name, _ in bucket}
        index = {"metadata": {"total_size": progress.bytes}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(Path(model.path) / "config.json", partial)
        os.replace(partial, directory)
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"sync.transport is disk, but {directory} cannot be written: {error}. The servers "
            "need a directory that both sides see, with room for a copy of the model"
        ) from None


class WeightSync:
    """Sends weights by the recipe's transport; keeps the process group between updates."""

    def __init__(
        self,
        config: SyncConfig,
        model: ModelConfig,
        kv_heads: int,
        timeout_s: float,
        disk: Path,
    ):
        self._config = config
        self._model = model
        self._kv_heads = kv_heads
        self._timeout_s = timeout_s
        self._disk = disk / "weights"
        self._group: WeightGroup | None = None
        self._members: list[str] = []

    async def update(self, servers: list[Server], weights: Weights, version: int) -> SyncStats:
        """Replace all weights; see `Rollout.sync`."""
        start = time.monotonic()
        timeout_s = self._timeout_s
        async with aiohttp.ClientSession() as session:
            placement = await ask_placement(session, servers, timeout_s)
            await open_update(session, servers, timeout_s)
            expected = None
            if self._config.verify:
                expected = ExpectedChecksums(
                    placement.tensor_parallel,
                    cuda=placement.device == "cuda",
                    kv_heads=self._kv_heads,
                )
            progress = Progress()
            dtype = getattr(torch, self._model.dtype)
            limit = self._config.bucket_mb * 2**20
            if self._config.transport == "disk":
                parts = buckets(weights, limit, dtype, "cpu")
                await self._by_disk(session, servers, parts, expected, progress, version)
            else:
                parts = buckets(weights, limit, dtype, placement.device)
                await self._by_broadcast(session, servers, placement, parts, expected, progress)
            compared = await close_update(session, servers, expected, version, timeout_s)
        seconds = time.monotonic() - start
        return SyncStats(seconds, progress.bytes, progress.tensors, compared)

    async def _by_broadcast(self, session, servers, placement, parts, expected, progress) -> None:
        # Kept only after success: a group in which a send failed may hold a stuck message.
        group, self._group = self._group, None
        members = [server.url for server in servers]
        if group is None or members != self._members:
            group = await join_group(session, servers, placement, self._timeout_s)
        name = group.name
        try:
            await begin_session(session, servers, self._timeout_s)
            for bucket in parts:
                _expect(expected, bucket)
                progress.count(bucket)
                await send_bucket(session, servers, group, bucket, self._timeout_s)
            await call_all(session, servers, "/end_weight_update", {}, timeout_s=self._timeout_s)
        except BaseException:
            del group
            await leave_group(session, servers, name)
            raise
        self._group, self._members = group, members

    async def _by_disk(self, session, servers, parts, expected, progress, version) -> None:
        # Only now, not right after the last update: a server answers when its first rank has
        # read the files, and the others may still be reading.
        shutil.rmtree(self._disk, ignore_errors=True)
        directory = (self._disk / f"version_{version}").absolute()
        write_model(parts, directory, self._model, progress, lambda b: _expect(expected, b))
        body = {"model_path": str(directory), "load_format": "auto"}
        await call_all(
            session, servers, "/update_weights_from_disk", body, timeout_s=self._timeout_s
        )

    def close(self) -> None:
        """Forget the process group and remove the weights that were written for the servers."""
        self._group = None
        shutil.rmtree(self._disk, ignore_errors=True)


def _expect(expected: ExpectedChecksums | None, bucket: list[tuple[str, torch.Tensor]]) -> None:
    if expected is not None:
        for name, tensor in bucket:
            expected.add(name, tensor)
