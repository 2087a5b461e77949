"""A headless Chromium that tests drive over its debugging protocol. Tests that need it skip where it is not installed.

with Browser(tmp_path) as browser:
    browser.open(page.as_uri(), width=390)
    assert browser.run("document.title") == "first: rollouts"
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: `apt-get install chromium`")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PATIENCE_S = 90.0  # a busy machine starts it slowly
LOADED = "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', () => done()))"


class Browser:
    """One tab of a browser with a new profile in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._profile = folder / "chromium"
        self._numbers = itertools.count(1)
        self.errors: list[str] = []  # of the page's scripts, and what its policy refused

    def __enter__(self) -> Self:
        assert PROGRAM is not None
        command = [PROGRAM, *FLAGS, f"--user-data-dir={self._profile}", "--remote-debugging-port=0", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._runner = asyncio.Runner()
        self._runner.run(self._connect(self._address()))
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._session.close())
        self._runner.close()
        self._process.kill()
        self._process.wait()

    def _address(self) -> str:
        """The socket of the tab."""
        file, until = self._profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if file.is_file() and (port := file.read_text().partition("\n")[0]):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
                if tabs:
                    return str(tabs[0]["webSocketDebuggerUrl"])
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start")

    async def _connect(self, address: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address, max_msg_size=0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._runner.run(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._socket.receive_json()
                self._listen(message)
                if message.get("id") == number:
                    assert "error" not in message, message
                    return dict(message["result"])

    def _listen(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])

    def open(self, address: str, *, width: int = 1280, height: int = 900) -> None:
        """Load a page at a size in CSS pixels, and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.run(LOADED)

    def run(self, expression: str) -> Any:
        """The value of an expression of the page; waits for a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")
