"""What servers are doing, as far as their logs tell: for people, nothing depends on it."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_opo.rollout.process import Server

READ_BYTES = 20_000
# A line of SGLang's log, of which it writes one for every so many tokens of a batch.
_RATE = re.compile(rb"gen throughput \(token/s\): (\d+(?:\.\d+)?)")
_STAMPED = re.compile(r"\[\d{4}-\d\d-\d\d[^]]*\]\s*(.*)")


class TokenRate:
    """Tokens that the servers sample a second, from now on: what they say of themselves, else what
    has come of it (`count`) over the time it took."""

    def __init__(self, servers: Sequence[Server]):
        logs = [server.log for server in servers if server.log is not None]
        self._offsets = {log: _size(log) for log in logs}
        self._began = time.monotonic()
        self._tokens = 0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def shown(self) -> str:
        """Such as "5,301 tokens/s", or "" when nothing is known yet."""
        rates = [_newest_rate(log, offset) for log, offset in self._offsets.items()]
        said = [rate for rate in rates if rate is not None]
        seconds = time.monotonic() - self._began
        rate = sum(said) if said else self._tokens / max(seconds, 1e-9)
        return f"{rate:,.0f} tokens/s" if rate else ""


def waiting_for(server: Server, last_line: str) -> str:
    """A server that does not answer yet, and what it says of that."""
    said = _STAMPED.match(last_line)  # others are of Python's warnings, cut in the middle
    return f"{server.name} says: {said[1]}" if said and said[1] else f"waiting for {server.name}"


def _newest_rate(log: Path, offset: int) -> float | None:
    """Of the lines behind `offset`."""
    try:
        with log.open("rb") as file:
            file.seek(max(offset, _size(log) - READ_BYTES))
            rates = _RATE.findall(file.read(READ_BYTES))
    except OSError:
        return None
    return float(rates[-1]) if rates else None


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
