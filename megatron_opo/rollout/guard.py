"""Runs a server and takes everything of it down when the trainer asks for it or dies, however.

Run as a script: guard.py TRAINER_PID COMMAND... It leads the server's process group; SIGHUP ends
it, which the kernel also sends at the trainer's end; nothing else would tell of a kill -9. To bind
only the server itself to the trainer would not do: its own children are on their own until each has
started up. A killed server cleans nothing up, so what it leaves in shared memory and in its
temporary directory is removed here. Its key stands on no command line, where every user of the
machine could read it, and what the server logs passes through here without it.
"""

import ctypes
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
SHARED_MEMORY = "/dev/shm/"
LOOK_SECONDS = 5.0
END_SECONDS = 5.0
OUTPUT_SECONDS = 2.0
# A server makes sockets in its directory, and Linux takes 107 bytes for the path of one.
LONGEST_PARENT = 60
# As in redaction.py; this script imports nothing but the standard library.
API_KEY_VARIABLE = "MEGATRON_OPO_API_KEY"
# As in sglang_plugin.py.
SHARED_NAME_VARIABLE = "MEGATRON_OPO_SHARED_NAME"
HIDDEN = b"(hidden)"


class Hangup(Exception):
    """The server is to be ended."""


def bind_to_parent(signum: int, parent: int) -> None:
    """Ask for `signum` when the parent dies, which it may already have done."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for pid in processes():
        with suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            state, _, pgrp = stat.read().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(pid)
    return found


def shared_files(pids: Iterable[int]) -> set[int]:
    """Inodes of files in shared memory that these processes have mapped or open. (Semaphores are
    mapped under a name that they soon lose for another.)"""
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            with open(f"/proc/{pid}/maps") as maps:
                found |= {int(line.split()[4]) for line in maps if SHARED_MEMORY in line}
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(path := f"/proc/{pid}/fd/{number}").startswith(SHARED_MEMORY):
                        found.add(os.stat(path).st_ino)
    return found


def remove(shared: set[int], group: int, name: str) -> None:
    """Remove the files of `shared` that no process outside of the group uses, and those that have
    the server's own name in theirs, which may have been made after the last look. Those that have
    one open keep it."""
    inside = set(members(group))
    removed = shared - shared_files(pid for pid in processes() if pid not in inside)
    with suppress(FileNotFoundError):
        for entry in list(os.scandir(SHARED_MEMORY)):
            with suppress(OSError):
                if entry.inode() in removed or name in entry.name:
                    os.unlink(entry.path)


def end_group(shared: set[int], name: str) -> None:
    """Kill the group but for this process, then remove what it has in shared memory."""
    own = os.getpid()
    deadline = time.monotonic() + END_SECONDS
    while (rest := [pid for pid in members(own) if pid != own]) and time.monotonic() < deadline:
        shared |= shared_files(rest)
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    remove(shared, own, name)


def scratch_parent() -> str:
    """Where a server's own temporary directory is made."""
    usual = tempfile.gettempdir()
    return usual if len(usual.encode()) <= LONGEST_PARENT else "/tmp"


def server_environment(scratch: str) -> dict[str, str]:
    """Temporary files go to `scratch`, but what was compiled is kept for the next start."""
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    own = {"TMPDIR": scratch, SHARED_NAME_VARIABLE: os.path.basename(scratch)}
    return {"TORCHINDUCTOR_CACHE_DIR": compiled} | os.environ | own


def write_config(scratch: str, key: str) -> list[str]:
    """The options that name a file with the key, which only this user can read."""
    path = os.path.join(scratch, "server.yaml")
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(f'api-key: "{key}"\n')
    return ["--config", path]


def copy_output(stream: int, key: bytes) -> None:
    """From the server to standard output, with the key hidden."""
    rest = b""
    while chunk := os.read(stream, 1 << 16):
        text = (rest + chunk).replace(key, HIDDEN)
        # The chunk may end within the key.
        kept = next((n for n in range(len(key) - 1, 0, -1) if text.endswith(key[:n])), 0)
        text, rest = text[: len(text) - kept], text[len(text) - kept :]
        write(text)
    write(rest)


def write(text: bytes) -> None:
    while text:
        text = text[os.write(1, text) :]


def hang_up(*_) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise Hangup


def main() -> int:
    trainer, command = int(sys.argv[1]), sys.argv[2:]
    for signum in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    guard = os.getpid()
    shared: set[int] = set()

    def look(*_) -> None:
        shared.update(shared_files(members(guard)))

    def asked_to_end(*_) -> None:
        # By Slurm, with all processes of a job. The server will end by itself; there may be no time
        # after that, and what it uses is seen only before.
        look()
        remove(shared, guard, os.path.basename(scratch))

    def prepare() -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        # Slurm's warning before the time limit goes to every process of a job.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        bind_to_parent(signal.SIGKILL, guard)

    key = os.environ.pop(API_KEY_VARIABLE)
    scratch = tempfile.mkdtemp(prefix=f"opo_server_{guard}_", dir=scratch_parent())
    signal.signal(signal.SIGTERM, asked_to_end)
    command += write_config(scratch, key)
    output = None
    code = -signal.SIGKILL
    try:
        signal.signal(signal.SIGHUP, hang_up)
        bind_to_parent(signal.SIGHUP, trainer)
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=prepare,
            env=server_environment(scratch),
        )
        assert server.stdout is not None
        output = threading.Thread(
            target=copy_output, args=(server.stdout.fileno(), key.encode()), daemon=True
        )
        output.start()
        while server.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                code = server.wait(LOOK_SECONDS)
            look()
    except Hangup:
        pass
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        end_group(shared, os.path.basename(scratch))
        if output is not None:
            output.join(OUTPUT_SECONDS)
        shutil.rmtree(scratch, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
