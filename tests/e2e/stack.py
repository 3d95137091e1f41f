"""Real stacks for end-to-end tests: `baton up` in a folder of the test's own, ended by `baton down`."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import eventually_sync


def free_ports(count: int) -> int:
    """The first of `count` adjacent free loopback ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@dataclass(slots=True)
class Stack:
    """A running stack, seen from outside."""

    folder: Path
    environment: dict[str, str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def baton(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs one `baton` command in the stack's folder."""
        result = subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=180,
            check=False,
        )
        if check and result.returncode:
            raise AssertionError(f"baton {' '.join(arguments)}:\n{result.stdout}\n{result.stderr}")
        return result

    def status(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.baton("status", "--json").stdout)
        return rows

    def blocks_used(self) -> dict[str, int]:
        """Blocks held by live sequences, per worker."""
        return {
            f"{row['role']}-{row['n']}": row["blocks_used"]
            for row in self.status()
            if row["role"] in ("prefill", "decode")
        }

    def process(self, name: str) -> dict[str, Any]:
        """An entry of stack.json, for example `decode-0`."""
        entry: dict[str, Any] = json.loads((self.folder / ".run" / "stack.json").read_text())[name]
        return entry

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Sends a real signal to one of the stack's processes."""
        os.kill(self.process(name)["pid"], signum)

    def wait_ready(self) -> None:
        eventually_sync(lambda: httpx.get(f"{self.url}/readyz").status_code == 200, timeout=30)


def clean_environment() -> dict[str, str]:
    """This process's, without settings of a stack but the place of fetched models."""
    kept = ("BATON_CACHE_DIR",)
    return {
        name: value for name, value in os.environ.items() if not name.startswith("BATON_") or name in kept
    }


@contextmanager
def running_stack(folder: Path, *flags: str, gateways: int = 1, **variables: str) -> Iterator[Stack]:
    """Starts a stack; `variables` are `BATON_*` settings without the prefix, in lower case."""
    port = free_ports(gateways)
    environment = clean_environment() | {f"BATON_{name.upper()}": value for name, value in variables.items()}
    stack = Stack(folder, environment, port)
    try:
        stack.baton("up", "--port", str(port), "--gateways", str(gateways), *flags)
        yield stack
    finally:
        stack.baton("down", check=False)
