"""Runs a server and takes its whole process group down when the trainer dies, however it dies.

Run as a script: guard.py TRAINER_PID COMMAND... It leads the group. The kernel tells it of the
trainer's end; nothing else would, after a kill -9. To bind only the server itself to the trainer
would not do: its own children are on their own until each has started up.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def bind_to_parent(signum: int, parent: int) -> None:
    """Ask for `signum` when the parent dies, which it may already have done."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def main() -> int:
    trainer, command = int(sys.argv[1]), sys.argv[2:]
    # A polite stop is sent to the whole group; the server decides when it is done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda *_: os.killpg(0, signal.SIGKILL))
    bind_to_parent(signal.SIGHUP, trainer)
    guard = os.getpid()

    def prepare() -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        # Slurm's warning before the time limit goes to every process of a job.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        bind_to_parent(signal.SIGKILL, guard)

    code = subprocess.Popen(command, preexec_fn=prepare).wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
