"""HTTP to the servers, with errors that say which server answered what."""

import asyncio
import json
from collections.abc import Awaitable, Iterable
from typing import Any

import aiohttp

from megatron_opo.errors import ServerError
from megatron_opo.rollout.process import Server

SHOWN_CHARACTERS = 500


def open_session() -> aiohttp.ClientSession:
    """No limit on connections: how many requests are in flight is decided elsewhere."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def call(
    session: aiohttp.ClientSession,
    server: Server,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float,
) -> Any:
    """POST `body`, or GET without one, and return the decoded answer (text if it is not JSON).

    Raises:
        ServerError: no answer, a status other than 200, or `success: false` in the answer.
    """
    method = "GET" if body is None else "POST"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        with server.spans.on(server.name, path.partition("?")[0]):
            async with session.request(
                method, server.url + path, json=body, headers=server.headers, timeout=timeout
            ) as response:
                text = await response.text()
                status = response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(no_answer(server, path, error, timeout_s)) from None
    if status != 200:
        raise ServerError(
            f"{server.name} ({server.url}) answered {path} with status {status}: {shorten(text)}"
        )
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    if isinstance(answer, dict) and answer.get("success") is False:
        raise ServerError(
            f"{server.name} ({server.url}) refused {path}: {shorten(str(answer.get('message')))}"
        )
    return answer


async def call_all(
    session: aiohttp.ClientSession,
    servers: list[Server],
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float,
) -> list[Any]:
    """`call` on all servers at once; answers in their order, or the first error."""
    return await asyncio.gather(
        *(call(session, server, path, body, timeout_s=timeout_s) for server in servers)
    )


async def all_of(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all, then raise the first error if there was one."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def no_answer(server: Server, path: str, error: Exception, timeout_s: float) -> str:
    if server.exit_code is not None:
        return server.describe_exit()
    if isinstance(error, TimeoutError):
        return f"{server.name} ({server.url}) did not answer {path} within {timeout_s:.0f} s"
    return f"{server.name} ({server.url}) did not answer {path}: {type(error).__name__}: {error}"


def shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
