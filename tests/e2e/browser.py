"""A real Chromium without a window, driven through its debugging pipe: no driver, no other package.

`--remote-debugging-pipe` speaks the DevTools protocol as JSON on two descriptors (3 in, 4 out), each
message ended by a NUL.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
)


class Page:
    """One open page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write = os.fdopen(to_browser, "wb", buffering=0)
        self._read = os.fdopen(from_browser, "rb", buffering=0)
        self._numbers = itertools.count(1)
        self._received = b""
        self._attachment: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._attachment = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def goto(self, url: str) -> None:
        """Opens an address and waits until its document is there."""
        self._call("Page.navigate", url=url)
        while self.evaluate("document.readyState") != "complete":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def prefer(self, feature: str, value: str) -> None:
        """Sets a media feature, for example `prefers-color-scheme`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": feature, "value": value}])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Any other command of the DevTools protocol."""
        return self._call(method, **parameters)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        request: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._attachment is not None:
            request["sessionId"] = self._attachment
        self._write.write(json.dumps(request).encode() + b"\0")
        while True:  # events of the browser come in between; nobody asked for them
            message = self._next_message()
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            more = self._read.read(65536)
            if not more:
                raise AssertionError("the browser has gone")
            self._received += more
        first, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def close(self) -> None:
        self._write.close()
        self._read.close()


@contextmanager
def open_page(folder: Path) -> Iterator[Page]:
    """Starts a browser whose profile lives in `folder`; ends it afterwards."""
    assert BINARY is not None
    command_reader, command_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    # The shell puts the two ends where Chromium looks for them, then becomes it.
    script = f'exec "$@" 3<&{command_reader} 4>&{answer_writer}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", BINARY, *_FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(command_reader, answer_writer),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_reader)
    os.close(answer_writer)
    page = Page(command_writer, answer_reader)
    try:
        yield page
    finally:
        page.close()  # it ends when its pipe does
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
