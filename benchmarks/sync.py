"""How fast a server is given new weights, against a plain copy of the same bytes.

    python benchmarks/sync.py [--quick] [--gigabytes 1] [--rounds 5] [--out table.md]

A real SGLang server holds a Llama of random bfloat16 weights on the CPU. In turns, in one run: the
bytes go, in messages of sync.bucket_mb, to another process that only takes them (by a gloo
broadcast into its memory; by a copy into shared memory and out of it again), and the weights go to
the server by `Rollout.sync` (paused, sent, loaded into its parameters, resumed), with checksums
compared and without. The first round does not count. The bar is the share of the plain copy's speed
that a sync without checksums reaches. Exits with 1 when it is missed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from convert import architecture_of, make_model

from megatron_opo.recipe import ModelConfig, RolloutConfig, SyncConfig
from megatron_opo.rollout import Rollout, Server, launch_servers, wait_healthy
from megatron_opo.rollout.shared_memory import SharedBucket, parts_of, share_one
from megatron_opo.weights.checkpoint import open_checkpoint

BAR = 0.7
TRANSPORTS = ("distributed", "shared_memory")
PLAIN = {"distributed": "gloo broadcast", "shared_memory": "copy into shared memory and out"}
TIMEOUT = timedelta(minutes=5)
BROADCAST, COPY, STOP = range(3)


class Peer:
    """The other end of plain copies: this script again, as rank 1 of a gloo group."""

    def __init__(self, rank: int, store: dist.TCPStore, bucket: int, shared: Path):
        self.backend = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
        self.bucket = bucket
        self.memory = torch.from_file(str(shared), shared=True, size=bucket, dtype=torch.uint8)
        self.own = torch.zeros(bucket, dtype=torch.uint8)

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.backend.broadcast([tensor], options).wait()

    def say(self, *numbers: int) -> list[int]:
        told = torch.tensor(numbers)
        self.broadcast(told)
        return told.tolist()

    def wait(self) -> None:
        self.backend.barrier().wait()

    def follow(self) -> None:
        """Rank 1: take part until told to stop."""
        while (order := self.say(0, 0))[0] != STOP:
            kind, left = order
            while left > 0:
                size = min(left, self.bucket)
                if kind == BROADCAST:
                    self.broadcast(self.own[:size])
                else:
                    self.wait()
                    self.own[:size].copy_(self.memory[:size])
                left -= size
                self.wait()

    def send(self, kind: int, data: torch.Tensor) -> None:
        """Rank 0: [bytes] uint8, in messages of up to `bucket`; returns when they have come."""
        self.say(kind, data.numel())
        for part in data.split(self.bucket):
            if kind == BROADCAST:
                self.broadcast(part)
            else:
                self.memory[: part.numel()].copy_(part)
                self.wait()
            self.wait()


@contextmanager
def plain_peer(bucket: int) -> Iterator[Peer]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        shared = Path(directory) / "plain"
        with shared.open("wb") as file:
            file.truncate(bucket)
        options = ["--peer", str(store.port), "--bucket", str(bucket), "--shared", str(shared)]
        other = subprocess.Popen([sys.executable, __file__, *options])
        try:
            peer = Peer(0, store, bucket, shared)
            yield peer
            peer.say(STOP, 0)
            other.wait()
        finally:
            other.kill()


def read_weights(model: Path, names: Iterator[str]) -> dict[str, torch.Tensor]:
    with ExitStack() as stack:
        checkpoint = open_checkpoint(model, stack)
        return {name: checkpoint.read(name, None, 0, 0).clone() for name in names}


@contextmanager
def server_of(model: ModelConfig, directory: Path) -> Iterator[tuple[RolloutConfig, Server]]:
    options = {"max_total_tokens": 1024, "max_running_requests": 4, "skip_tokenizer_init": True}
    config = RolloutConfig(server_args=options, start_timeout_s=300)
    (server,) = launch_servers(config, model, directory / "logs", "cpu")
    with closing(server):
        wait_healthy([server], config.start_timeout_s)
        yield config, server


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(1 + rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in found.items()}


def measure(
    model: ModelConfig,
    weights: dict[str, torch.Tensor],
    bucket_mb: int,
    rounds: int,
    directory: Path,
) -> dict[str, list[float]]:
    flat = torch.cat([tensor.view(torch.uint8).flatten() for tensor in weights.values()])
    bucket = bucket_mb * 2**20
    sizes = [tensor.nbytes for tensor in weights.values()]
    shared = share_one(parts_of(bucket, sizes), torch.device("cpu"))
    with (
        closing(shared),
        server_of(model, directory) as (config, server),
        plain_peer(bucket) as peer,
    ):
        versions = iter(range(1, 10_000))

        def sync_by(transport: str, verify: bool) -> Callable[[], object]:
            sync = SyncConfig(transport=transport, verify=verify, bucket_mb=bucket_mb)  # pyright: ignore[reportArgumentType]
            by: SharedBucket | None = shared if transport == "shared_memory" else None
            rollout = Rollout([server], config, sync, model, disk_dir=directory, shared=by)
            return lambda: rollout.sync(iter(weights.items()), next(versions))

        contenders: dict[str, Callable[[], object]] = {}
        for transport, kind in zip(TRANSPORTS, (BROADCAST, COPY), strict=True):
            contenders[PLAIN[transport]] = lambda kind=kind: peer.send(kind, flat)
            contenders[f"sync, {transport}"] = sync_by(transport, verify=False)
            contenders[f"sync, {transport}, checksums compared"] = sync_by(transport, verify=True)
        return take_turns(contenders, rounds)


def table(found: dict[str, list[float]], gigabytes: float) -> tuple[str, bool]:
    medians = {name: statistics.median(values) for name, values in found.items()}
    lines = [
        "| what | median s | GB/s | speed of the plain copy | all rounds, s |",
        "|---|--:|--:|--:|---|",
    ]
    met = True
    for transport in TRANSPORTS:
        reference = PLAIN[transport]
        for name in (n for n in found if n == reference or f"sync, {transport}" in n):
            share = medians[reference] / medians[name]
            rounds = ", ".join(f"{seconds:.2f}" for seconds in found[name])
            lines.append(
                f"| {name} | {medians[name]:.2f} | {gigabytes / medians[name]:.2f} "
                f"| {share:.0%} | {rounds} |"
            )
            met &= name != f"sync, {transport}" or share >= BAR
    lines += ["", f"Bar: without checksums at least {BAR:.0%}: {'met' if met else 'MISSED'}."]
    return "\n".join(lines), met


def main() -> int:
    parser = argparse.ArgumentParser(description="Time weight updates against plain copies.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bucket-mb", type=int, default=SyncConfig().bucket_mb)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="0.1 GB, 1 round")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    for name in ("--peer", "--bucket"):  # of the process that plain copies go to
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shared", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        store = dist.TCPStore("127.0.0.1", options.peer, is_master=False)
        Peer(1, store, options.bucket, options.shared).follow()
        return 0
    if options.quick:
        options.gigabytes, options.rounds, options.bucket_mb = 0.1, 1, 32
    config, architecture = architecture_of(options.gigabytes)
    with tempfile.TemporaryDirectory(prefix="sync-") as name:
        path = make_model(Path(name), config)
        weights = read_weights(path, iter(architecture.hf_shapes()))
        model = ModelConfig(path=str(path), dtype="bfloat16")
        found = measure(model, weights, options.bucket_mb, options.rounds, Path(name))
    size = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    text, met = table(found, size)
    text = (
        f"{size:.2f} GB in bfloat16, messages of {options.bucket_mb} MiB, one server, on the CPU.\n"
        f"Cores: {len(os.sched_getaffinity(0))}; torch {torch.__version__}.\n\n"
        f"    python benchmarks/sync.py --gigabytes {options.gigabytes:g} "
        f"--bucket-mb {options.bucket_mb} --rounds {options.rounds}\n\n{text}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
