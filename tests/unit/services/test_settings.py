"""A bad value stops the process with the variable's name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_worker(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "config.json").write_text("{}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment |= {"BATON_MODEL": str(tmp_path), **variables}
    return subprocess.run(
        [sys.executable, "-c", "from services.settings import WorkerSettings; WorkerSettings.load()"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_good_values_pass(tmp_path: Path) -> None:
    result = run_worker(tmp_path, BATON_THREADS="2", BATON_LISTEN="127.0.0.1:0")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATON_THREADS", "zero"),
        ("BATON_THREADS", "0"),
        ("BATON_LISTEN", "8000"),
        ("BATON_LISTEN", "127.0.0.1:99999"),
        ("BATON_ENGINE", "cuda"),
        ("BATON_LOCAL_PREFILL", "maybe"),
        ("BATON_KV_MEMORY_MB", "-1"),
        ("BATON_PING_S", "0"),
        ("BATON_PING_TIMEOUT_S", "never"),
        ("BATON_MAX_BATCHED_TOKENS", "31"),  # below BATON_MAX_NUM_SEQS
        ("BATON_MODEL", "/nowhere/at/all"),
    ],
)
def test_a_bad_value_names_its_variable(tmp_path: Path, name: str, value: str) -> None:
    result = run_worker(tmp_path, **{name: value})
    assert result.returncode == 2
    assert name in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    result = run_worker(tmp_path, BATON_MODEL="")
    assert result.returncode == 2
    assert "BATON_MODEL" in result.stderr
