"""A Redis of the test's own: nothing on disk, ended by its process ID."""

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import pytest
import redis

from tests.waiting import eventually_sync

EXECUTABLE = shutil.which("redis-server")


class RedisServer:
    """A redis-server on a unix socket in a folder of its own; needs no port. Use as a context."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-redis-")
        self._socket = Path(self._folder.name) / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Returns once the server answers."""
        if EXECUTABLE is None:
            pytest.skip("redis-server is not installed")
        self._process = subprocess.Popen(
            [
                EXECUTABLE,
                "--port",
                "0",
                "--unixsocket",
                str(self._socket),
                "--save",
                "",
                "--appendonly",
                "no",
            ],
            cwd=self._folder.name,
            stdout=subprocess.DEVNULL,
        )
        eventually_sync(self._answers)

    def pause(self) -> None:
        """The server stops in its tracks: connections stay open and nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the server at once, paused or not; all its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def client(self) -> "redis.Redis":
        """A blocking client for looking at the server from outside."""
        return redis.Redis.from_url(self.url)

    def num_calls(self, command: str) -> int:
        """How often the server has run a command since it started."""
        with self.client() as client:
            stats = client.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "the server is not running"
        return self._process

    def _answers(self) -> bool:
        assert self._running().poll() is None, "redis-server ended by itself"
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
