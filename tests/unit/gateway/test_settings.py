"""A gateway reads its variables once; a bad value stops it with the variable's name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = "from gateway.settings import GatewaySettings; print(GatewaySettings.load().model_dump_json())"


def load(model: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment |= {"BATON_MODEL": str(model), **variables}
    return subprocess.run(
        [sys.executable, "-c", LOAD],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_lists_and_durations_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    result = load(tmp_path, BATON_DECODE_WORKERS="127.0.0.1:1, 127.0.0.1:2", BATON_LEASE_S="0.5")
    assert result.returncode == 0, result.stderr
    assert '"decode_workers":["127.0.0.1:1","127.0.0.1:2"]' in result.stdout
    assert '"lease_s":0.5' in result.stdout


def test_every_bad_value_is_named_at_once(tmp_path: Path) -> None:
    bad = {
        "BATON_LISTEN": "8000",
        "BATON_DECODE_WORKERS": "127.0.0.1:1,nowhere",
        "BATON_PREFILL_WORKERS": "127.0.0.1:1,127.0.0.1:1",
        "BATON_REDIS_URL": "http://127.0.0.1",
        "BATON_DISCOVERY_S": "0",
        "BATON_ROUTING": "round-robin",
        "BATON_AFFINITY_BLOCKS": "0",
        "BATON_AFFINITY_LOAD_BOUND": "1",
        "BATON_LEASE_S": "0",
        "BATON_PING_S": "0",
        "BATON_PING_TIMEOUT_S": "soon",
        "BATON_KEEPALIVE_MODE": "sometimes",
        "BATON_REQUIRE_LOG": "perhaps",
        "BATON_API_KEYS_FILE": "/nowhere/at/all",
    }
    result = load(tmp_path, **bad)
    assert result.returncode == 2
    assert {line.partition(":")[0] for line in result.stderr.splitlines()} == {*bad, "BATON_MODEL"}


@pytest.mark.parametrize("url", ["redis://127.0.0.1:port", "redis://127.0.0.1:70000", "127.0.0.1:6379"])
def test_an_unusable_redis_url_is_not_blamed_on_something_else(tmp_path: Path, url: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    result = load(tmp_path, BATON_DECODE_WORKERS="127.0.0.1:1", BATON_REDIS_URL=url)
    assert result.returncode == 2
    assert result.stderr.startswith("BATON_REDIS_URL: ")


def test_a_missing_value_is_named_without_a_word_about_what_was_given(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    result = load(tmp_path)
    assert result.returncode == 2
    assert result.stderr == "BATON_DECODE_WORKERS: Field required\n"


def test_workers_may_be_addresses_and_names(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    entries = "127.0.0.1:1, dns:///decode.default.svc.cluster.local:50051"
    result = load(tmp_path, BATON_DECODE_WORKERS=entries, BATON_ROUTING="least-loaded")
    assert result.returncode == 0, result.stderr
    assert '["127.0.0.1:1","dns:///decode.default.svc.cluster.local:50051"]' in result.stdout


@pytest.mark.parametrize("entry", ["dns:decode:50051", "dns:///decode", "http://decode:80"])
def test_a_bad_worker_is_named_with_the_way_out(tmp_path: Path, entry: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    result = load(tmp_path, BATON_DECODE_WORKERS=entry)
    assert result.returncode == 2
    assert result.stderr.startswith(f"BATON_DECODE_WORKERS: {entry!r} ")
    assert "write for example" in result.stderr
