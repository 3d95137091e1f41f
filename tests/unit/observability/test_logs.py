"""Log lines are JSON with the process's name and the current span, whoever wrote them."""

import json
import os
import subprocess
import sys

import pytest

LOG = """
import logging, structlog
from observability import logs
from observability.telemetry import build
log = structlog.get_logger()
logs.configure("baton-decode")
tracer = build("baton-decode", "1").tracer
log.info("serving", address="a:1")
with tracer.start_as_current_span("call"):
    log.warning("prefill attempt failed", target="b:2")
    logging.getLogger("uvicorn.error").warning("from %s", "the standard library")
log.debug("not shown")
logging.getLogger("httpx").info("not shown either")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "BATON_"))}
    return subprocess.run(
        [sys.executable, "-c", LOG],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_json_where_there_is_no_terminal() -> None:
    finished = run()
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == ""
    serving, attempt, library, failed = map(json.loads, finished.stderr.splitlines())
    assert serving.pop("timestamp")
    assert serving == {"event": "serving", "address": "a:1", "level": "info", "service": "baton-decode"}
    assert attempt["target"] == "b:2"
    assert library["event"] == "from the standard library"
    assert library["logger"] == "uvicorn.error"
    assert library["service"] == "baton-decode"
    assert len(attempt["trace_id"]) == 32
    assert attempt["trace_id"] == library["trace_id"]
    assert "ZeroDivisionError" in failed["exception"]
    assert "trace_id" not in failed


def test_console_when_asked_for() -> None:
    finished = run(BATON_LOG_FORMAT="console")
    assert "serving" in finished.stderr
    assert not finished.stderr.startswith("{")
    assert "\x1b" not in finished.stderr


def test_the_level() -> None:
    assert "prefill attempt failed" not in run(BATON_LOG_LEVEL="error").stderr
    assert "not shown" in run(BATON_LOG_LEVEL="DEBUG").stderr


@pytest.mark.parametrize("variable", ["BATON_LOG_FORMAT", "BATON_LOG_LEVEL"])
def test_a_wrong_value_is_named(variable: str) -> None:
    finished = run(**{variable: "loud"})
    assert finished.returncode == 1
    assert variable in finished.stderr
