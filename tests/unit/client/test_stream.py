"""The resuming client against a server that cuts: the whole reply or a typed exception, nothing between."""

import json
import socket

import httpx
import pytest

from client import (
    AsyncChatStream,
    ChatStream,
    ConnectionLost,
    ProtocolViolation,
    ReplyFailed,
    ReplyIncomplete,
    RequestRefused,
    ResumeRefused,
    RetryPolicy,
    Usage,
)
from tests.unit.client.cutting_server import (
    PIECES,
    REPLY_ID,
    Cut,
    CuttingServer,
    Ending,
    NoAnswer,
    Refuse,
    cutting_server,
    make_frames,
)

REQUEST = {"messages": [{"role": "user", "content": "Tell me about relay races."}]}
QUICK = RetryPolicy(give_up_after_s=1.0, first_delay_s=0.001, longest_delay_s=0.01)
TEXT = "".join(PIECES)
BODY = b"".join(make_frames())


def http_client(server: CuttingServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, trust_env=False, timeout=5)


def check_whole(stream: ChatStream | AsyncChatStream, pieces: list[str]) -> None:
    assert "".join(pieces) == TEXT
    reply = stream.result()
    assert (reply.text, reply.finish_reason, reply.reply_id) == (TEXT, "stop", REPLY_ID)
    assert reply.usage == Usage(11, 7)


def test_undisturbed() -> None:
    with cutting_server() as server, http_client(server) as http, ChatStream(http, REQUEST) as stream:
        check_whole(stream, list(stream))
        assert stream.num_resumes == 0
        assert stream.last_event_id == f"{REPLY_ID}:22"
        sent = json.loads(server.asked[0].body)
    assert sent == {**REQUEST, "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("ending", [Ending.BROKEN, Ending.CLEAN])
def test_cut_at_every_byte(ending: Ending) -> None:
    """A clean end without the terminal event is a cut like any other."""
    with cutting_server() as server, http_client(server) as http:
        for cut in range(len(BODY)):
            server.script.append(Cut(cut, ending))
            with ChatStream(http, REQUEST, policy=QUICK) as stream:
                check_whole(stream, list(stream))
                assert stream.num_resumes == 1
        assert [asked.method for asked in server.asked].count("POST") == len(BODY)


async def test_cut_at_every_event_async() -> None:
    ends = [len(b"".join(make_frames()[:count])) for count in range(len(make_frames()))]
    with cutting_server() as server:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=5) as http:
            for end in ends:
                server.script.append(Cut(end))
                async with AsyncChatStream(http, REQUEST, policy=QUICK) as stream:
                    check_whole(stream, [piece async for piece in stream])
                    assert stream.num_resumes == 1


def test_resumes_by_the_last_whole_event() -> None:
    frames = make_frames()
    cut = len(b"".join(frames[:3])) + len(frames[3]) - 1  # all of the fourth but its blank line
    with cutting_server(Cut(cut)) as server, http_client(server) as http:
        with ChatStream(http, REQUEST, policy=QUICK) as stream:
            check_whole(stream, list(stream))
        resume = server.asked[1]
    assert resume.path == f"/v1/streams/{REPLY_ID}?format=chat"
    assert resume.headers["last-event-id"] == f"{REPLY_ID}:6"


def test_many_cuts_and_a_busy_server_in_between() -> None:
    script = (
        Cut(200),
        Refuse(503, {"Retry-After": "0"}),
        NoAnswer(),
        Cut(0),
        Cut(150),
        Refuse(429),
        Cut(300),
    )
    with cutting_server(*script) as server, http_client(server) as http:
        stream = ChatStream(http, REQUEST, policy=QUICK)
        check_whole(stream, list(stream))
        assert stream.num_resumes == len(script)
    assert [asked.method for asked in server.asked] == ["POST"] + ["GET"] * len(script)


def test_going_on_with_a_reply_of_somebody_else() -> None:
    with cutting_server() as server, http_client(server) as http:
        stream = ChatStream(http, last_event_id=f"{REPLY_ID}:6")
        assert "".join(stream) == "".join(PIECES[2:])
    assert [asked.method for asked in server.asked] == ["GET"]


def test_a_refused_request_is_not_repeated() -> None:
    with cutting_server(Refuse(503, {"Retry-After": "7"}, "busy")) as server, http_client(server) as http:
        stream = ChatStream(http, REQUEST, policy=QUICK)
        with pytest.raises(RequestRefused, match="busy") as caught:
            list(stream)
    assert (caught.value.status, caught.value.retry_after_s, len(server.asked)) == (503, 7.0, 1)
    assert not isinstance(caught.value, ResumeRefused)


@pytest.mark.parametrize("status", [204, 400, 401, 404, 409, 410])
def test_a_reply_that_is_gone_is_not_asked_for_again(status: int) -> None:
    with cutting_server(Cut(300), Refuse(status)) as server, http_client(server) as http:
        stream = ChatStream(http, REQUEST, policy=QUICK)
        with pytest.raises(ResumeRefused) as caught:
            list(stream)
        assert (caught.value.status, len(server.asked)) == (status, 2)
        assert TEXT.startswith(stream.text)
        with pytest.raises(ReplyIncomplete):
            stream.result()


def test_a_request_that_may_have_arrived_is_never_sent_twice() -> None:
    with cutting_server(NoAnswer()) as server, http_client(server) as http:
        stream = ChatStream(http, REQUEST, policy=QUICK)
        with pytest.raises(ConnectionLost, match="no answer to the request"):
            list(stream)
    assert len(server.asked) == 1


def test_giving_up_says_where_to_go_on() -> None:
    policy = RetryPolicy(give_up_after_s=0.1, first_delay_s=0.001, longest_delay_s=0.01)
    with cutting_server(Cut(300), *[NoAnswer()] * 500) as server, http_client(server) as http:
        stream = ChatStream(http, REQUEST, policy=policy)
        with pytest.raises(ConnectionLost) as caught:
            list(stream)
        assert caught.value.last_event_id == stream.last_event_id is not None
        assert not stream.complete
        server.script.clear()
        with ChatStream(http, last_event_id=caught.value.last_event_id or "") as rest:
            assert stream.text + "".join(rest) == TEXT


def test_nobody_listens() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        policy = RetryPolicy(give_up_after_s=0.05, first_delay_s=0.001, longest_delay_s=0.01)
        with httpx.Client(base_url=url, trust_env=False) as http, pytest.raises(ConnectionLost):
            list(ChatStream(http, REQUEST, policy=policy))


def test_an_error_event_is_final() -> None:
    frames = make_frames()[:4]
    error = {"error": {"message": "worker lost", "type": "server_error", "code": "unavailable"}}
    frames.append(f"data: {json.dumps(error)}\nid: {REPLY_ID}:30\n\n".encode())
    with cutting_server(frames=frames) as server, http_client(server) as http:
        stream = ChatStream(http, REQUEST, policy=QUICK)
        pieces = []
        with pytest.raises(ReplyFailed, match="worker lost") as caught:
            pieces.extend(stream)
        assert (caught.value.kind, caught.value.code) == ("server_error", "unavailable")
        assert stream.text == "".join(PIECES[:3])
        assert not stream.complete
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    "frame",
    [
        f"data: {{}}\nid: {REPLY_ID}:5\n\n".encode(),
        b"data: {}\nid: another-reply-0123:99\n\n",
        b"data: {}\nid: nonsense\n\n",
        f"data: <html>\nid: {REPLY_ID}:99\n\n".encode(),
        f"data: []\nid: {REPLY_ID}:99\n\n".encode(),
    ],
    ids=["a repeat", "another reply", "no event ID", "no JSON", "no object"],
)
def test_a_stream_that_breaks_the_rules_is_not_trusted(frame: bytes) -> None:
    frames = [*make_frames()[:3], frame, *make_frames()[3:]]
    with cutting_server(frames=frames) as server, http_client(server) as http:
        stream = ChatStream(http, REQUEST, policy=QUICK)
        with pytest.raises(ProtocolViolation):
            list(stream)
        assert not stream.complete


def test_an_event_sent_while_the_log_was_down_has_its_epoch_in_its_id() -> None:
    frames = [frame.replace(f"{REPLY_ID}:7".encode(), f"{REPLY_ID}:7.2".encode()) for frame in make_frames()]
    cut = len(b"".join(frames[:4]))
    with cutting_server(Cut(cut), frames=frames) as server, http_client(server) as http:
        with ChatStream(http, REQUEST, policy=QUICK) as stream:
            check_whole(stream, list(stream))
        assert server.asked[1].headers["last-event-id"] == f"{REPLY_ID}:7.2"


def test_leaving_early_drops_the_connection_and_leaves_a_fragment() -> None:
    with cutting_server() as server, http_client(server) as http:
        with ChatStream(http, REQUEST) as stream:
            next(iter(stream))
        with pytest.raises(ReplyIncomplete):
            stream.result()


def test_several_choices_are_refused_at_once() -> None:
    with httpx.Client() as http, pytest.raises(ValueError, match="one choice"):
        ChatStream(http, {**REQUEST, "n": 2})
