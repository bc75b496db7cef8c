"""Requests to the servers, repeated until an answer is of use."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import orjson

from megatron_opo.errors import OnPolicyError, ServerError
from megatron_opo.recipe import RolloutConfig
from megatron_opo.redaction import API_KEY_VARIABLE
from megatron_opo.rollout.answers import BadAnswerError, count
from megatron_opo.rollout.health import Health, ServerLostError
from megatron_opo.rollout.keeper import Keeper
from megatron_opo.rollout.process import Server
from megatron_opo.rollout.wire import call, no_answer, open_session, shorten

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 10.0
ABORT_TIMEOUT_S = 10.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class RolloutStats:
    """Of the latest `generate`: requests sent, those that were repeats, and what came of them.

    `prompt_tokens` counts each prompt once, `read_tokens` once for each of its samples, and
    `cached_tokens` those of the latter that the servers did not compute. `arrivals` are the groups'
    times, in seconds from the start, in their order.
    """

    requests: int = 0
    retries: int = 0
    samples: int = 0
    prompt_tokens: int = 0
    read_tokens: int = 0
    cached_tokens: int = 0
    response_tokens: int = 0
    given_up: int = 0
    seconds: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    @property
    def tail_seconds(self) -> float:
        """From when nine tenths of the groups were there to the end."""
        if not self.arrivals:
            return 0.0
        return self.seconds - self.arrivals[math.ceil(0.9 * len(self.arrivals)) - 1]


class NoAnswerError(Exception):
    """A request that failed in a way another attempt may not, perhaps as its server is lost."""


class Requests:
    """Those of one `generate`, which share a session, what is known of the servers, and `stats`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        health: Health,
        config: RolloutConfig,
        stats: RolloutStats,
    ):
        self._session = session
        self._health = health
        self._config = config
        self.stats = stats
        self._in_flight: Counter[Server] = Counter()

    async def ask(
        self,
        servers: Sequence[Server],
        body: dict[str, Any],
        read: Callable[[Any, Server], Any],
        weight: int,
        what: str,
        before: dict[str, Any] | None = None,
        last: str = "",
    ) -> Any:
        """POST /generate until an attempt gives a usable answer, on another server if there is one.

        An attempt that failed because its server was lost does not count.

        Args:
            servers: which may be asked; none is that does not serve.
            weight: samples it asks for, to balance the servers by.
            before: a body to be answered before by the same server; what it says does not matter.
            last: URL of a server that has the beginning of what it is asked in its cache.

        Raises:
            ServersLostError: none of the servers serves.
            ServerError: no attempt gave a usable answer, or the request itself is refused.
        """
        health = self._health
        attempts = self._config.retries + 1
        failures: list[str] = []
        avoid: set[Server] = set()
        while len(failures) < attempts:
            server = self._choose(servers, avoid, last)
            self._in_flight[server] += weight
            self.stats.requests += 1
            try:
                with server.spans.on(server.name, what, samples=weight) as about:
                    if before is not None:
                        await health.unless_lost(server, self._post(server, before))
                    answer = await health.unless_lost(server, self._post(server, body))
                    result = read(answer, server)
                    about["response_tokens"] = count(answer, "completion_tokens")
                health.note_answer(server, None)
                return result
            except ServerLostError:
                self.stats.retries += 1
                continue
            except OnPolicyError as error:
                health.lose(server, str(error), end=False)
                self.stats.retries += 1
                continue
            except (NoAnswerError, BadAnswerError) as error:
                problem = error
            finally:
                self._in_flight[server] -= weight
            if isinstance(problem, BadAnswerError) or await health.is_still_there(server):
                health.note_answer(server, str(problem))
                failures.append(f"{server.name} ({server.url}): {problem}")
                avoid.add(server)
            if len(failures) < attempts:
                self.stats.retries += 1
                await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** len(failures)))
        raise ServerError(
            f"{what} got no usable answer in {attempts} attempts (rollout.retries "
            f"{self._config.retries}):\n" + "\n".join(failures)
        )

    def _choose(self, servers: Sequence[Server], avoid: set[Server], last: str) -> Server:
        """The last one or the least busy serving server, one that has not failed this request if
        possible.

        Raises:
            ServersLostError: none of them serves.
        """
        serving = self._health.serving(servers)
        fresh = [server for server in serving if server not in avoid]
        return min(
            fresh or serving, key=lambda server: (server.url != last, self._in_flight[server])
        )

    async def _post(self, server: Server, body: dict[str, Any]) -> Any:
        timeout_s = self._config.request_timeout_s
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"Content-Type": "application/json", **server.headers}
        data = orjson.dumps(body)
        try:
            async with self._session.post(
                server.url + "/generate", data=data, headers=headers, timeout=timeout
            ) as got:
                content, status = await got.read(), got.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NoAnswerError(no_answer(server, "/generate", error, timeout_s)) from None
        if status == 200:
            try:
                return orjson.loads(content)
            except ValueError:
                shown = shorten(content.decode(errors="replace"))
                raise BadAnswerError(f"not JSON: {shown!r}") from None
        text = content.decode(errors="replace")
        if status >= 500 or status in (408, 429):
            raise NoAnswerError(f"status {status}: {shorten(text)}")
        if status in (401, 403):
            raise ServerError(
                f"{server.name} ({server.url}) wants another API key (status {status}): set "
                f"{API_KEY_VARIABLE} to the one it was started with"
            )
        # The request itself is at fault; no other attempt would do better.
        raise ServerError(
            f"{server.name} ({server.url}) refused a request with status {status}: {shorten(text)}"
        )


Work = Callable[[Requests, T], Coroutine[Any, Any, R]]


async def for_each(
    items: Sequence[T],
    work: Work[T, R],
    keeper: Keeper,
    stats: RolloutStats,
    *,
    samples_each: int,
    size: Callable[[T], int],
    is_enough: Callable[[Collection[int]], bool] = lambda _: False,
) -> dict[int, R]:
    """`work` for all items, those of the largest size first, as many at once as the recipe allows.

    Args:
        is_enough: asked whenever one is done, with the places in `items` of all that are; if so,
            the others are given up.

    Returns:
        The results by their places, in the order in which they came.
    """
    room = asyncio.Semaphore(max(1, keeper.config.max_concurrent_requests // samples_each))
    results: dict[int, R] = {}

    async def bounded(requests: Requests, place: int) -> None:
        async with room:
            results[place] = await work(requests, items[place])

    async with open_session() as session:
        health = Health(keeper, session)
        requests = Requests(session, health, keeper.config, stats)
        order = sorted(range(len(items)), key=lambda place: -size(items[place]))
        tasks = [asyncio.create_task(bounded(requests, place)) for place in order]
        enough = asyncio.create_task(_until(tasks, lambda: is_enough(results)))
        watch = asyncio.create_task(health.watch())
        try:
            await asyncio.wait({enough, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not enough.done():
                watch.result()  # it only ends by an error
            enough.result()
            return results
        finally:
            given_up = [task for task in tasks if not task.done()]
            for task in (*given_up, enough, watch):
                task.cancel()
            await asyncio.gather(*tasks, enough, watch, return_exceptions=True)
            if given_up:
                await _abort_requests(session, keeper.serving)


async def _until(tasks: Sequence[asyncio.Task[None]], is_enough: Callable[[], bool]) -> None:
    """All are done, or enough of them, or one has failed; that is raised."""
    for done in asyncio.as_completed(tasks):
        await done
        if is_enough():
            return


async def _abort_requests(session: aiohttp.ClientSession, servers: Sequence[Server]) -> None:
    """Free the servers from requests whose answers nobody waits for."""
    body = {"rid": "", "abort_all": True}
    await asyncio.gather(
        *(
            call(session, server, "/abort_request", body, timeout_s=ABORT_TIMEOUT_S)
            for server in servers
        ),
        return_exceptions=True,
    )
