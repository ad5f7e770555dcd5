"""Page in headless Chromium, controlled by the DevTools protocol over pipes.

https://chromedevtools.github.io/devtools-protocol/: JSON messages that end with a zero byte.
Chromium reads them from file descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-dev-shm-usage", "--disable-breakpad",
    "--hide-scrollbars", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader",
)  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40, "ArrowRight": 39}


def chromium() -> str | None:
    """Return the path of the browser: that of `CHROME_PATH`, or one on PATH."""
    names = [os.environ["CHROME_PATH"]] if os.environ.get("CHROME_PATH") else BROWSERS
    return next(filter(None, map(shutil.which, names)), None)


class Page:
    """A page in a browser of its own. As a context manager it ends the browser."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="attn-export-test-page-")
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "page",
                str(chromium()), *FLAGS, *sandbox, f"--user-data-dir={self._folder}",
                "about:blank",
            ],
            pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "HOME": self._folder, "TMPDIR": self._folder},
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "DOM", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript, after its promise is resolved."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def wait(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            shown = self.evaluate("document.body?.innerText")
            assert time.monotonic() < end, f"{expression} is never true; {shown}; {self.errors}"
            time.sleep(0.05)

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the window, and the preferred colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> bytes:
        """Write a PNG of the whole page, and return its bytes."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        data = base64.b64decode(shot["data"])
        path.write_bytes(data)
        return data

    def press(self, key: str) -> None:
        """Press a key."""
        named = {"key": key, "code": "Space" if key == " " else key}
        code = {"windowsVirtualKeyCode": KEYS[key]}
        text = {" ": " ", "Enter": "\r"}.get(key)
        typed = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **code, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named, **code)

    def drop(self, path: Path) -> None:
        """Drop a file or folder on the page."""
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=100, y=100, data=data)

    def accessible(self) -> list[tuple[str, str]]:
        """Return the role and the name of each node that a screen reader sees, in order."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "").strip())
            for node in nodes
            if not node["ignored"]
        ]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = os.read(self._from, 1 << 16)
            assert data, "Chromium has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
