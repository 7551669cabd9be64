"""A headless Chromium, driven over its debugging pipe: no library between, and nothing to install but the browser."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_S = 30.0
PICTURE_HEIGHT_MAX = 1180


def chromium() -> str | None:
    """Path of the machine's browser, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. ``errors`` gathers what the page logs as errors, uncaught exceptions too."""

    def __init__(self, binary: str, *, width: int = 1280, height: int = 1600) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True)
        read_by_browser, self._to = os.pipe()
        self._from, written_by_browser = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4, each ended by a NUL.
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip

        def place_pipe() -> None:
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_by_browser, written_by_browser)]
            for end, number in zip(ends, (3, 4), strict=True):
                os.dup2(end, number)
                os.close(end)

        self._process = subprocess.Popen(
            [binary, *arguments],
            close_fds=False,
            preexec_fn=place_pipe,  # noqa: PLW1509
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_browser)
        os.close(written_by_browser)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.errors: list[str] = []
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        """The first true value of an expression."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {script}"
            time.sleep(0.05)
        return value

    def look(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """As a screen of that size, and a system of that colour scheme, would show it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """A key that writes nothing: Tab, Enter, Escape."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    def screenshot(self, path: Path, *, height_max: float = 1e9) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height_max), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


def page(*, width: int = 1280, height: int = 800) -> Browser:
    """A page of the machine's browser; where there is none, the test is skipped."""
    binary = chromium()
    if binary is None:
        pytest.skip("there is no Chromium here (Debian, Ubuntu: apt install chromium)")
    return Browser(binary, width=width, height=height)


def enter_key(browser: Browser, key: str) -> None:
    """Type a key into the frame's field."""
    choose(browser, "key", key)


def choose(browser: Browser, field: str, value: str) -> None:
    """Give a field a value, as a person does."""
    browser.run(
        f"(field => {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event('change')); }})"
        f"(document.getElementById({json.dumps(field)}))"
    )


def picture(browser: Browser, name: str) -> None:
    """Into the folder HEADRACE_SCREENSHOTS, if that is named."""
    if directory := os.environ.get("HEADRACE_SCREENSHOTS"):
        browser.screenshot(Path(directory) / f"{name}.png", height_max=PICTURE_HEIGHT_MAX)
