"""Restarts what dies: `python -m cli.supervisor`, started by `baton up --restart`, ended by `baton down`.

Reads the plan from stdin, so that addresses and settings stay what they were. A process that keeps
dying is restarted ever more slowly, at most every 30 s. Knows nothing of readiness: routers do.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from cli import stack
from cli.plan import Launch
from cli.processes import reap
from cli.run_folder import Entry, RunFolder

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_STABLE_AFTER_S = 60.0
_LOOK_EVERY_MS = 200


class Supervised:
    """One process, and how patient to be with it."""

    def __init__(self, planned: Launch, entry: Entry) -> None:
        self.planned = planned
        self.entry = entry
        self._started = time.monotonic()
        self._delay_s = _FIRST_DELAY_S
        self._due: float | None = None

    def look(self, run: RunFolder, now: float) -> None:
        """Notices a death, and restarts once the delay has passed."""
        reap(self.entry.record.pid)
        if self._due is None and not self.entry.record.is_alive():
            if now - self._started > _STABLE_AFTER_S:
                self._delay_s = _FIRST_DELAY_S
            self._due = now + self._delay_s
            print(f"{self.planned.name} died; restart in {self._delay_s:g} s", flush=True)
            self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
        elif self._due is not None and now >= self._due:
            self.entry = stack.launch(run, self.planned, os.environ)
            self._started, self._due = now, None
            print(f"{self.planned.name} restarted as PID {self.entry.record.pid}", flush=True)


def main() -> None:
    """Runs until SIGTERM."""
    stop_reader, stop_writer = os.pipe()
    os.set_blocking(stop_writer, False)
    signal.set_wakeup_fd(stop_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    run = RunFolder(Path.cwd())
    entries = {entry.name: entry for entry in run.entries()}
    supervised = [
        Supervised(planned, entries[planned.name])
        for planned in (
            Launch(fields["name"], fields["address"], tuple(fields["command"]), fields["variables"])
            for fields in json.load(sys.stdin)
        )
    ]
    poller = select.poll()
    poller.register(stop_reader, select.POLLIN)
    while not poller.poll(_LOOK_EVERY_MS):
        for process in supervised:
            process.look(run, time.monotonic())


if __name__ == "__main__":
    main()
