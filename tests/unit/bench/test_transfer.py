"""`baton bench transfer`: what it derives from known rates, and a quick run as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.transfer.measure import (
    FLOAT16,
    GRPC,
    INT8,
    RAW_ASYNCIO,
    RAW_THREADED,
    SHARED,
    TCP,
    Bulk,
    Overlap,
)
from bench.transfer.report import fraction_of_raw, result_line
from bench.transfer.settings import Settings
from cli import bench
from cli.errors import CommandError
from tests.unit.engine.tiny_models import save_model


def test_fractions_are_of_the_faster_bare_stream_of_the_same_round() -> None:
    bulk = Bulk(100, 10)
    bulk.rates |= {
        RAW_ASYNCIO: [1e9, 4e9, 1e9],
        RAW_THREADED: [2e9, 1e9, 1e9],
        GRPC: [1e9, 1e9, 1e9],
        FLOAT16: [2e9, 2e9, 2e9],
        INT8: [3e9, 3e9, 3e9],
        TCP: [2e9, 3e9, 2e9],
        SHARED: [4e9, 4e9, 5e9],
    }
    fraction = fraction_of_raw(bulk, GRPC)
    assert (fraction.median, fraction.low, fraction.high) == (0.5, 0.25, 1.0)
    overlap = Overlap(100, left_s=[0.1, 0.3, 0.1], whole_s=[1.0, 1.0, 0.5], prefill_s=[9.0, 9.0, 9.0])
    settings = Settings(model=Path("tiny"))
    result = json.loads(result_line(settings, bulk, {1024: overlap}).removeprefix("RESULT "))
    assert "quick" not in result
    assert result["grpc_fraction_of_raw"] == 0.5
    assert result["tcp_fraction_of_raw"] == 1.0
    assert result["shm_gb_s"] == 4.0
    assert (result["grpc_float16_gb_s"], result["grpc_int8_gb_s"]) == (2.0, 3.0)
    assert result["critical_path_share_1024"] == 0.2
    assert result["critical_path_share_1024_range"] == [0.1, 0.3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quick": True, "prompts": "3"}, "--quick has sizes"),
        ({"prompts": "1"}, "two tokens or more"),
        ({"prompts": "x"}, "--prompts"),
        ({"output": Path("nowhere/at/all")}, "--output"),
        ({"model": Path("none")}, "--model: none is not a model folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CommandError, match=said):
        bench.transfer(**{"model": tmp_path} | options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_quick_run_on_a_tiny_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    command = [sys.executable, "-m", "cli.main", "bench", "transfer", "--quick"]
    command += ["--model", str(model), "--output", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["quick"] is True
    document = json.loads((tmp_path / "run" / "transfer.json").read_text())
    assert document["result"] == result
    for name in ("grpc_fraction_of_raw", "shm_gb_s", "critical_path_share_32", "critical_path_share_64"):
        assert result[name] > 0
    assert document["overlap"]["64"]["num_bytes"] == 64 * 2 * 3 * 2 * 8 * 4
    assert (tmp_path / "run" / "transfer.png").stat().st_size > 10_000
