"""`baton bench engine` as it is typed."""

import json
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
        ({"batches": "1,x"}, "--batches: numbers"),
        ({"contexts": "0"}, "--contexts: numbers"),
        ({"quick": True, "batches": "1"}, "--quick has batches"),
        ({"plot_file": Path("plot.txt")}, "--plot: .* should end in"),
        ({"json_file": Path("nowhere/at/all.json")}, "--json: there is no folder"),
        ({"model": Path("none")}, "--model: none is not a model folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CommandError, match=said):
        bench.engine(**{"model": tmp_path} | options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--without-transformers"]])
def test_a_quick_run_on_a_tiny_model(tmp_path: Path, extra: list[str]) -> None:
    model = save_model(tmp_path / "model")
    command = [sys.executable, "-m", "cli.main", "bench", "engine", "--quick", "--rounds", "2"]
    command += ["--model", str(model), "--json", "run.json", "--plot", "run.png", *extra]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    result = json.loads(last.removeprefix("RESULT "))
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["result"] == result
    assert result["quick"] is True
    assert (result["step_time_ratio_b1"] is None) is bool(extra)
    assert all(value is None or value >= 0 for value in result.values())
    assert len(document["rounds"]) == 2
    assert document["settings"]["threads"] == 1
    for found in document["equal_replies"]:
        if found["ours"] == "exact":
            assert found["num_equal"] == found["num_replies"] > 0, found
    assert (tmp_path / "run.png").stat().st_size > 10_000
