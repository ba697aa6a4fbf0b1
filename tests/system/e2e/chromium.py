"""A headless Chromium in a test's hand, over its debugging pipe.

    with chromium(where) as browser:
        browser.open("http://127.0.0.1:9464/", width=360, scheme="dark")
        assert browser.value("document.title") == "..."

The few commands of the DevTools protocol that the tests need, by descriptors 3 and 4,
one JSON object and a NUL each.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)

PATIENCE_S = 60.0


class Browser:
    """One tab."""

    def __init__(self, tell_fd: int, hear_fd: int) -> None:
        self._tell_fd = tell_fd
        self._hear_fd = hear_fd
        self._heard = b""
        self._last = 0
        self._session: str | None = None
        self.console: list[str] = []
        tab = self._do("Target.createTarget", url="about:blank")["targetId"]
        attached = self._do("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._do(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1200, scheme: str = "light") -> None:
        """Load a page at a width, in pixels, in the light or the dark."""
        self._do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._do("Emulation.setEmulatedMedia", features=[feature])
        self._do("Page.navigate", url=url)
        self.wait(
            "document.readyState !== 'loading' && location.href !== 'about:blank'"
        )

    def value(self, expression: str) -> Any:
        """Return what an expression is in the page."""
        result = self._do(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )["result"]
        return result.get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            select.select([self._hear_fd], [], [], 0.05)

    def picture(self, path: Path) -> None:
        """Save what there is to see as PNG."""
        shot = self._do("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _do(self, method: str, **params: object) -> dict[str, Any]:
        self._last += 1
        message: dict[str, object] = {
            "id": self._last,
            "method": method,
            "params": params,
        }
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._tell_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Log.entryAdded":
                self.console.append(answer["params"]["entry"]["text"])
            elif answer.get("method") == "Runtime.exceptionThrown":
                self.console.append(str(answer["params"]["exceptionDetails"]))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._heard:
            patience = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._hear_fd], [], [], patience)
            assert ready, "the browser says nothing"
            more = os.read(self._hear_fd, 65_536)
            assert more, "the browser is gone"
            self._heard += more
        text, _, self._heard = self._heard.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer


def _pipe_with_high(end: int) -> tuple[int, int]:
    """Make a pipe of which one end has a number above those that the shell sets."""
    ends = os.pipe()
    high = fcntl.fcntl(ends[end], fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(ends[end])
    return high, ends[1 - end]


@contextmanager
def chromium(where: Path) -> Iterator[Browser]:
    """Start Chromium with an empty profile in ``where``; skips the test without it."""
    if PROGRAM is None:
        pytest.skip("chromium is not installed")
    theirs_in, tell = _pipe_with_high(0)
    theirs_out, hear = _pipe_with_high(1)
    words = " ".join(OPTIONS)
    script = (
        f"exec 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-;"
        f' exec "$0" {words} --user-data-dir="$1" about:blank'
    )
    process = subprocess.Popen(
        ["/bin/bash", "-c", script, PROGRAM, str(where / "profile")],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(tell, hear)
    finally:
        os.close(tell)
        os.close(hear)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
