"""Spawning, recognizing and ending real processes; strangers are left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cli.processes import ProcessRecord, command_line, reap, spawn, start_ticks, stop
from tests.waiting import eventually_sync

# Ends on nothing but SIGKILL, and says when it has begun not to.
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[ProcessRecord]:
    record = spawn(["sleep", "600"], os.environ, "sleep", tmp_path / "sleep.log", tmp_path)
    yield record
    stop([record], drain_s=5)


def test_a_started_process_lives_and_ends_on_request(started: ProcessRecord) -> None:
    assert started.is_alive()
    assert stop([started], drain_s=5) == []
    assert not started.is_alive()


def test_a_process_outside_our_session_does_not_get_our_terminals_signals(started: ProcessRecord) -> None:
    assert os.getsid(started.pid) == started.pid


def test_what_does_not_end_is_killed_after_its_drain(tmp_path: Path) -> None:
    log = tmp_path / "log"
    record = spawn([sys.executable, "-c", STUBBORN], os.environ, "python", log, tmp_path)
    eventually_sync(lambda: log.read_text() == "on\n")
    assert stop([record], drain_s=0.2) == [record]
    assert not record.is_alive()


def test_output_is_appended_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("one", "two"):
        record = spawn(["echo", word], os.environ, "echo", log, tmp_path)
        eventually_sync(lambda record=record: not record.is_alive())  # type: ignore[misc]
        reap(record.pid)
    assert log.read_text() == "one\ntwo\n"


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["true"])
    eventually_sync(lambda: start_ticks(child.pid) is None)
    assert Path(f"/proc/{child.pid}").exists()  # not collected yet
    child.wait()


def test_a_pid_that_was_given_to_another_process_is_not_ours(started: ProcessRecord) -> None:
    assert started.started is not None
    before = replace(started, started=started.started - 1)
    assert not before.is_alive()
    before.send(signal.SIGKILL)
    assert stop([before], drain_s=0.1) == []
    assert started.is_alive()


def test_without_a_start_time_command_line_and_folder_must_match(
    started: ProcessRecord, tmp_path: Path
) -> None:
    lost = replace(started, started=None)
    assert lost.is_alive()
    assert not replace(lost, marker="services.decode").is_alive()
    assert not replace(lost, folder=tmp_path / "elsewhere").is_alive()


def test_this_very_test_run_is_a_stranger(tmp_path: Path) -> None:
    """A stale record whose PID now belongs to us: were it believed, this run would end here."""
    stop([ProcessRecord(os.getpid(), "services.decode", None, tmp_path)], drain_s=0.1)
    stop([ProcessRecord(os.getpid(), "services.decode", 1, tmp_path)], drain_s=0.1)


def test_a_dead_pid_says_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert start_ticks(child.pid) is None
    assert command_line(child.pid) == []
    ProcessRecord(child.pid, "true", None, Path("/")).send(signal.SIGKILL)
