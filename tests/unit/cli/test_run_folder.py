"""The record of what was started: written at once, found again after a crash."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.processes import ProcessRecord, spawn, stop
from cli.run_folder import Entry, RunFolder
from tests.waiting import eventually_sync

LOCKER = """
import pathlib, sys
from cli.run_folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1])).locked():
    print("mine")
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.path.mkdir()
    return folder


@pytest.fixture
def entry(run: RunFolder) -> Iterator[Entry]:
    """A process whose command line looks like a decode worker's."""
    log = run.log_path("decode-0")
    command = [sys.executable, "-c", "import time; time.sleep(600)", "services.decode"]
    record = spawn(command, os.environ, "services.decode", log, run.parent)
    yield Entry("decode-0", "127.0.0.1:1", record, log)
    stop([record], drain_s=5)


def test_stack_json_is_what_others_read(run: RunFolder, entry: Entry) -> None:
    run.add(entry)
    written = json.loads((run.path / "stack.json").read_text())["decode-0"]
    started = entry.record.started
    assert written == {
        "address": "127.0.0.1:1",
        "pid": entry.record.pid,
        "log": ".run/decode-0.log",
        "started": started,
    }
    assert (run.path / "decode-0.pid").read_text() == f"{entry.record.pid}\n"
    assert run.entries() == [entry]
    assert (entry.role, entry.number) == ("decode", 0)


def test_forgotten_entries_leave_their_log(run: RunFolder, entry: Entry) -> None:
    run.add(entry)
    run.forget("decode-0")
    assert run.entries() == []
    assert sorted(path.name for path in run.path.iterdir()) == ["decode-0.log"]


@pytest.mark.parametrize("damage", ["", "{", "not json"])
def test_a_lost_stack_json_is_made_up_for_by_pid_files(run: RunFolder, entry: Entry, damage: str) -> None:
    run.add(entry)
    (run.path / "stack.json").write_text(damage)
    (found,) = run.entries()
    assert found.record.pid == entry.record.pid
    assert found.record.started is None
    eventually_sync(found.record.is_alive)  # its command line is there once it has begun


def test_nonsense_in_a_pid_file_is_no_process(run: RunFolder) -> None:
    (run.path / "decode-0.pid").write_text("soon")
    assert run.entries() == []


def test_an_empty_folder_has_no_entries(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).entries() == []


def test_the_supervisor_stands_apart(run: RunFolder) -> None:
    run.write_pid("supervisor-0", 1)
    assert run.entries() == []
    assert run.supervisor() == ProcessRecord(1, "cli.supervisor", None, run.parent)


def test_the_lock_keeps_a_second_command_waiting(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked():
        other = subprocess.Popen(
            [sys.executable, "-c", LOCKER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    assert other.communicate(timeout=20)[0] == "mine\n"
