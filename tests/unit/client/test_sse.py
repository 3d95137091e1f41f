"""The decoder against the rules of the WHATWG specification, each also cut at every byte."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.sse import ServerSentEvent, SseDecoder


@dataclass(frozen=True)
class Vector:
    """Bytes of a body and the events that a browser would dispatch."""

    rule: str
    body: bytes
    events: tuple[ServerSentEvent, ...]


def message(data: str, event: str = "message", event_id: str = "") -> ServerSentEvent:
    return ServerSentEvent(data, event, event_id)


VECTORS = (
    Vector("lines end in LF", b"data: a\n\ndata: b\n\n", (message("a"), message("b"))),
    Vector("lines end in CR", b"data: a\r\rdata: b\r\r", (message("a"), message("b"))),
    Vector("lines end in CRLF", b"data: a\r\n\r\ndata: b\r\n\r\n", (message("a"), message("b"))),
    Vector("line ends may be mixed", b"data: a\r\ndata: b\n\rdata: c\r\r\n", (message("a\nb"), message("c"))),
    Vector("data lines join with LF", b"data: a\ndata: b\ndata:\ndata: c\n\n", (message("a\nb\n\nc"),)),
    Vector("one blank after the colon is dropped", b"data:a\n\ndata:  b\n\n", (message("a"), message(" b"))),
    Vector("a comment says nothing", b": keep-alive\n\n:\n\ndata: a\n: x\n\n", (message("a"),)),
    Vector("a field without colon is empty", b"data\n\ndata\ndata\n\n", (message(""), message("\n"))),
    Vector(
        "no data, no event", b"event: x\n\nid: 1\n\nretry: 5\n\ndata: a\n\n", (message("a", event_id="1"),)
    ),
    Vector("a comment block after an id", b"id: 1\ndata: a\n\n: ping\n\n", (message("a", event_id="1"),)),
    Vector(
        "the type holds for one event", b"event: x\ndata: a\n\ndata: b\n\n", (message("a", "x"), message("b"))
    ),
    Vector(
        "an id is sticky",
        b"id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\n",
        (message("a", event_id="1"), message("b", event_id="1"), message("c")),
    ),
    Vector("an id with NUL is ignored", b"id: 1\nid: 2\0\ndata: a\n\n", (message("a", event_id="1"),)),
    Vector("one leading BOM is dropped", b"\xef\xbb\xbfdata: a\n\n", (message("a"),)),
    Vector("only one", b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", (message("b"),)),
    Vector("a BOM inside is text", "data: a\ufeffb\n\n".encode(), (message("a\ufeffb"),)),
    Vector("unknown fields are ignored", b"foo: x\nDATA: y\n data: z\ndata: a\n\n", (message("a"),)),
    Vector("an unfinished event never was one", b"data: a\n\ndata: b\n", (message("a"),)),
    Vector("an unfinished line neither", b"data: a\n\ndata: b", (message("a"),)),
    Vector(
        "only CR and LF end lines",
        "data: a\u0085b\u2028c\u2029d\x0be\x0cf\x1cg\n\n".encode(),
        (message("a\u0085b\u2028c\u2029d\x0be\x0cf\x1cg"),),
    ),
    Vector("characters of several bytes", "data: é漢🏃\n\n".encode(), (message("é漢🏃"),)),
    Vector("broken UTF-8 becomes U+FFFD", b"data: a\xffb\n\n", (message("a\ufffdb"),)),
)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.rule)
def test_vector_whole_and_cut_at_every_byte(vector: Vector) -> None:
    for cut in range(len(vector.body) + 1):
        decoder = SseDecoder()
        events = decoder.feed(vector.body[:cut]) + decoder.feed(vector.body[cut:])
        assert tuple(events) == vector.events, f"cut at byte {cut}"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.rule)
def test_vector_byte_by_byte(vector: Vector) -> None:
    decoder = SseDecoder()
    events = [event for byte in vector.body for event in decoder.feed(bytes([byte]))]
    assert tuple(events) == vector.events


def test_an_event_that_ends_in_cr_does_not_wait_for_the_next_read() -> None:
    assert SseDecoder().feed(b"data: a\r\r") == [message("a")]


def test_an_id_counts_from_its_blank_line_on() -> None:
    decoder = SseDecoder("r:1")
    decoder.feed(b"id: r:2\ndata: a\n")
    assert decoder.last_event_id == "r:1"
    decoder.feed(b"\n")
    assert decoder.last_event_id == "r:2"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1500", 1500), ("+5", None), ("-5", None), ("1.5", None), ("٣", None), ("", None)],
)
def test_retry_takes_ascii_digits_only(value: str, expected: int | None) -> None:
    decoder = SseDecoder()
    decoder.feed(f"retry: {value}\n\n".encode())
    assert decoder.retry_ms == expected


_LINES = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=("Cs",)), max_size=20)


@given(st.lists(st.tuples(_LINES, _LINES), max_size=8), st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_what_was_framed_is_what_is_read(sent: list[tuple[str, str]], sizes: list[int]) -> None:
    """Any text, in pieces of any size."""
    body = "".join(f"id: {number}\ndata: {a}\ndata: {b}\n\n" for number, (a, b) in enumerate(sent)).encode()
    decoder, events, start = SseDecoder(), [], 0
    while start < len(body):
        size = sizes[start % len(sizes)]
        events += decoder.feed(body[start : start + size])
        start += size
    assert events == [message(f"{a}\n{b}", event_id=str(number)) for number, (a, b) in enumerate(sent)]
