"""Starts a planned stack and waits until every process says that it is ready; ends one.

Invariant: `start` leaves a whole stack or none. Whatever goes wrong, an interrupt included, what was
started is stopped again.
"""

import time
from collections.abc import Callable, Mapping

from cli import interrupts
from cli.errors import CommandError, StartFailed
from cli.plan import Launch, Plan
from cli.probes import Answer, probe
from cli.processes import ProcessRecord, reap, spawn, stop
from cli.run_folder import SUPERVISOR, Entry, RunFolder

_PROBE_EVERY_S = 0.1
_SAY_EVERY_S = 5.0
_LOG_TAIL_LINES = 20
_LOG_LINE_CHARACTERS = 600  # a traceback in one JSON line would fill the screen
_DRAIN_MARGIN_S = 5.0

# Gateways end their streams while workers still generate, and write to a log that is still there.
_ENDING_ORDER = (("gateway",), ("decode", "prefill"), ("redis",))

Progress = Callable[[str, str], None]  # process name, what happened


def launch(run: RunFolder, planned: Launch, environment: Mapping[str, str]) -> Entry:
    """Starts one process and records it."""
    log = run.log_path(planned.name)
    record = spawn(planned.command, {**environment, **planned.variables}, planned.marker, log, run.parent)
    entry = Entry(planned.name, planned.address, record, log)
    run.add(entry)
    return entry


def start(
    run: RunFolder, plan: Plan, environment: Mapping[str, str], timeout_s: float, progress: Progress
) -> list[Entry]:
    """Starts every process and waits until all are ready.

    Raises:
        StartFailed: a process died or was not ready in time; nothing is left running.
        KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP; the same.
    """
    entries: list[Entry] = []
    with interrupts.held_back() as raise_if_interrupted:
        try:
            for planned in plan.launches:
                run.log_path(planned.name).unlink(missing_ok=True)
                entries.append(launch(run, planned, environment))
                progress(planned.name, "started")
                raise_if_interrupted()
            _wait_ready(entries, timeout_s, progress, raise_if_interrupted)
        except BaseException:
            stop([entry.record for entry in entries], drain_s=2.0)
            for entry in entries:
                run.forget(entry.name)
            raise
    return entries


def _wait_ready(
    entries: list[Entry], timeout_s: float, progress: Progress, raise_if_interrupted: Callable[[], None]
) -> None:
    started = said_at = time.monotonic()
    deadline = started + timeout_s
    waiting = list(entries)
    answers: dict[str, Answer] = {}
    while waiting:
        for entry in entries:
            reap(entry.record.pid)
            if not entry.record.is_alive():
                raise StartFailed(f"{entry.name} died before it was ready ({entry.log})", log_tail(entry))
        for entry in list(waiting):
            raise_if_interrupted()
            answers[entry.name] = probe(entry.role, entry.address)
            # A gateway could begin with some of its workers; what `up` promises is all of them.
            if answers[entry.name].ready and not answers[entry.name].num_unseen:
                waiting.remove(entry)
                progress(entry.name, "ready")
        if waiting and time.monotonic() >= deadline:
            late = waiting[0]
            why = answers[late.name].detail or late.log
            raise StartFailed(f"{late.name} was not ready after {timeout_s:.0f} s ({why})", log_tail(late))
        if waiting and time.monotonic() - said_at >= _SAY_EVERY_S:
            said_at = time.monotonic()
            progress(waiting[0].name, f"not ready yet ({said_at - started:.0f} s)")
        if waiting:
            time.sleep(_PROBE_EVERY_S)


def log_tail(entry: Entry) -> str:
    """The last lines of a process's log."""
    try:
        lines = entry.log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(line[:_LOG_LINE_CHARACTERS] for line in lines[-_LOG_TAIL_LINES:])


def running(run: RunFolder) -> list[Entry]:
    """The entries whose process lives."""
    return [entry for entry in run.entries() if entry.record.is_alive()]


def end(run: RunFolder, environment: Mapping[str, str], progress: Progress) -> int:
    """Ends every recorded process, by PID, in an order that loses no reply. Returns how many lived.

    A process gets `BATON_DRAIN_S` (25) seconds after SIGTERM, then SIGKILL. Records of dead
    processes are cleared; a stranger that has got one of their PIDs is left alone.
    """
    drain_s = _drain_s(environment)
    supervisor = run.supervisor()
    if supervisor is not None:  # first, or it would restart what is ended here
        stop([supervisor], drain_s=5.0)
        run.forget(SUPERVISOR)
    num_ended = 0
    entries = run.entries()
    roles = {role for stage in _ENDING_ORDER for role in stage}
    others = tuple({entry.role for entry in entries} - roles)
    for stage in (*_ENDING_ORDER, others):
        members = [entry for entry in entries if entry.role in stage]
        alive = [entry for entry in members if entry.record.is_alive()]
        killed = stop([entry.record for entry in alive], drain_s)
        for entry in alive:
            progress(entry.name, "killed: it did not end in time" if entry.record in killed else "ended")
        for entry in members:
            if entry.record.is_alive():
                raise CommandError(f"{entry.name} (PID {entry.record.pid}) survives SIGKILL")
            run.forget(entry.name)
        num_ended += len(alive)
    return num_ended


def record_supervisor(run: RunFolder, record: ProcessRecord) -> None:
    run.write_pid(SUPERVISOR, record.pid)


def _drain_s(environment: Mapping[str, str]) -> float:
    try:
        return float(environment.get("BATON_DRAIN_S", "25")) + _DRAIN_MARGIN_S
    except ValueError:
        raise CommandError(f"BATON_DRAIN_S: {environment['BATON_DRAIN_S']!r} is no number") from None
