"""Drives headless Chromium over its DevTools protocol through a pair of pipes: no driver program and no package is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--mute-audio", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
WAIT_S = 30.0


def find_chromium() -> str | None:
    """The browser: LUCE_CHROMIUM, or the first known name on PATH."""
    return os.environ.get("LUCE_CHROMIUM") or next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser process. Messages are JSON, each ended by a zero byte."""

    def __init__(self, program: str, profile: str) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()

        def connect() -> None:
            # the browser reads descriptor 3 and writes descriptor 4; neither pipe end may be overwritten on the way
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            high = [os.dup2(fd, 100 + i) for i, fd in enumerate((commands, answers))]
            for fd, target in zip(high, (3, 4), strict=True):
                os.dup2(fd, target)
                os.close(fd)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._ids = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result. Raises RuntimeError with the browser's message."""
        number = next(self._ids)
        reply = self._replies[number] = queue.SimpleQueue()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = reply.get(timeout=WAIT_S)
        del self._replies[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, **view: Any) -> Page:
        """A new page, with `view` as in `Page.view`."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        self._listeners[session] = page.on_event
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.view(**view)
        page.call("Page.navigate", url=url)
        return page

    def close(self) -> None:
        """End the browser."""
        try:
            self.call("Browser.close")
            self._process.wait(15)
        except (OSError, RuntimeError, queue.Empty, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        self._reader.join(5)
        os.close(self._answers)

    def _read(self) -> None:
        held = b""
        while data := os.read(self._answers, 1 << 16):
            *messages, held = (held + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    if reply := self._replies.get(message["id"]):
                        reply.put(message)
                elif listener := self._listeners.get(message.get("sessionId", "")):
                    listener(message["method"], message["params"])


class Page:
    """A page: what a person does on it, and what went wrong in it (`troubles`) and where it asked (`requests`)."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.troubles: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command for this page."""
        return self._browser.call(method, self._session, **parameters)

    def on_event(self, method: str, event: dict[str, Any]) -> None:
        """Note exceptions, errors in the log and requests."""
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.troubles.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.troubles.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def view(self, width: int = 1280, height: int = 900, *, phone: bool = False, dark: bool = False) -> None:
        """Choose the window's size, touch input and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def js(self, expression: str) -> Any:
        """The value of an expression; promises are awaited. Raises AssertionError with the page's exception."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"].get("exception", answer)
        return answer["result"].get("value")

    def wait(self, expression: str, what: str = "") -> Any:
        """The expression's value, as soon as it is true. AssertionError when it does not become so."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.js(expression)):
            assert time.monotonic() < deadline, (
                f"waited in vain: {what or expression}\n{self.js('document.body.innerText')}"
            )
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, which must be what lies there."""
        spot = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}});"
            "const r = e.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;"
            "return e.contains(document.elementFromPoint(x, y)) ? [x, y] : null; })()"
        )
        assert spot, f"{selector}: hidden, or covered by something else"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Put the cursor into a field and write."""
        self.click(selector)
        self.call("Input.insertText", text=text)

    def press(self, key: str, **more: Any) -> None:
        """Press a key by its name."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
                      **({"text": text} if kind == "keyDown" and text else {}), **more)  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """Save what is visible as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """Close the page."""
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    with tempfile.TemporaryDirectory(prefix="luce-chromium-", ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.close()
