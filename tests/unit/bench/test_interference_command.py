"""`baton bench interference` as it is typed."""

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
        ({"quick": True, "every": 3.0}, "--quick has times"),
        ({"duration": 5.0}, "long enough for one prompt"),
        ({"output": Path("nowhere/at/all")}, "--output"),
        ({"model": Path("none")}, "--model: none is not a model folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CommandError, match=said):
        bench.interference(**{"model": tmp_path} | options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_quick_run_on_a_tiny_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", max_position_embeddings=8192)
    command = [sys.executable, "-m", "cli.main", "bench", "interference", "--quick", "--floor"]
    command += ["--model", str(model), "--output", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    document = json.loads((tmp_path / "run" / "interference.json").read_text())
    assert document["result"] == result
    assert result["quick"] is True
    for name in ("split", "colocated", "colocated_chunked", "split_floor"):
        assert result[f"{name}_p99_itl_ratio"] > 0
        (turn,) = (each["turns"][name] for each in document["rounds"])
        assert turn["loaded"]["prompts"]
        assert not turn["idle"]["prompts"]
        assert turn["loaded"]["gaps"]
    assert result["split_short_prompt_ttft_ratio"] > 0
    assert (tmp_path / "run" / "interference.png").stat().st_size > 10_000
