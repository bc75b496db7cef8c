"""Weights for servers on the trainer's own nodes: through memory that both sides map.

Each node has one buffer, which its lowest trainer rank (its leader) holds: CUDA memory that servers
open by its IPC handle, or on the CPU a file in /dev/shm. It has two parts. Rank 0 fills one with as
many weights as fit, broadcasts that to the other leaders, and tells every server where the tensors
lie. While these load them the other part is filled.

A server opens the buffer for each message anew and lets go of it before it answers.
"""

import atexit
import base64
import pickle
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from megatron_opo.errors import ServerError, WeightError
from megatron_opo.rollout.buckets import Entry, Weights, messages
from megatron_opo.rollout.process import Server

# Of the start of each tensor, for kernels that load several values at once.
ALIGNMENT = 256
SHARED_MEMORY = Path("/dev/shm")
STOP = 0
# Of torch's rebuild_cuda_tensor.
DEVICE_ARGUMENT = 6


@dataclass(frozen=True)
class Filled:
    """Weights in `size` bytes of a buffer from `start`. Without the buffer itself, whose memory is
    not given back while anyone refers to it, be it the traceback of an error."""

    entries: list[Entry]
    start: int
    size: int


class SharedBucket:
    """The buffers of all nodes; every trainer rank has such an object, rank 0 sends.

    Between two calls of `stop` rank 0 publishes any number of times what `fill` makes; the other
    ranks take part by one call of `follow`.
    """

    def __init__(
        self,
        parts: tuple[int, int],
        buffer: torch.Tensor | None,
        places: Sequence[Any],
        leaders: dist.ProcessGroup | None,
    ):
        """Use `share_one` or `share_over_nodes`.

        Args:
            parts: bytes of each part of a buffer; see `parts_of`.
            buffer: this rank's; [sum(parts)] uint8, None if it leads no node.
            places: what opens the buffer of each node, by `describe`.
            leaders: a group of the leaders, rank 0 first, that takes CPU tensors and tensors where
                the buffers are; None if there is one node.
        """
        self._parts = parts
        self._buffer = buffer
        self._places = places
        self._leaders = leaders
        self._stopping: dist.Work | None = None
        atexit.register(self.close)

    def fill(self, weights: Weights) -> Generator[Filled, None, None]:
        """Rank 0: copy the weights into the parts of its buffer in turn; see `buckets.messages`.

        Raises:
            WeightError: a tensor is larger than the larger part.
        """
        assert self._buffer is not None
        return _filled(weights, self._buffer, self._parts)

    def publish(self, filled: Filled, readers: int) -> None:
        """Rank 0: make it readable on every node.

        Args:
            readers: server ranks on the node that has most of them.
        """
        if self._leaders is not None:
            self._wait_until_stopped()
            dist.broadcast(torch.tensor([readers]), 0, group=self._leaders)
        self._hold_ready(filled, readers)

    def stop(self) -> None:
        """Rank 0: nothing more is sent for now. Does not wait for the other ranks, which may have
        to give their parts of the weights before they hear it."""
        if self._leaders is not None:
            self._wait_until_stopped()
            self._stopping = dist.broadcast(
                torch.tensor([STOP]), 0, group=self._leaders, async_op=True
            )

    def follow(self, shapes: Weights) -> None:
        """The other ranks: take part until rank 0 stops.

        Args:
            shapes: names and tensors on the meta device, in step with what rank 0 fills in.
        """
        if self._buffer is None or self._leaders is None:
            return
        nowhere = torch.empty_like(self._buffer, device="meta")
        steps = _filled(shapes, nowhere, self._parts)
        while True:
            filled = next((each for each in steps if each.entries), None)
            readers = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(readers, 0, group=self._leaders)
            if readers.item() == STOP or filled is None:
                return
            self._hold_ready(filled, int(readers))

    def message(self, node: int, filled: Filled) -> str:
        """What a server of that node is sent for each of its ranks: base64 of a pickle that opens
        the buffer and names the tensors in it, in SGLang's format "flattened_bucket"."""
        content = {
            "flattened_tensor": opened(self._places[node], filled.start, filled.size),
            "metadata": [
                SimpleNamespace(
                    name=entry.name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    start_idx=entry.start,
                    end_idx=entry.end,
                    numel=entry.end - entry.start,
                )
                for entry in filled.entries
            ],
        }
        return base64.b64encode(pickle.dumps(content)).decode()

    def check_reach(self, servers: Sequence[Server], is_here: Callable[[str], bool]) -> None:
        """Raises ServerError if a server is on no node that has a buffer.

        Args:
            is_here: whether a URL is one of this machine; asked for those given by rollout.urls.
        """
        for server in servers:
            apart = server.node >= len(self._places)
            if apart or not (server.launched or is_here(server.url)):
                raise ServerError(
                    f"sync.transport is shared_memory, but {server.name} ({server.url}) is on a "
                    "machine without trainer ranks, so it shares no memory with any; use "
                    "distributed"
                )

    def close(self) -> None:
        """Give the memory back, also where a message was never read; again without effect."""
        if self._buffer is not None and not self._buffer.is_cuda:
            storage = self._buffer.untyped_storage()
            for _ in range(holds(self._buffer) - 1):
                storage._shared_decref()
        self._buffer = None
        atexit.unregister(self.close)

    def _wait_until_stopped(self) -> None:
        if self._stopping is not None:
            self._stopping.wait()
            self._stopping = None

    def _hold_ready(self, filled: Filled, readers: int) -> None:
        """Returns when the weights lie in every leader's buffer and may be read there."""
        assert self._buffer is not None
        if self._leaders is not None:
            part = self._buffer[filled.start : filled.start + filled.size]
            dist.broadcast(part, 0, group=self._leaders)
        if self._buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
        else:
            # Each reader takes one of these back.
            for _ in range(readers):
                self._buffer.untyped_storage()._shared_incref()
        if self._leaders is not None:
            dist.all_reduce(torch.zeros(1), group=self._leaders)


def _filled(
    weights: Weights, buffer: torch.Tensor, parts: tuple[int, int]
) -> Generator[Filled, None, None]:
    for message in messages(weights, buffer.split(parts), alignment=ALIGNMENT):
        filled = Filled(message.entries, int(message.data.storage_offset()), message.data.numel())
        del message  # it refers to the buffer
        yield filled


def parts_of(bucket: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes of a buffer's parts: each holds `bucket` bytes of weights or all that there are, the
    first any weight.

    Args:
        sizes: bytes of each weight.
    """
    bucket = min(_aligned(bucket), sum(map(_aligned, sizes)))
    return max(bucket, _aligned(max(sizes))), bucket


def share_one(parts: tuple[int, int], device: torch.device) -> SharedBucket:
    """For a trainer of a single process, or of one node.

    Args:
        parts: see `parts_of`.

    Raises:
        WeightError: there is not enough shared memory.
    """
    buffer = allocate(sum(parts), device)
    return SharedBucket(parts, buffer, [describe(buffer)], None)


def share_over_nodes(
    parts: tuple[int, int],
    device: torch.device,
    ranks_per_node: int,
    control: dist.ProcessGroup,
) -> SharedBucket:
    """For all ranks of a job together.

    Args:
        parts: see `parts_of`.
        control: a gloo group of all ranks.

    Raises:
        WeightError: on all ranks alike, if a node has not enough shared memory.
    """
    leaders = range(0, dist.get_world_size(), ranks_per_node)
    rank, node = dist.get_rank(), dist.get_rank() // ranks_per_node
    buffer, place, problem = None, None, None
    if rank in leaders:
        try:
            buffer = allocate(sum(parts), device)
            place = describe(buffer)
        except (WeightError, RuntimeError) as error:
            problem = f"node {node} (rank {rank}): {error}"
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (place, problem), group=control)
    if problems := [said for _, said in answers if said]:
        raise WeightError("\n".join(problems))
    group: Any = None
    if len(leaders) > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        group = dist.new_group(list(leaders), backend=backend)
    return SharedBucket(parts, buffer, [answers[leader][0] for leader in leaders], group)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def allocate(capacity: int, device: torch.device) -> torch.Tensor:
    """[capacity] uint8, which other processes of this machine can open.

    Raises:
        WeightError: /dev/shm is too small.
    """
    if device.type == "cuda":
        return torch.empty(capacity, dtype=torch.uint8, device=device)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < capacity:
        raise WeightError(
            f"sync.transport is shared_memory, but {SHARED_MEMORY} has {free / 2**20:.0f} MiB "
            f"free of the {capacity / 2**20:.0f} MiB that two messages of sync.bucket_mb (one "
            "holds the largest weight) take; give the container more (docker --shm-size, apptainer "
            "--bind), lower sync.bucket_mb, or use sync.transport=distributed"
        )
    storage = torch.UntypedStorage._new_using_filename_cpu(capacity)
    # Written to at once: memory that is short then ends the start, not a later step.
    return torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def holds(buffer: torch.Tensor) -> int:
    """On a CPU buffer, this process's included. Torch counts them at the start of its file, and who
    takes the last one back removes it; removing it by hand would abort that process."""
    name = buffer.untyped_storage()._share_filename_cpu_()[1].decode().lstrip("/")
    with (SHARED_MEMORY / name).open("rb") as file:
        return int.from_bytes(file.read(4), sys.byteorder)


def describe(buffer: torch.Tensor) -> tuple[Any, ...]:
    """How another process of this machine opens it; see `opened`."""
    if not buffer.is_cuda:
        return buffer.untyped_storage()._share_filename_cpu_()
    arguments = list(reductions.reduce_tensor(buffer)[1])
    # A server may number the machine's devices otherwise; SGLang also takes a device's id here.
    properties = torch.cuda.get_device_properties(buffer.device)
    arguments[DEVICE_ARGUMENT] = str(properties.uuid)
    return tuple(arguments)


class Call:
    """Pickled as a call: what is unpickled is the function's result."""

    def __init__(self, function: Callable, *arguments: Any):
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable, tuple[Any, ...]]:
        return self._call


def opened(place: Sequence[Any], start: int, size: int) -> Call:
    """`size` bytes of a buffer from `start`, in the process that unpickles this."""
    if len(place) > 3:
        tensor, _, stride, first, *rest = place
        return Call(reductions.rebuild_cuda_tensor, tensor, (size,), stride, first + start, *rest)
    storage = Call(reductions.rebuild_storage_filename, torch.UntypedStorage, *place)
    typed = Call(reductions.rebuild_typed_storage, storage, torch.uint8)
    return Call(reductions.rebuild_tensor, torch.Tensor, typed, (start, (size,), (1,), False))
