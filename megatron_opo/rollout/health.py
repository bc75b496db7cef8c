"""Do the servers answer? Asked beside the requests while these run, and before each sync."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp

from megatron_opo.errors import ServerError
from megatron_opo.rollout.keeper import Keeper, ServersLostError
from megatron_opo.rollout.process import Server
from megatron_opo.rollout.wire import open_session

T = TypeVar("T")

# Of processes; those of other nodes are known by files that all nodes share.
LOOK_S = 1.0
# For one that need not answer yet.
GLANCE_S = 5.0
# A server that gave so many unusable answers in a row, and none that is of use, needs a new start.
MOST_UNUSABLE = 8
# It samples a token, or is answered with one that is sampled anyway.
HEALTH = "/health"
REFUSED = "refuses connections: nothing listens there any more"
# It is answered by the scheduler, also while it is paused, or has given its memory back.
STATE = "/server_info"

OnWait = Callable[[Server, float, str], None]


class ServerLostError(Exception):
    """The server was lost before it had answered."""


class Health:
    """Watches over the serving servers while requests run; made for one batch of these."""

    def __init__(self, keeper: Keeper, session: aiohttp.ClientSession):
        self._keeper = keeper
        self._session = session
        loop = asyncio.get_running_loop()
        self._lost: dict[Server, asyncio.Future[str]] = {
            server: loop.create_future() for server in keeper.serving
        }
        self._unusable: Counter[Server] = Counter()

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        await asyncio.gather(self._look(), *(self._poll(s) for s in self._lost))

    async def unless_lost(self, server: Server, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the server is lost before.

        Raises:
            ServerLostError: that happened.
        """
        task, lost = asyncio.ensure_future(work), self._lost[server]
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ServerLostError
        finally:
            task.cancel()

    async def is_still_there(self, server: Server) -> bool:
        """After a request that it did not answer: waits until it is found healthy or lost."""
        while not self._lost[server].done():
            try:
                problem = await self.unless_lost(server, self._ask(server))
            except ServerLostError:
                break
            if problem is None:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def note_answer(self, server: Server, problem: str | None) -> None:
        """Whether an answer was of use (`problem` None)."""
        if problem is None:
            self._unusable[server] = 0
            return
        self._unusable[server] += 1
        if self._unusable[server] == MOST_UNUSABLE:
            said = f"{server.name} ({server.url}) gave {MOST_UNUSABLE} unusable answers in a row"
            self.lose(server, f"{said}, the last: {problem}", end=True)

    def lose(self, server: Server, reason: str, *, end: bool) -> None:
        """Cancel what it was asked, and ask nothing more; see `Keeper.lose`."""
        if not self._lost[server].done():
            self._lost[server].set_result(reason)
            self._keeper.lose(server, reason, end=end)

    def serving(self, servers: Sequence[Server]) -> list[Server]:
        """Those of `servers` that serve; raises ServersLostError if there is none."""
        if serving := [server for server in servers if server in self._keeper.serving]:
            return serving
        reasons = [lost.result() for lost in self._lost.values() if lost.done()]
        raise ServersLostError("\n".join(["no server is left:", *reasons]))

    async def _look(self) -> None:
        while True:
            self._keeper.look()
            for server, lost in self._lost.items():
                if server not in self._keeper.serving and not lost.done():
                    lost.set_result(f"{server.name} ({server.url}) has ended")
            await asyncio.sleep(LOOK_S)

    async def _poll(self, server: Server) -> None:
        healthy = time.monotonic()
        while not self._lost[server].done():
            asked = time.monotonic()
            problem = await self._ask(server)
            now = time.monotonic()
            if problem is None:
                healthy = now
            elif now - healthy > self._keeper.health_limit_s or problem == REFUSED:
                self.lose(server, f"{server.name} ({server.url}) {problem}", end=True)
            await asyncio.sleep(max(LOOK_S, asked + self._keeper.config.health_every_s - now))

    async def _ask(self, server: Server) -> str | None:
        return await ask(self._session, server, HEALTH, self._keeper.health_limit_s)


async def ask(
    session: aiohttp.ClientSession, server: Server, path: str, limit_s: float
) -> str | None:
    """None when it answers; else what is wrong, to go on after the server's name."""
    try:
        timeout = aiohttp.ClientTimeout(total=limit_s)
        async with session.get(
            server.url + path, headers=server.headers, timeout=timeout
        ) as answer:
            if answer.status < 500:
                return None
            return f"answered {path} with status {answer.status}"
    except TimeoutError:
        return f"did not answer {path} for {limit_s:.0f} s"
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, ConnectionRefusedError):
            return REFUSED
        return f"cannot be reached: {error}"
    except aiohttp.ClientError as error:
        return f"did not answer {path}: {type(error).__name__}: {error}"


async def find_answering(keeper: Keeper) -> list[Server]:
    """Those that can be given weights. A serving one that does not answer is lost, and one that
    should have started long ago is ended."""
    keeper.look()
    running = keeper.running
    async with open_session() as session:
        problems = await asyncio.gather(
            *(
                ask(
                    session,
                    server,
                    STATE,
                    keeper.health_limit_s if server in keeper.serving else GLANCE_S,
                )
                for server in running
            )
        )
    for server, problem in zip(running, problems, strict=True):
        said = f"{server.name} ({server.url}) {problem}"
        if problem is not None and server in keeper.serving:
            keeper.lose(server, said, end=True)
        elif problem is not None and keeper.is_late(server):
            since = f"{keeper.config.start_timeout_s:.0f} s after its start"
            keeper.lose(server, f"{said}, {since} (rollout.start_timeout_s)", end=True)
    return [server for server, problem in zip(running, problems, strict=True) if problem is None]


async def wait_for_one(keeper: Keeper, on_wait: OnWait | None) -> list[Server]:
    """Those that can be given weights, as soon as there is one.

    Raises:
        ServerError: none is left that could come.
    """
    start = time.monotonic()
    while not (found := await find_answering(keeper)):
        seconds = time.monotonic() - start
        awaited = [
            server
            for server in keeper.servers
            if not keeper.is_over(server)
            and (server.launched or seconds < keeper.config.start_timeout_s)
        ]
        if not awaited:
            raise ServerError("\n".join(["no server is left:", *map(_describe, keeper.servers)]))
        await _wait(awaited, seconds, on_wait)
    return found


async def wait_for_starting(keeper: Keeper, on_wait: OnWait | None) -> list[Server]:
    """Those that answer, as soon as no launched one is on its way to that."""
    start = time.monotonic()
    while True:
        found = await find_answering(keeper)
        starting = [s for s in keeper.running if s.launched and s not in found]
        if not starting:
            return found
        await _wait(starting, time.monotonic() - start, on_wait)


async def _wait(awaited: Sequence[Server], seconds: float, on_wait: OnWait | None) -> None:
    if on_wait is not None:
        for server in awaited:
            on_wait(server, seconds, server.log_tail(1))
    await asyncio.sleep(LOOK_S)


def _describe(server: Server) -> str:
    if server.launched:
        return server.describe_exit()
    return f"{server.name} ({server.url}) does not answer"
