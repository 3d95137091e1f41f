"""Starting, watching and ending small real stacks: Redis stands in for processes that get ready."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import stack
from cli.errors import StartFailed
from cli.plan import Launch, Plan
from cli.ports import HOST, pick
from cli.processes import ProcessRecord, spawn, stop
from cli.run_folder import RunFolder
from cli.up import running_url
from tests.waiting import eventually_sync

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


def quiet(name: str, what: str) -> None:
    """Progress that nobody reads."""


def redis_launch(number: int) -> Launch:
    port = str(pick(1)[0])
    command = ("redis-server", "--bind", HOST, "--port", port, "--save", "", "--dir", ".run")
    return Launch(f"redis-{number}", f"{HOST}:{port}", command, {})


def python_launch(name: str, program: str) -> Launch:
    return Launch(name, f"{HOST}:{pick(1)[0]}", (sys.executable, "-c", program, f"services.{name[:-2]}"), {})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path)
    folder.path.mkdir()
    yield folder
    stack.end(folder, {"BATON_DRAIN_S": "0"}, quiet)


def test_start_waits_for_readiness_and_end_leaves_nothing(run: RunFolder) -> None:
    said: list[tuple[str, str]] = []
    plan = Plan((redis_launch(0), redis_launch(1)), ())
    entries = stack.start(run, plan, os.environ, 20, lambda name, what: said.append((name, what)))
    assert {(name, "ready") for name in ("redis-0", "redis-1")} <= set(said)
    assert stack.running(run) == entries == run.entries()
    assert stack.end(run, os.environ, quiet) == 2
    assert not any(entry.record.is_alive() for entry in entries)
    assert run.entries() == []
    assert stack.end(run, os.environ, quiet) == 0


def test_one_that_dies_takes_the_rest_down_and_shows_its_last_words(run: RunFolder) -> None:
    dying = python_launch("decode-0", "raise SystemExit('BATON_BLOCK_SIZE: too large')")
    with pytest.raises(StartFailed, match="decode-0 died") as caught:
        stack.start(run, Plan((redis_launch(0), dying), ()), os.environ, 20, quiet)
    assert caught.value.log_tail == "BATON_BLOCK_SIZE: too large"
    assert stack.running(run) == run.entries() == []


def test_one_that_never_gets_ready_is_named(run: RunFolder) -> None:
    idle = python_launch("gateway-0", "import time; print('thinking', flush=True); time.sleep(600)")
    with pytest.raises(StartFailed, match="gateway-0 was not ready after 1 s") as caught:
        stack.start(run, Plan((redis_launch(0), idle), ()), os.environ, 1, quiet)
    assert "thinking" in caught.value.log_tail
    assert run.entries() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["started", "ready"])
def test_an_interrupt_at_any_moment_leaves_nothing(
    run: RunFolder, signum: signal.Signals, moment: str
) -> None:
    def interrupt(name: str, what: str) -> None:
        if what == moment:
            os.kill(os.getpid(), signum)

    idle = python_launch("gateway-0", "import time; time.sleep(600)")
    handler = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt):
        stack.start(run, Plan((redis_launch(0), idle), ()), os.environ, 20, interrupt)
    assert stack.running(run) == run.entries() == []
    assert signal.getsignal(signum) is handler


def test_end_after_a_crash_knows_strangers_from_its_own(run: RunFolder, tmp_path: Path) -> None:
    """One process was killed, and its PID now belongs to somebody else."""
    entries = stack.start(run, Plan((redis_launch(0), redis_launch(1)), ()), os.environ, 20, quiet)
    os.kill(entries[1].record.pid, signal.SIGKILL)
    stranger = spawn(["sleep", "600"], os.environ, "sleep", tmp_path / "stranger.log", tmp_path)
    try:
        written = json.loads((run.path / "stack.json").read_text())
        written["redis-1"]["pid"] = stranger.pid
        (run.path / "stack.json").write_text(json.dumps(written))
        (run.path / "prefill-0.pid").write_text(f"{stranger.pid}\n")
        assert stack.end(run, os.environ, quiet) == 1
        assert stranger.is_alive()
        assert run.entries() == []
    finally:
        stop([stranger], drain_s=5)


def test_the_supervisor_is_found_by_its_command_line_only(run: RunFolder, tmp_path: Path) -> None:
    stranger = spawn(["sleep", "600"], os.environ, "sleep", tmp_path / "stranger.log", tmp_path)
    try:
        stack.record_supervisor(run, ProcessRecord(stranger.pid, "cli.supervisor", None, run.parent))
        stack.end(run, os.environ, quiet)
        assert stranger.is_alive()
        assert not (run.path / "supervisor-0.pid").exists()
    finally:
        stop([stranger], drain_s=5)


def test_the_supervisor_restarts_what_dies_until_it_is_ended(run: RunFolder) -> None:
    from cli.up import _start_supervisor

    plan = Plan((redis_launch(0),), ())
    (entry,) = stack.start(run, plan, os.environ, 20, quiet)
    _start_supervisor(run, plan)
    os.kill(entry.record.pid, signal.SIGKILL)
    eventually_sync(lambda: [e.record.pid for e in stack.running(run)] not in ([], [entry.record.pid]), 20)
    assert stack.end(run, os.environ, quiet) == 1
    assert stack.running(run) == []


def test_no_gateway_no_address(run: RunFolder) -> None:
    from cli.errors import CommandError

    stack.start(run, Plan((redis_launch(0),), ()), os.environ, 20, quiet)
    with pytest.raises(CommandError, match="baton up"):
        running_url(run)
