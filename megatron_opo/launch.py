"""Start the ranks of one machine, when neither torchrun nor srun has done so."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 30.0


def started_by_launcher() -> bool:
    return "RANK" in os.environ


def run_ranks(arguments: list[str], world_size: int, log_dir: Path) -> int:
    """Run `python -m megatron_opo ARGUMENTS` as `world_size` ranks; return the job's exit code.

    Rank 0 has this terminal; the others write to `log_dir`/rank_N.log. When one rank fails the
    others are ended, and the end of its log is shown.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // world_size)
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    command = [sys.executable, "-m", "megatron_opo", *arguments]
    ranks = []
    for rank in range(world_size):
        rank_environment = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = None if rank == 0 else open(log_dir / f"rank_{rank}.log", "w")  # noqa: SIM115
        ranks.append(
            subprocess.Popen(
                command,
                env=rank_environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
            )
        )
    previous = signal.signal(signal.SIGTERM, lambda *_: _end(ranks))
    try:
        failed = _wait(ranks)
    except KeyboardInterrupt:
        # The terminal sent it to every rank too; rank 0 closes the servers.
        _end(ranks, patience=GRACE_SECONDS)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    if failed is None:
        return 0
    if failed != 0:
        log = log_dir / f"rank_{failed}.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        print(f"rank {failed} failed; the end of {log}:\n{tail}", file=sys.stderr)
    return ranks[failed].returncode


def _wait(ranks: list[subprocess.Popen]) -> int | None:
    """The first rank that failed, or None; the others have ended by then."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [i for i, code in enumerate(codes) if code]
        if failed:
            # Rank 0 tells what went wrong for all; the others often fail first, as a consequence.
            _end(ranks, patience=5.0)
            return 0 if ranks[0].returncode and ranks[0].returncode > 0 else failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def _end(ranks: list[subprocess.Popen], patience: float = 0.0) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
