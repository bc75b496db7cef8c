"""Which servers hold the current weights, and a new start for those that ended."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_opo.errors import ServerError
from megatron_opo.recipe import RolloutConfig
from megatron_opo.rollout.process import Server

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class ServersLostError(ServerError):
    """Servers that were in use are lost. After a sync with others the same can be asked again."""


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


@dataclass
class _Life:
    """`since` its latest start; `ending` when it was asked to; `due` again at that time; `over`
    when it is not started any more. Times are those of time.monotonic."""

    restarts: int = 0
    since: float = field(default_factory=time.monotonic)
    ending: bool = False
    due: float | None = None
    over: bool = False


class Keeper:
    """Keeps `servers`, all of the run's, and `serving`, those that hold the current weights.

    A launched server that ends is started again: 1 s after its first end, 2 s after its second, up
    to 60 s, and no more than rollout.max_restarts times in the life of this object. It serves again
    when it has been given weights (`Rollout.sync`). One given by URL is never started, only asked
    again at each sync.

    Every method returns at once. Only what calls `look` often makes the servers come back.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        config: RolloutConfig,
        device: str,
        warn: Callable[[str], None],
    ):
        """`device` is what the servers compute on, "cpu" or "cuda"."""
        self.servers = list(servers)
        self.serving = list(servers)
        self.config = config
        self.health_limit_s = config.health_limit_s(device)
        self._warn = warn
        self._lives = {server: _Life() for server in servers}

    @property
    def restarts(self) -> int:
        """Of all servers so far."""
        return sum(life.restarts for life in self._lives.values())

    @property
    def running(self) -> list[Server]:
        """Those that have not ended and shall not, whether or not they answer."""
        lives = self._lives.items()
        return [server for server, life in lives if server.exit_code is None and not life.ending]

    def look(self) -> None:
        """Take note of servers that have ended, and start those whose time has come."""
        now = time.monotonic()
        for server, life in self._lives.items():
            if life.over or server.exit_code is None:
                continue
            if server in self.serving:
                self.serving.remove(server)
            if life.due is None:
                self._plan(server, life, now)
            elif now >= life.due:
                self._start(server, life, now)

    def lose(self, server: Server, reason: str, *, end: bool) -> None:
        """Do not ask it before it has been given weights again.

        Args:
            reason: a sentence about it, for the log.
            end: whether it must be ended, if it was launched, and so be started again.
        """
        if server in self.serving:
            self.serving.remove(server)
        life = self._lives[server]
        if server.exit_code is not None:
            self.look()
        elif end and server.launched:
            if not life.ending:
                life.ending = True
                self._warn(
                    f"{reason}\nIt is ended; the last lines of its log:\n{server.log_tail()}"
                )
                server.end()
        else:
            self._warn(f"{reason}\nNothing more is asked of it before the next sync")

    def is_late(self, server: Server) -> bool:
        """Whether its latest start was longer than rollout.start_timeout_s ago."""
        seconds = time.monotonic() - self._lives[server].since
        return server.launched and seconds > self.config.start_timeout_s

    def is_over(self, server: Server) -> bool:
        """Whether it has ended for good."""
        return self._lives[server].over

    def _plan(self, server: Server, life: _Life, now: float) -> None:
        ended = f"{server.name} ({server.url}) has ended with code {server.exit_code}"
        what = ended if life.ending else server.describe_exit()
        if life.restarts >= self.config.max_restarts:
            life.over = True
            self._warn(f"{what}\nIt is not started again (rollout.max_restarts is used up)")
            return
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**life.restarts)
        life.due = now + pause
        self._warn(
            f"{what}\nIt is started again in {pause:.0f} s ({life.restarts + 1} of "
            f"rollout.max_restarts {self.config.max_restarts})"
        )

    def _start(self, server: Server, life: _Life, now: float) -> None:
        life.restarts += 1
        life.since, life.due, life.ending = now, None, False
        try:
            server.launch_again()
        except OSError as error:
            self._warn(f"{server.name} ({server.url}) cannot be started: {error}")
