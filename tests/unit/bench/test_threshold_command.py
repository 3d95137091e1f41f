"""`baton bench threshold` as it is typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli import bench
from cli.errors import CommandError
from tests.unit.engine.tiny_models import save_model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quick": True, "lengths": "3"}, "--quick has lengths"),
        ({"lengths": "x"}, "--lengths: numbers"),
        ({"lengths": "1,2"}, "--lengths: two tokens or more"),
        ({"lengths": "8,4"}, "--lengths: in ascending order"),
        ({"output": Path("nowhere/at/all")}, "--output"),
        ({"model": Path("none")}, "--model: none is not a model folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CommandError, match=said):
        bench.threshold(**{"model": tmp_path} | options)  # type: ignore[arg-type]


def run(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cli.main", "bench", "threshold", "--model", "model", *options]
    environment = os.environ | {"BATON_LOCAL_PREFILL_MAX_TOKENS": "64", "BATON_LOCAL_PREFILL": "always"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False
    )


@pytest.mark.slow
def test_a_quick_run_on_a_tiny_model(tmp_path: Path) -> None:
    save_model(tmp_path / "model", max_position_embeddings=4096)
    done = run(tmp_path, "--quick", "--output", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    document = json.loads((tmp_path / "run" / "threshold.json").read_text())
    assert document["result"] == result
    assert result["quick"] is True
    assert result["threshold_tokens"] in (0, 2, 16)
    assert all(found["local_gap_ms"] > 0 for found in result["lengths"].values())
    (measured,) = document["rounds"]
    assert len(measured["asked"]) == 2 * 2 * 2  # lengths, ways, with and without company
    assert all(0 < asked["first_s"] < asked["second_s"] for asked in measured["asked"])
    assert measured["idle_gaps_s"]
    assert (tmp_path / "run" / "threshold.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_prompt_that_the_model_cannot_take_is_said_in_a_sentence(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    done = run(tmp_path, "--lengths", "2,510")
    assert done.returncode == 1
    assert "baton: no figures: --lengths: 510 tokens and a reply of 3 are more than" in done.stderr
    assert "Traceback" not in done.stderr
    assert "RESULT" not in done.stdout
