"""`chat` and the demo against a server that cuts: what people see is whole, or they are told."""

import io
import json

import pytest
from rich.console import Console

from cli.chat import chat
from cli.demo import CUT_AFTER_PIECES, Half, ask_and_drop, checks, read_to_end, text_of
from cli.errors import CommandError
from cli.raw_stream import RawStream
from tests.unit.client.cutting_server import (
    PIECES,
    REPLY_ID,
    Cut,
    CuttingServer,
    Refuse,
    cutting_server,
    make_frames,
)

PATH = f"/v1/streams/{REPLY_ID}"
TEXT = "".join(PIECES)


def read(server: CuttingServer, last_event_id: str = "") -> Half:
    with RawStream(server.url, "GET", PATH, last_event_id=last_event_id) as stream:
        half = Half(list(stream.events()))
        assert stream.ended
        return half


def test_the_two_halves_of_an_honest_server_join() -> None:
    with cutting_server() as server:
        whole = read(server)
        first = Half(whole.events[:4])
        second = read(server, first.last_event_id)
        assert first.text + second.text == TEXT
        assert all(holds for _, holds in checks(server.url, PATH, first, second))


def test_the_demo_cuts_in_mid_reply_and_shows_both_halves() -> None:
    pieces = [f"[b]{number}[/b] " for number in range(3 * CUT_AFTER_PIECES)]  # text, not markup
    shown = io.StringIO()
    console = Console(file=shown, highlight=False, soft_wrap=True)
    with cutting_server(frames=make_frames(pieces)) as server:
        first = ask_and_drop(console, server.url)
        assert first.text == "".join(pieces[:CUT_AFTER_PIECES])
        second = read_to_end(console, server.url, PATH, first.last_event_id)
        assert all(holds for _, holds in checks(server.url, PATH, first, second))
    assert shown.getvalue() == "".join(pieces)


def test_a_reply_too_short_to_cut_fails_the_demo() -> None:
    with cutting_server() as server, pytest.raises(CommandError, match="ended after 6 pieces"):
        ask_and_drop(Console(file=io.StringIO()), server.url)


@pytest.mark.parametrize("damage", ["gap", "repeat", "no end"])
def test_the_demo_notices_a_dishonest_one(damage: str) -> None:
    with cutting_server() as server:
        whole = read(server).events
        second = {"gap": whole[5:], "repeat": whole[3:], "no end": whole[4:-1]}[damage]
        assert not all(holds for _, holds in checks(server.url, PATH, Half(whole[:4]), Half(second)))


def test_a_body_that_breaks_off_is_seen_as_such() -> None:
    with cutting_server(Cut(300)) as server, RawStream(server.url, "GET", PATH) as stream:
        assert len(list(stream.events())) > 0
        assert not stream.ended


def test_a_dropped_stream_is_a_closed_socket() -> None:
    with cutting_server() as server, RawStream(server.url, "POST", "/v1/chat/completions", {}) as stream:
        next(stream.events())
        stream.drop()
        assert list(stream.events()) == []


def test_refusals_are_shown_with_what_the_server_said() -> None:
    refuse = Refuse(429, message="every queue is full")
    with cutting_server(refuse) as server, pytest.raises(CommandError, match=r"429.*every queue is full"):
        RawStream(server.url, "GET", PATH)


def test_an_error_event_fails_the_demo() -> None:
    from client.sse import ServerSentEvent

    with pytest.raises(CommandError, match="worker lost"):
        text_of(ServerSentEvent(json.dumps({"error": {"message": "worker lost"}}), "message", "r:1"))


def test_a_conversation_survives_cuts_and_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    with cutting_server(Cut(300), Cut(10)) as server:
        chat(server.url, "key", 50, io.StringIO("Hello?\n\n  And now?\n/exit\nnever asked\n"))
        posts = [json.loads(asked.body) for asked in server.asked if asked.method == "POST"]
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer key"}
    captured = capsys.readouterr()
    assert captured.out == f"{TEXT}\n{TEXT}\n"
    assert "resumed 2 times" in captured.err
    assert [message["content"] for message in posts[1]["messages"]] == ["Hello?", TEXT, "And now?"]


def test_a_refused_question_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    with cutting_server(Refuse(429, message="busy")) as server:
        chat(server.url, "", 50, io.StringIO("Hello?\nAgain?\n"))
        second = json.loads(server.asked[-1].body)
    assert [message["content"] for message in second["messages"]] == ["Again?"]
    assert "busy" in capsys.readouterr().err
