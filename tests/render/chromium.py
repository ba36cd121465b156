# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its DevTools protocol through two pipes: no driver, no port.

`--remote-debugging-pipe` reads commands from file descriptor 3 and answers on 4, each message JSON
that ends with a zero byte. Source: the protocol's own description,
chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 60.0  # for one answer
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The path of a Chromium on this machine, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Tab:
    """One page, its console and what it asked the network for.

    Attributes:
        complaints: Errors and warnings of the console, exceptions, blocked resources.
        requests: Addresses that the page asked for, itself and `data:` left out.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self._address = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        """The next message; an event is noted too."""
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            assert ready, f"Chromium gave no answer in {LIMIT_S:.0f} s"
            more = os.read(self._answers, 1 << 20)
            assert more, "Chromium ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = dict(json.loads(text))
        if "method" in message:
            self._note(message["method"], message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append({"method": method, **params})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]["text"]))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog opened: {params['message']}")
        elif method == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if address != self._address and not address.startswith("data:"):
                self.requests.append(address)

    def wait_for(self, method: str) -> None:
        """Returns when the event came, or had come since the page was opened."""
        while not any(event["method"] == method for event in self._events):
            self._receive()

    def open(self, page: Path) -> None:
        """Loads a file, and returns when it is loaded."""
        for notes in (self._events, self.complaints, self.requests):
            notes.clear()
        self._address = page.as_uri()
        self.call("Page.navigate", url=self._address)
        self.wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; promises are waited for."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def type(self, selector: str, text: str) -> None:
        """Puts the text into an input, as keys would, and waits for the page to follow."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)
        self.run("new Promise((done) => setTimeout(done, 160))")

    def press(self, key: str, text: str = "") -> None:
        """One key, down and up."""
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """The window, in CSS pixels, and what the system says of colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium_tab(program: str) -> Iterator[Tab]:
    """A tab of a Chromium of its own, which ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        theirs_read, commands = _high(os.pipe())
        answers, theirs_write = _high(os.pipe())
        actions = [
            (os.POSIX_SPAWN_DUP2, theirs_read, 3),
            (os.POSIX_SPAWN_DUP2, theirs_write, 4),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        environment = {**os.environ, "TMPDIR": folder}
        arguments = [program, *FLAGS, f"--user-data-dir={folder}"]
        process = os.posix_spawn(program, arguments, environment, file_actions=actions, setpgroup=0)
        os.close(theirs_read)
        os.close(theirs_write)
        try:
            yield Tab(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _high(pipe: tuple[int, int]) -> tuple[int, int]:
    """The pipe at descriptors that are none of the first ten, closed in every child."""
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe)
    for end in pipe:
        os.close(end)
    return high[0], high[1]
