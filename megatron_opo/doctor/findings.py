"""What a check found."""

import subprocess
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]
# Of a program that is asked something: what answers at all answers in less.
COMMAND_SECONDS = 30.0


@dataclass(frozen=True)
class Finding:
    """One line of the screen. A note runs, but not as it could; a problem does not run.

    Example: Finding("open files", "1,024", "note", "servers hold ...: `ulimit -n 65536`").
    `what_to_do` is empty where `status` is "ok".
    """

    name: str
    found: str
    status: Status = "ok"
    what_to_do: str = ""


def judged(name: str, found: str, status: Status, what_to_do: str) -> Finding:
    """`what_to_do` is dropped where all is well."""
    return Finding(name, found, status, "" if status == "ok" else what_to_do)


@dataclass(frozen=True)
class Answer:
    """Of a program that was run; `code` is None if it did not start or did not end."""

    code: int | None
    output: str
    error: str

    @property
    def last_line(self) -> str:
        lines = (self.error.strip() or self.output.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}, and not a word"


def ask(*command: str, seconds: float = COMMAND_SECONDS) -> Answer:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{command[0]} gave no answer within {seconds:.0f} s")
    except OSError as error:
        return Answer(None, "", f"{command[0]} does not run: {error.strerror or error}")
    return Answer(done.returncode, done.stdout, done.stderr)


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
