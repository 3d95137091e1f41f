"""Frames and cursors, to the byte."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.sse import SseDecoder
from gateway.errors import InvalidRequest
from gateway.event_log import ReplyMeta
from gateway.events import Event, EventKind
from gateway.formats import Format
from gateway.formats.registry import format_named
from gateway.sse import Cursor, encode_event, parse_cursor

REPLY_ID = "r" * 32
META = ReplyMeta(reply_id=REPLY_ID, owner_hash="", model="m", fingerprint="f", format="chat", created=1)


def rendering(name: str = "baton") -> Format:
    found = format_named(name, META)
    assert found is not None
    return found


def delta(text: str, seq: int = 5, **fields: Any) -> Event:
    return Event(seq, EventKind.DELTA, {"choice": 0, "text": text, "token_ids": [1], "at_ms": 1.0}, **fields)


def encoded(event: Event, name: str = "baton") -> bytes:
    frame = encode_event(REPLY_ID, event, rendering(name))
    assert frame is not None
    return frame


def lines(event: Event, name: str = "baton") -> list[bytes]:
    body = encoded(event, name)
    assert body.endswith(b"\n\n")
    return [line.partition(b":")[0] for line in body[:-2].split(b"\n")]


def test_a_frame_is_event_then_data_then_id() -> None:
    assert lines(delta("x")) == [b"event", b"data", b"id"]
    assert lines(delta("x"), "chat") == [b"data", b"id"]
    assert encoded(delta("x")).endswith(f"\nid: {REPLY_ID}:5\n\n".encode())


def test_retry_is_inside_the_first_event_only_and_never_after_the_id() -> None:
    created = Event(1, EventKind.CREATED, {})
    assert sorted(lines(created)) == [b"data", b"event", b"id", b"retry"]
    assert lines(created)[-1] == b"id"
    assert b"retry" not in lines(delta("x"))


def test_an_event_that_the_log_lacks_names_its_epoch() -> None:
    assert f"\nid: {REPLY_ID}:5.3\n".encode() in encoded(delta("x", epoch=3, logged=False))
    assert f"\nid: {REPLY_ID}:5\n".encode() in encoded(delta("x", epoch=3))


@given(st.text() | st.text(alphabet="a\r\n\x00\x85\u2028\u2029\ufeff é🏃"))
def test_any_text_survives_and_no_line_end_but_lf_is_ever_sent(text: str) -> None:
    body = encoded(delta(text))
    assert body.count(b"\n") == 4
    assert not set(body.decode()) & set("\r\x85\u2028\u2029")
    (event,) = SseDecoder().feed(body)
    assert orjson.loads(event.data)["text"] == text
    assert event.id == f"{REPLY_ID}:5"


@pytest.mark.parametrize(
    ("event_id", "cursor"),
    [
        (f"{REPLY_ID}:0", Cursor(REPLY_ID, 0)),
        (f"{REPLY_ID}:17", Cursor(REPLY_ID, 17)),
        (f"{REPLY_ID}:17.2", Cursor(REPLY_ID, 17, 2)),
    ],
)
def test_cursors_that_were_sent_can_be_read(event_id: str, cursor: Cursor) -> None:
    assert parse_cursor(event_id, "Last-Event-ID") == cursor


@pytest.mark.parametrize(
    "event_id",
    [
        *("", ":", ":1", "nonsense", REPLY_ID, f"a/b{REPLY_ID}:1", f"{'r' * 65}:1"),
        *(f"{REPLY_ID}:{seq}" for seq in ("", "-1", "+1", "x", " 1", "1 ", "1\n", "１", "9" * 40)),
        *(f"{REPLY_ID}:{seq}" for seq in ("1.", "1.x", "1.2.3")),
    ],
)
def test_a_malformed_cursor_is_refused_by_name(event_id: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_cursor(event_id, "after")
    assert refused.value.param == "after"
