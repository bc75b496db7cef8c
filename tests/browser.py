"""A headless Chromium, driven over two pipes by its DevTools protocol: no driver, no port."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from select import select
from typing import Any

from debian import install

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-quic", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT_S = 30.0


class BrowserError(Exception):
    """The browser has ended, does not answer, or says that it cannot."""


@cache
def why_no_browser() -> str | None:
    """What keeps tests from having a browser, after installing one where that may be done."""
    if program() is not None:
        return None
    if os.geteuid() != 0:
        return f"{NAMES[0]} not found, and only root may install it (apt-get install {NAMES[0]})"
    if (failure := install(NAMES[:1])) is not None:
        return f"{NAMES[0]} not found, and {failure}"
    return None if program() else f"{NAMES[0]} not found"


def program() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator["Browser"]:
    """A browser with an empty profile, ended with all of its processes."""
    path = program()
    assert path is not None
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", shell, path, *FLAGS, f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            os.close(ours_out)  # at which it ends
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_in)


class Browser:
    """Sends commands, one at a time, and keeps what happens meanwhile."""

    def __init__(self, reads: int, writes: int):
        self._reads, self._writes = reads, writes
        self._buffer = b""
        self._last_id = 0
        self.events: dict[str, list[dict[str, Any]]] = {}

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a command. Raises BrowserError: it failed, or nothing came in time."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.setdefault(answer.get("sessionId", ""), []).append(answer)

    def _next(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select([self._reads], [], [], max(0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"no answer to {waiting_for} in {TIMEOUT_S:g} s")
            if not (read := os.read(self._reads, 1 << 16)):
                raise BrowserError(f"the browser ended before it answered {waiting_for}")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def page(self, *, width: int = 1280, height: int = 900, phone: bool = False) -> "Page":
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height, phone=phone)
        return page


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def open(self, address: str) -> None:
        """Go there, and return when all of it has loaded."""
        if error := self.send("Page.navigate", url=address).get("errorText"):
            raise BrowserError(f"{address}: {error}")
        self.wait(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Return the value of the expression as soon as it is truthy.

        Raises TimeoutError: it never was.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := self.run(condition)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so within {TIMEOUT_S:g} s: {condition}")
            self.run("new Promise((done) => setTimeout(done, 20))")
        return value

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip

    def tap(self, x: float, y: float) -> None:
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def close(self) -> None:
        self.send("Page.close")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """PNG of what is in view, or of the whole page."""
        options: dict[str, Any] = {}
        if whole:
            root = "document.documentElement"
            size = self.run(f"({{width: {root}.clientWidth, height: {root}.scrollHeight}})")
            options = {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "scale": 1, **size}}
        image = self.send("Page.captureScreenshot", **options)
        path.write_bytes(base64.b64decode(image["data"]))

    @property
    def problems(self) -> list[str]:
        """Everything the page has put on its console, and every exception."""
        return [
            json.dumps(event["params"])
            for event in self._events
            if event["method"]
            in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]

    @property
    def requests(self) -> list[str]:
        """The address of everything that was asked for, the page itself included."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    @property
    def _events(self) -> list[dict[str, Any]]:
        self.run("0")  # reads what has happened since
        return self._browser.events.get(self._session, [])
