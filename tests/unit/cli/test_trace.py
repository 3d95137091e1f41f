"""`baton trace` against a real HTTP server that answers as a gateway does."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cli.errors import CommandError
from cli.trace import trace
from observability.timings import HandoffStages, TtftStages

TIMINGS = {
    **TtftStages(gateway=2.0, decode_queue=1.0, prefill=40.0, flush=0.5, relay=1.5).as_dict(),
    **HandoffStages(kv_transfer=3.0, join=2.0, first_step=9.0).as_dict(),
}
STATE = {
    "id": "reply-1",
    "status": "done",
    "text": "the secret text",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15, "cached_tokens": 0},
    "timings": TIMINGS,
    "first_seq": 1,
    "last_seq": 5,
    "owner_epoch": 1,
}
EVENTS = [
    {"seq": 1, "kind": "created", "model": "m"},
    {"seq": 2, "kind": "delta", "choice": 0, "text": "the", "at_ms": 45.0},
    {"seq": 3, "kind": "delta", "choice": 0, "text": " secret", "at_ms": 60.0},
    {"seq": 4, "kind": "delta", "choice": 0, "text": " text", "at_ms": 460.0},
    {"seq": 5, "kind": "done", "timings": TIMINGS, "at_ms": 461.0},
]


@contextmanager
def gateway(
    state: dict[str, Any] | str = STATE,
    events: list[dict[str, Any]] = EVENTS,
    *,
    status: int = 200,
    key: str = "",
) -> Iterator[str]:
    """Serves one reply; the event stream stays open after its last event, as a running reply's does."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if key and self.headers["Authorization"] != f"Bearer {key}":
                self._answer(401, b"{}")
            elif status != 200:
                self._answer(status, b"{}")
            elif self.path.endswith("/state"):
                body = state if isinstance(state, str) else json.dumps(state)
                self._answer(200, body.encode())
            else:
                assert self.path == "/v1/streams/reply-1?format=baton"
                self._stream()

        def _answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.end_headers()
            self.wfile.write(b": keep-alive\n\n")
            for event in events:
                frame = f"event: {event['kind']}\ndata: {json.dumps(event)}\nid: reply-1:{event['seq']}\n\n"
                self.wfile.write(frame.encode())
            self.wfile.flush()
            over.wait()

        def log_message(self, *_args: object) -> None:
            pass  # not into the test's output

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def traced(url: str, **options: Any) -> str:
    out = io.StringIO()
    trace(url, "reply-1", out=out, **options)
    return out.getvalue()


def test_a_finished_reply() -> None:
    with gateway() as url:
        text = traced(url)
    assert text.startswith("reply-1  done (stop)  12 prompt + 3 reply tokens\n")
    assert "time to first token: 45.0 ms" in text
    assert "P prefill             40.0 ms  88.9%" in text
    assert "handoff gap, first to second token: 14.0 ms" in text
    assert "stall of 400 ms after delta 2, at 60 ms" not in text  # not three times the median
    assert "deltas: 3, from 45 to 460 ms" in text
    assert "secret" not in text
    assert text.isascii()


def test_a_running_reply_is_shown_as_it_stands() -> None:
    state = {**STATE, "status": "running", "finish_reason": None, "usage": None, "last_seq": 3}
    with gateway(state, EVENTS[:3]) as url:
        text = traced(url)
    assert text.startswith("reply-1  running\n")
    assert "deltas: 2, from 45 to 60 ms" in text


def test_a_queued_reply_has_no_text_yet() -> None:
    state = {**STATE, "status": "queued", "timings": {}, "last_seq": 1}
    with gateway(state, EVENTS[:1]) as url:
        assert "no text yet" in traced(url)


def test_a_reply_without_handoff_that_was_taken_over() -> None:
    state = {**STATE, "timings": TtftStages(prefill=10.0).as_dict(), "owner_epoch": 2}
    with gateway(state) as url:
        text = traced(url)
    assert "handoff" not in text
    assert "taken over 1x" in text.splitlines()[0]


def test_the_owners_key() -> None:
    with gateway(key="k1") as url:
        assert "prefill" in traced(url, api_key="k1")
        with pytest.raises(CommandError, match="BATON_API_KEY"):
            traced(url, api_key="")


@pytest.mark.parametrize(
    ("status", "message"), [(404, "knows no reply 'reply-1'"), (410, "expired"), (503, "answers 503")]
)
def test_a_reply_that_cannot_be_had(status: int, message: str) -> None:
    with gateway(status=status) as url, pytest.raises(CommandError, match=message):
        traced(url)


@pytest.mark.parametrize("state", ["<html>", "[]", "{}"])
def test_something_else_answers(state: str) -> None:
    with gateway(state) as url, pytest.raises(CommandError, match="not a gateway"):
        traced(url)


def test_nobody_answers() -> None:
    with gateway() as url:
        pass
    with pytest.raises(CommandError, match="no gateway answers"):
        traced(url)
