"""The `.run` folder: what was started here, for `baton` itself and for anyone who looks.

- `stack.json` maps `<role>-<n>` to `{address, pid, log, started}` and is the record that counts;
- `<role>-<n>.pid` holds the PID alone, `<role>-<n>.log` the output;
- `lock` serializes `up` and `down`; the kernel lets go of it when the holder dies.

Invariant: a process stands in the folder from the moment it exists, so that `down` finds it even if
`up` was killed in between.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.processes import ProcessRecord

SUPERVISOR = "supervisor-0"  # kept out of stack.json: it serves nobody and has no address

# A word of each role's command line.
MARKERS = {
    "redis": "redis-server",
    "prefill": "services.prefill",
    "decode": "services.decode",
    "gateway": "gateway",
    "supervisor": "cli.supervisor",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One process of the stack."""

    name: str
    address: str
    record: ProcessRecord
    log: Path

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])


class RunFolder:
    """`.run` under the folder that `baton` is called in."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent.resolve()
        self.path = self.parent / ".run"
        self._stack = self.path / "stack.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder against another `up` or `down`; waits for the one that has it."""
        self.path.mkdir(exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def log_path(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def entries(self) -> list[Entry]:
        """Every process of `stack.json`, plus any that only its pid file remembers."""
        found: dict[str, Entry] = {}
        for name, fields in self._read().items():
            record = ProcessRecord(fields["pid"], _marker(name), fields.get("started"), self.parent)
            found[name] = Entry(name, fields["address"], record, self.parent / fields["log"])
        for pid_file in sorted(self.path.glob("*-*.pid")):
            name = pid_file.stem
            if name in found or name == SUPERVISOR:
                continue
            if remembered := self._from_pid_file(name):
                found[name] = Entry(name, "", remembered, self.log_path(name))
        return list(found.values())

    def supervisor(self) -> ProcessRecord | None:
        """The supervisor, if one was started; it may be dead."""
        return self._from_pid_file(SUPERVISOR)

    def add(self, entry: Entry) -> None:
        """Records a started process (again, when it was restarted)."""
        stack = self._read()
        stack[entry.name] = {
            "address": entry.address,
            "pid": entry.record.pid,
            "log": str(entry.log.relative_to(self.parent)),
            "started": entry.record.started,
        }
        self._write(stack)
        self.write_pid(entry.name, entry.record.pid)

    def write_pid(self, name: str, pid: int) -> None:
        (self.path / f"{name}.pid").write_text(f"{pid}\n")

    def forget(self, name: str) -> None:
        """Removes a process that has ended; its log stays to be read."""
        stack = self._read()
        if stack.pop(name, None) is not None:
            self._write(stack)
        (self.path / f"{name}.pid").unlink(missing_ok=True)

    def _from_pid_file(self, name: str) -> ProcessRecord | None:
        try:
            pid = int((self.path / f"{name}.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return ProcessRecord(pid, _marker(name), None, self.parent)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            stack: dict[str, dict[str, Any]] = json.loads(self._stack.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return stack

    def _write(self, stack: dict[str, dict[str, Any]]) -> None:
        if not stack:
            self._stack.unlink(missing_ok=True)
            return
        draft = self._stack.with_suffix(".tmp")
        draft.write_text(json.dumps(stack, indent=2) + "\n")
        os.replace(draft, self._stack)


def _marker(name: str) -> str:
    return MARKERS.get(name.rpartition("-")[0], name)
