"""What processes are asked and what their answers are taken for, over real sockets."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.plan import Launch, Plan
from cli.ports import HOST, pick
from cli.probes import Answer, check_redis_url, probe
from cli.run_folder import RunFolder
from cli.stack import end, start
from cli.status import read_status


@contextmanager
def answering(response: bytes) -> Iterator[str]:
    """A listener that gives every connection the same answer."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed: the test is over
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(response)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{HOST}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    ("response", "ready", "draining"),
    [
        (http("200 OK", b'{"status": "ready"}'), True, False),
        (http("200 OK", b'{"status": "degraded"}'), True, False),
        (http("503 Service Unavailable", b'{"status": "draining"}'), False, True),
        (http("200 OK", b"fine"), True, False),
        (http("404 Not Found", b"[]"), False, False),
    ],
)
def test_a_gateway_says_how_it_is(response: bytes, *, ready: bool, draining: bool) -> None:
    with answering(response) as address:
        answer = probe("gateway", address)
    assert (answer.ready, answer.draining) == (ready, draining)
    assert ready or "/readyz" in answer.detail


def test_a_gateway_counts_the_workers_it_has_yet_to_meet() -> None:
    counts = (
        b'{"status": "ok", "workers": {"decode": {"configured": 1, "discovered": 2, "up": 2},'
        b' "prefill": {"configured": 0, "discovered": 3, "unresolved": 1, "up": 3}}}'
    )
    with answering(http("200 OK", counts)) as address:
        assert probe("gateway", address).num_unseen == 2


def test_what_is_no_gateway_is_not_ready() -> None:
    with answering(b"SSH-2.0-x\r\n") as address:
        assert not probe("gateway", address).ready


def test_a_redis_that_still_loads_is_not_ready() -> None:
    with answering(b"-LOADING Redis is loading the dataset in memory\r\n") as address:
        answer = probe("redis", address)
    assert not answer.ready
    assert "LOADING" in answer.detail


@pytest.mark.parametrize("role", ["redis", "gateway", "decode", "prefill"])
def test_nobody_there_is_an_answer_too(role: str) -> None:
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))  # bound and not listening
        answer = probe(role, f"{HOST}:{reserved.getsockname()[1]}", timeout=1)
    assert answer == Answer(ready=False, detail=answer.detail)
    assert answer.detail


def test_a_redis_url_that_does_not_answer_is_explained_without_its_password() -> None:
    trouble = check_redis_url("redis://:secret@127.0.0.1:1/0")
    assert trouble is not None
    assert trouble.startswith("127.0.0.1:1: ")
    assert "secret" not in trouble


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
def test_status_of_a_living_process(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.path.mkdir()
    port = str(pick(1)[0])
    launch = Launch("redis-0", f"{HOST}:{port}", ("redis-server", "--bind", HOST, "--port", port), {})
    (entry,) = start(
        run, Plan((launch,), ()), {"PATH": "/usr/bin:/usr/local/bin"}, 20, lambda name, what: None
    )
    try:
        (row,) = read_status(run)
        assert (row.role, row.n, row.pid, row.ready, row.detail) == ("redis", 0, entry.record.pid, True, "")
        assert row.blocks_total is None
        assert check_redis_url(f"redis://{HOST}:{port}/0") is None
    finally:
        end(run, {}, lambda name, what: None)


@pytest.mark.parametrize("url", ["redis://:secret@127.0.0.1:abc", "redis://[::1", "http://127.0.0.1"])
def test_what_is_no_redis_url_is_said_to_be_none(url: str) -> None:
    trouble = check_redis_url(url)
    assert trouble is not None
    assert "URL" in trouble
    assert "secret" not in trouble
