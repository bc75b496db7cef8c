"""A server as a process: started, ended, started again, on this node or by another's launcher.

Rank 0 decides for all servers. What it wants of one that another node's launcher started, and what
becomes of that, stands in files beside the server's log, each with the number of the start it is
about: server_3.start (wanted), server_3.end (that one is to end), server_3.exit (it has ended, and
its exit code).
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_opo.rollout import guard
from megatron_opo.spans import Spans

# For the guard, which removes what a server leaves.
END_SECONDS = 10.0
# No number, so that what is sampled before the server was given weights is never taken for theirs.
AGAIN = ("--weight-version", "started-again")


@dataclass(eq=False)
class Server:
    """One SGLang server. `process` and `log` are None for a server given by rollout.urls; one that
    another node's launcher started has only a log, on a file system that all nodes share. `node`
    counts the job's nodes; servers given by URL count as the first one's.

    Requests need `api_key`, which whoever can reach the server does not know. They are noted in
    `spans`.

    `process` is the guard that leads the server's process group and exits with its code, or with
    128 and the number of the signal that ended it. `command` and `environment` are the guard's.
    `claim` keeps the port for the server until it listens, and between its ends and new starts.
    """

    name: str
    url: str
    process: subprocess.Popen | None = None
    log: Path | None = None
    node: int = 0
    api_key: str | None = field(default=None, repr=False)
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    claim: socket.socket | None = field(default=None, repr=False)
    owner: int = field(default_factory=os.getpid)
    starts: int = 1
    spans: Spans = field(default_factory=Spans, repr=False)

    @property
    def launched(self) -> bool:
        """By this job, so that it has the model directory's weights at first."""
        return self.log is not None

    @property
    def headers(self) -> dict[str, str]:
        """Of every request to it."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and for a server that this job did not launch."""
        if self.process is not None:
            return self.process.poll()
        if self.log is not None and (told := _read(self.log, ".exit")):
            start, code = told
            return code if start == self.starts else None
        return None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log, or an empty string."""
        if self.log is None or not self.log.is_file():
            return ""
        with self.log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 20_000))
            text = stream.read().decode(errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def describe_exit(self) -> str:
        return (
            f"{self.name} ({self.url}) exited with code {self.exit_code}; the last lines of its "
            f"log {self.log}:\n{self.log_tail()}"
        )

    def launch(self) -> None:
        """Start it for the first time, with an empty log."""
        assert self.log is not None
        self.log.write_bytes(b"")
        self.process = self._run(self.command)

    def launch_again(self) -> None:
        """After it has ended: at the same URL, with the model directory's weights. Its log goes on.

        Raises:
            OSError: it cannot be started.
        """
        assert self.log is not None
        if self.process is None:
            _write(self.log, ".start", self.starts + 1)
        else:
            with suppress(OSError), self.log.open("a") as stream:
                stream.write(f"\n==== started again, {time.strftime('%Y-%m-%d %H:%M:%S')} ====\n")
            self._remove_scratch()
            self.process = self._run((*self.command, *AGAIN))
        self.starts += 1

    def _run(self, command: Sequence[str]) -> subprocess.Popen:
        assert self.log is not None
        with self.log.open("ab") as stream:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                # Under nohup it would miss the wish to end until it listens.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )

    def end(self) -> None:
        """Have it ended, and do not wait for that; without effect on one given by URL."""
        if self.process is None and self.log is not None:
            with suppress(OSError):
                _write(self.log, ".end", self.starts)
        self.ask_to_end()

    def close(self) -> None:
        """Stop all of its processes, if this process started them; a second call does nothing."""
        self.ask_to_end()
        if self.process is not None and self.owner == os.getpid():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._remove_scratch()
        if self.claim is not None:
            self.claim.close()

    def _remove_scratch(self) -> None:
        """A guard that was killed has left it, with the key."""
        assert self.process is not None
        for path in Path(guard.scratch_parent()).glob(f"opo_server_{self.process.pid}_*"):
            shutil.rmtree(path, ignore_errors=True)

    def ask_to_end(self) -> None:
        # A forked child inherits the atexit handler, but the server is not its own to stop.
        if self.process is not None and self.owner == os.getpid() and self.exit_code is None:
            self.process.send_signal(signal.SIGHUP)
            # Who stopped all of its processes stopped the guard, too.
            self.process.send_signal(signal.SIGCONT)


def follow(server: Server) -> bool:
    """By the launcher that started it: do what rank 0 wants of it, and note its exit for rank 0.

    Returns:
        Whether it has ended since the last call.
    """
    assert server.log is not None
    code = server.exit_code
    if code is None:
        if _read(server.log, ".end") == (server.starts,):
            server.ask_to_end()
    elif (wanted := _read(server.log, ".start")) and wanted[0] > server.starts:
        server.launch_again()
    elif _read(server.log, ".exit") != (server.starts, code):
        _write(server.log, ".exit", server.starts, code)
        return True
    return False


def _read(log: Path, kind: str) -> tuple[int, ...] | None:
    with suppress(OSError):
        return tuple(int(word) for word in log.with_suffix(kind).read_text().split())
    return None


def _write(log: Path, kind: str, *numbers: int) -> None:
    partial = log.with_suffix(f"{kind}.partial")
    partial.write_text(" ".join(map(str, numbers)))
    partial.rename(log.with_suffix(kind))


def close_servers(servers: Sequence[Server]) -> None:
    """Stop all of them at the same time."""
    for server in servers:
        server.ask_to_end()
    for server in servers:
        server.close()
