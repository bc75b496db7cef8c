"""Start the ranks of one machine, when neither torchrun nor srun has done so."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_opo import BEGAN, BEGAN_VARIABLE
from megatron_opo.errors import LogError
from megatron_opo.failure import INDENT, error_text
from megatron_opo.ports import claim_port
from megatron_opo.stop import SAME_WISH_SECONDS

GRACE_SECONDS = 30.0
# How long the others have to notice by themselves that one is gone.
NOTICE_SECONDS = 10.0
REPEAT_SECONDS = 5.0
# A rank that ends with this code knows less of the reason than another one.
EXIT_CONSEQUENCE = 3
# Stopped early at its own wish, after a checkpoint: start the same command again to go on.
EXIT_REQUEUE = 85
ELSEWHERE = -1
SHOWN_LINES = 12
PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """A signal asks the job to end."""


def stopped_code(signum: int) -> int:
    """The exit code of what was asked to stop by `signum`, and did so in order; 0 for 0."""
    return EXIT_REQUEUE if signum == signal.SIGUSR1 else 128 + signum if signum else 0


def started_by_launcher() -> bool:
    return "RANK" in os.environ


@dataclass(frozen=True)
class Seats:
    """Which ranks of the job this machine has, and where they find the others."""

    ranks: range
    world_size: int
    rendezvous: dict[str, str]
    # Keeps the rendezvous' port until rank 0 listens there.
    claim: socket.socket | None = None


def all_seats(world_size: int) -> Seats:
    """A job that is on this machine alone."""
    claim = claim_port("127.0.0.1")
    host, port = claim.getsockname()
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return Seats(range(world_size), world_size, place, claim)


SHARED_MEMORY = Path("/dev/shm")


class TimeWarning:
    """Slurm's warning before the time limit, SIGUSR1: noted, and repeated to rank 0 until it ends,
    as a process that still starts up ignores it."""

    def __init__(self) -> None:
        self.noted = False
        self._next = 0.0

    def note(self, *_) -> None:
        self.noted = True

    def pass_on(self, rank: subprocess.Popen) -> None:
        if self.noted and time.monotonic() > self._next and rank.poll() is None:
            self._next = time.monotonic() + REPEAT_SECONDS
            rank.send_signal(signal.SIGUSR1)


def run_ranks(
    command: list[str],
    seats: Seats,
    log_dir: Path,
    problem: Callable[[], str | None] = lambda: None,
    warning: TimeWarning | None = None,
) -> int:
    """Run `command` as the ranks of `seats`; return the exit code.

    Rank 0 has this terminal; the others write to `log_dir`/rank_N.log. When one rank fails the
    others are ended, and the end of its log is shown. No rank outlives this process, not even when
    it is killed. SIGUSR1 is passed on to rank 0, and so are SIGINT and SIGTERM: it writes what is
    to be kept and tells the others; a second one ends all at once.

    Args:
        problem: asked all the time; what it says (of another machine, say) ends the ranks.
        warning: what was noted before.

    Raises:
        LogError: the logs cannot be written.
    """
    environment = _environment(seats)
    ranks: list[subprocess.Popen] = []
    warning = warning or TimeWarning()
    leads = seats.ranks.start == 0
    with raising_on_signals(), _noting(warning), _sweeping(ranks):
        try:
            for rank in seats.ranks:
                ranks.append(_start(command, rank, seats, environment, log_dir))
            failed = _wait(ranks, problem, warning, leads)
        except Stopped as stopped:
            return _stop(ranks, stopped.args[0], leads, problem)
        except OSError as error:
            _end(ranks, leads)
            raise LogError(
                f"{log_dir}: cannot be written: {error.strerror or error}; give a run_dir in "
                "which you may create files"
            ) from error
    if failed is None:
        return 0
    if failed == ELSEWHERE:
        return EXIT_CONSEQUENCE
    code = ranks[failed].returncode
    _explain(seats.ranks[failed], code, log_dir)
    return code if code > 0 else 128 - code


@contextmanager
def _sweeping(ranks: list[subprocess.Popen]) -> Iterator[None]:
    """At the end, remove what ranks that were killed have left in shared memory (sync.transport):
    torch's own process that does so may have been killed with them."""
    try:
        yield
    finally:
        for rank in ranks:
            if rank.poll() is not None:
                for left in SHARED_MEMORY.glob(f"torch_{rank.pid}_*"):
                    with suppress(OSError):  # or it would hide how the run ended
                        left.unlink()


def _stop(
    ranks: list[subprocess.Popen], signum: int, leads: bool, problem: Callable[[], str | None]
) -> int:
    asked = time.monotonic()

    def insist(*_) -> None:
        if time.monotonic() - asked > SAME_WISH_SECONDS:
            _kill(ranks)

    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, insist)
    if leads and ranks:
        ranks[0].send_signal(signum)
    _wait(ranks, problem, None, leads)
    return 128 + signum


def _environment(seats: Seats) -> dict[str, str]:
    here = len(seats.ranks)
    threads = max(1, (os.cpu_count() or 1) // here)
    return os.environ | {
        "WORLD_SIZE": str(seats.world_size),
        "LOCAL_WORLD_SIZE": str(here),
        BEGAN_VARIABLE: str(BEGAN),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        **seats.rendezvous,
    }


def _start(
    command: list[str], rank: int, seats: Seats, environment: dict[str, str], log_dir: Path
) -> subprocess.Popen:
    log_dir.mkdir(parents=True, exist_ok=True)
    output = None if rank == 0 else open(log_dir / f"rank_{rank}.log", "w")  # noqa: SIM115
    launcher, libc = os.getpid(), ctypes.CDLL(None)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank - seats.ranks.start)}

    def prepare() -> None:
        # A shell starts a background job with ctrl-c ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # A warning that comes before the rank listens for it must not end it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if rank != 0:
            # Slurm tells all; rank 0 decides when the others stop.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        return subprocess.Popen(
            command,
            env=environment | place,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,  # the terminal's ctrl-c is this process's to pass on
            preexec_fn=prepare,
        )
    finally:
        if output is not None:
            output.close()


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped in here, unless they were ignored before."""

    def stop(signum, _frame) -> None:
        raise Stopped(signum)

    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for signum, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def _noting(warning: TimeWarning) -> Iterator[None]:
    previous = signal.signal(signal.SIGUSR1, warning.note)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)


def _wait(
    ranks: list[subprocess.Popen],
    problem: Callable[[], str | None],
    warning: TimeWarning | None,
    leads: bool,
) -> int | None:
    """Which of `ranks` is to blame, or ELSEWHERE, or None when all succeeded; all have ended by
    then."""
    while True:
        if warning is not None and leads:
            warning.pass_on(ranks[0])
        if (what := problem()) is not None:
            print(error_text(what), file=sys.stderr)
            _end(ranks, leads, patience=NOTICE_SECONDS)
            return ELSEWHERE
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            # Who is told of a failure may well end before rank 0 has closed what it owns.
            told = EXIT_CONSEQUENCE in codes or codes[0]
            _end(ranks, leads, patience=GRACE_SECONDS if told else NOTICE_SECONDS)
            return _to_blame(codes, [rank.returncode for rank in ranks])
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def _to_blame(first: list[int | None], last: list[int]) -> int:
    """Of the ranks that failed at first, or later if these only felt the consequence: one that
    was killed, else rank 0, which speaks for all where all fail alike."""
    for codes in (first, last):
        failed = [i for i, code in enumerate(codes) if code and code != EXIT_CONSEQUENCE]
        if failed:
            # Rank 0 shows a mistake of the user's, which every rank may have found.
            if last[0] == 2 and codes[failed[0]] == 2:
                return 0
            return next((i for i in failed if (codes[i] or 0) < 0), failed[0])
    return next(i for i, code in enumerate(last) if code)


def _explain(failed: int, code: int, log_dir: Path) -> None:
    in_order = (EXIT_REQUEUE, 128 + signal.SIGINT, 128 + signal.SIGTERM)
    if (failed == 0 and code > 0) or code in in_order:
        return  # its own words stand above
    how = f"failed with exit code {code}"
    if code < 0:
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            how += "; if nobody did so, the machine ran out of memory (see dmesg)"
    lines = []
    if failed != 0:
        log = log_dir / f"rank_{failed}.log"
        with suppress(OSError):
            lines = _newest_error(log.read_text(errors="replace").splitlines())
        how += f"; the end of {log}:" if lines else f"; {log} is empty"
    print(error_text("\n".join([f"rank {failed} {how}", *lines])), file=sys.stderr)


def _newest_error(lines: list[str]) -> list[str]:
    """What a rank said of why it ends, else the last lines."""
    said = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    if not said or len(lines) - said[-1] > SHOWN_LINES:
        return lines[-SHOWN_LINES:]
    end = said[-1] + 1
    while end < len(lines) and lines[end].startswith(INDENT):
        end += 1
    return lines[said[-1] : end]


def _end(ranks: list[subprocess.Popen], leads: bool, patience: float = 0.0) -> None:
    _wait_for(ranks, patience)
    if leads and ranks:
        _kill(ranks[1:])
        # Rank 0 may have to close what it owns.
        if ranks[0].poll() is None:
            ranks[0].terminate()
        _wait_for(ranks[:1], GRACE_SECONDS)
    _kill(ranks)


def _wait_for(ranks: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)


def _kill(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()
