"""A real headless browser, spoken to over pipes by the DevTools protocol: no driver, no port, no further package.

https://chromedevtools.github.io/devtools-protocol/: messages are JSON objects, each ended by a NUL.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
_SECONDS = 60.0
_SWITCHES = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # CI runs as root, and opens nothing but what the tests wrote.
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """Returns the path of a browser that is installed, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Browser:
    """A running browser. `events` are all that it has told so far."""

    process: subprocess.Popen[bytes]
    commands: int
    answers: int
    events: list[dict[str, Any]] = field(default_factory=list)
    _last: int = 0
    _rest: bytes = b""

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a command; keeps the events that come before it."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        os.write(
            self.commands,
            json.dumps({**message, **({"sessionId": session} if session else {})}).encode() + b"\0",
        )
        while True:
            told = self._next()
            if told.get("id") == self._last:
                assert "error" not in told, f"{method}: {told['error']}"
                return dict(told["result"])

    def wait_for(self, method: str, session: str) -> None:
        """Waits until an event has come."""
        while not any(e["method"] == method and e.get("sessionId") == session for e in self.events):
            self._next()

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        """Opens a page in a tab of its own, and waits until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, url)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        page.resize(width, height)
        page.prefer(dark=dark)
        self.call("Page.navigate", session, url=url)
        self.wait_for("Page.loadEventFired", session)
        return page

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            read = os.read(self.answers, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        if "method" in told:
            self.events.append(told)
        return told


@dataclass(frozen=True)
class Page:
    """A page in a tab."""

    browser: Browser
    session: str
    url: str

    def value(self, expression: str) -> Any:
        """Returns what an expression of JavaScript gives, as JSON. The page's own rules do not hold for it."""
        found = self.browser.call("Runtime.evaluate", self.session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Gives the page a window of this size in CSS pixels."""
        self.browser.call(
            "Emulation.setDeviceMetricsOverride",
            self.session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, *, dark: bool) -> None:
        """Sets what `prefers-color-scheme` says."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.browser.call("Emulation.setEmulatedMedia", self.session, features=[feature])

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        data = self.browser.call("Page.captureScreenshot", self.session, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and what the page's own rules refused."""
        told = []
        for event in self._events():
            method, parameters = event["method"], event["params"]
            if method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                told.append(parameters["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
                "error",
                "warning",
                "assert",
            ):
                told.append(str(parameters["args"]))
            elif method == "Runtime.exceptionThrown":
                told.append(str(parameters["exceptionDetails"]))
        return told

    def requests(self) -> list[str]:
        """What was asked of a network or a disk, besides the page itself."""
        urls = [
            e["params"]["request"]["url"]
            for e in self._events()
            if e["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if url != self.url and not url.startswith("data:")]

    def _events(self) -> Iterator[dict[str, Any]]:
        return (event for event in self.browser.events if event.get("sessionId") == self.session)


@contextlib.contextmanager
def run_browser(binary: str, folder: Path) -> Iterator[Browser]:
    """Runs a browser with an empty profile in `folder`; ends it with all that it started."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    words = [binary, *_SWITCHES, f"--user-data-dir={folder}", "about:blank"]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(
            shell, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log, start_new_session=True
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
