"""Processes of the suite's own, as `baton up` would start them, with real signals.

Invariant: only processes that were started here are signalled, through their handles; a dead one keeps
its PID until it is collected here.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cli import ports
from tests.e2e.stack import clean_environment

READY_S = 150.0  # for many processes that load torch at once, from a cold disk on a busy machine
_ROOT = Path(__file__).parents[2]
_MARK = "BATON_TEST_RUN"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServedProcess:
    """One worker or gateway on an address of its own, which it keeps when it is started again.

    Args:
        module: what `python -m` runs.
        settings: `BATON_*` variables without the prefix, in lower case.
        folder: for its log.
    """

    def __init__(
        self, name: str, module: str, address: str, folder: Path, settings: dict[str, object]
    ) -> None:
        self.name = name
        self.address = address
        self.mark = secrets.token_hex(8)  # in its environment, and so in that of its children
        self._command = (sys.executable, "-m", module)
        self._log_path = folder / f"{name}.log"
        self._environment = clean_environment() | {
            "OMP_NUM_THREADS": "1",
            _MARK: self.mark,
            "BATON_LISTEN": address,
            **{f"BATON_{key.upper()}": str(value) for key, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self._started().pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    def kill(self) -> None:
        """`kill -9`; returns once it is dead."""
        self._started().kill()
        self._started().wait()

    def stop(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered."""
        self._started().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._started().send_signal(signal.SIGCONT)

    def end(self, timeout_s: float) -> int:
        """SIGTERM; the exit status, which is that of SIGKILL if it did not end in time."""
        process = self._started()
        process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return process.wait()

    def log_tail(self, num_bytes: int = 3000) -> str:
        return self._log_path.read_bytes()[-num_bytes:].decode(errors="replace")

    def _started(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, f"{self.name} was never started"
        return self._process


def free_addresses(count: int) -> list[str]:
    """Loopback addresses that nobody else picks, pytest-xdist's other workers included."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_shares = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    found: set[int] = set()
    while len(found) < count:
        found |= {port for port in ports.pick(count) if port % num_shares == share}
    return [f"{ports.HOST}:{port}" for port in sorted(found)[:count]]


def left_behind(processes: Iterable[ServedProcess]) -> list[int]:
    """PIDs of whoever still runs in the environment of one of these."""
    marks = [f"{_MARK}={process.mark}".encode() for process in processes]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or somebody else's
            continue
        if any(mark in variables for mark in marks):
            found.append(int(folder.name))
    return found
