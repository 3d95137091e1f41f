"""The commands as they are typed: exit status, stdout and stderr, in a folder of their own."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cli.processes import spawn, stop

FIELDS = [
    "role",
    "n",
    "address",
    "pid",
    "ready",
    "draining",
    "running",
    "waiting",
    "blocks_used",
    "blocks_cached",
    "blocks_total",
]


def baton(
    folder: Path, *arguments: str, given: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        input=given,
        timeout=60,
        check=False,
    )


def test_down_with_nothing_to_stop_is_no_failure_and_leaves_no_trace(tmp_path: Path) -> None:
    result = baton(tmp_path, "down")
    assert result.returncode == 0
    assert "nothing to stop" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    assert baton(tmp_path, "--version").stdout == f"baton {version('baton-serve')}\n"


def test_no_prefill_workers_and_some_contradict_each_other(tmp_path: Path) -> None:
    result = baton(tmp_path, "up", "--colocated", "--prefill", "2")
    assert result.returncode == 1
    assert "leave out --prefill" in result.stderr


def test_status_with_nothing_started(tmp_path: Path) -> None:
    result = baton(tmp_path, "status", "--json")
    assert (result.returncode, json.loads(result.stdout)) == (0, [])
    assert "baton up" in baton(tmp_path, "status").stdout


def test_a_stale_pid_file_of_a_stranger(tmp_path: Path) -> None:
    """After a reboot: the record is there, its PID is somebody else's."""
    stranger = spawn(["sleep", "600"], os.environ, "sleep", tmp_path / "log", tmp_path)
    try:
        run = tmp_path / ".run"
        run.mkdir()
        fields = {"address": "127.0.0.1:1", "pid": stranger.pid, "log": ".run/decode-0.log", "started": 1}
        (run / "stack.json").write_text(json.dumps({"decode-0": fields}))
        (run / "decode-0.pid").write_text(f"{stranger.pid}\n")
        (run / "gateway-0.pid").write_text(f"{stranger.pid}\n")
        rows = json.loads(baton(tmp_path, "status", "--json").stdout)
        assert [list(row)[: len(FIELDS)] for row in rows] == [FIELDS, FIELDS]
        assert [(row["role"], row["n"], row["ready"]) for row in rows] == [
            ("decode", 0, False),
            ("gateway", 0, False),
        ]
        assert "died" in baton(tmp_path, "status").stdout
        assert baton(tmp_path, "down").returncode == 0
        assert stranger.is_alive()
        assert json.loads(baton(tmp_path, "status", "--json").stdout) == []
    finally:
        stop([stranger], drain_s=5)


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat",),
        ("trace", "some-reply"),
        ("up", "--model", "/nowhere"),
        ("chat", "--url", "http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = baton(tmp_path, *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("baton: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_flags_are_checked(tmp_path: Path) -> None:
    assert baton(tmp_path, "up", "--engine", "magic").returncode == 2
    assert baton(tmp_path, "up", "--decode", "0").returncode == 2


@pytest.mark.parametrize("name", ["BATON_ENGINE", "BATON_SIM_TOKEN_MS", "BATON_SIM_SEED"])
def test_what_a_flag_says_a_variable_can_say(tmp_path: Path, name: str) -> None:
    result = baton(tmp_path, "up", "--model", "/nowhere", **{name: "magic"})
    assert result.returncode == 2
    assert name in result.stderr


def test_a_quick_command_loads_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from cli.main import app; app(['status'], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'grpc', 'httpx') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"
