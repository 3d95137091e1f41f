"""Processes that outlive the command that started them: spawn, recognize, stop.

Invariant: a signal goes only to a process that is provably the one started here. A PID alone proves
nothing after a crash or a reboot, so it is compared with the start time recorded beside it or, where
that record is lost, with its command line and working directory. Zombies count as dead.

Knows nothing of what the processes do.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One started process, as it stands in `stack.json`.

    Attributes:
        marker: a word of the process's command line, for example `services.decode`.
        started: start time in clock ticks since boot (`/proc/<pid>/stat`); None if the record is lost.
    """

    pid: int
    marker: str
    started: int | None
    folder: Path

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        started = start_ticks(self.pid)
        if started is None:
            return False
        if self.started is not None:
            return started == self.started
        where = _working_folder(self.pid)
        return self.marker in command_line(self.pid) and where in (self.folder, self.folder / ".run")

    def send(self, signum: signal.Signals) -> None:
        """Signals the process if it is still ours.

        The descriptor pins the process between the check and the signal, so that a PID which is
        given away in that moment gets nothing.
        """
        try:
            pinned = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.is_alive():
                signal.pidfd_send_signal(pinned, signum)
        except ProcessLookupError:
            return
        finally:
            os.close(pinned)


def start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None if it is dead or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything; proc(5), field 3 on
    return None if fields[0] in "ZX" else int(fields[19])


def command_line(pid: int) -> list[str]:
    """Arguments of a live process; empty if it is dead."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
    # redis-server joins its title with blanks and a leading path may stand before its name
    return [word.rpartition("/")[2] for argument in arguments for word in argument.split()]


def _working_folder(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True)
    except OSError:
        return None


def spawn(
    command: Sequence[str], environment: Mapping[str, str], marker: str, log_path: Path, folder: Path
) -> ProcessRecord:
    """Starts a process in a session of its own, stdin closed, output appended to a log file."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # A child cannot be gone before it has been reaped, so its start time can always be read.
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    process.returncode = 0  # nobody waits on this object: it must not warn when it is collected
    return ProcessRecord(process.pid, marker, int(stat[19]), folder.resolve())


def reap(pid: int) -> None:
    """Collects a dead child, so that it leaves no zombie; anyone else's child is left alone."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def stop(records: Sequence[ProcessRecord], drain_s: float) -> list[ProcessRecord]:
    """Asks processes to end, waits for their drain, kills what is left. Returns the killed ones."""
    for record in records:
        record.send(signal.SIGTERM)
    remaining = _wait_gone(records, drain_s)
    for record in remaining:
        record.send(signal.SIGKILL)
    _wait_gone(remaining, 5.0)
    return remaining


def _wait_gone(records: Sequence[ProcessRecord], seconds: float) -> list[ProcessRecord]:
    deadline = time.monotonic() + seconds
    remaining = list(records)
    while True:
        for record in remaining:
            reap(record.pid)
        remaining = [record for record in remaining if record.is_alive()]
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(_POLL_S)
