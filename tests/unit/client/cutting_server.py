"""A real HTTP server on loopback that streams one scripted reply and cuts connections where it is told.

It knows the wire as written in the README (frames, IDs, resume statuses), not the gateway's code.
"""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

REPLY_ID = "reply-0123456789abcdef"
PIECES = ("A relay ", "race: ", "🏃‍♀️ ", "hands over\n", "the baton", "…")
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def _frame(seq: int, data: str) -> bytes:
    return f"data: {data}\nid: {REPLY_ID}:{seq}\n\n".encode()


def _chunk(seq: int, **fields: object) -> bytes:
    return _frame(seq, json.dumps({"id": REPLY_ID, **fields}, ensure_ascii=False))


def make_frames(pieces: Sequence[str] = PIECES) -> list[bytes]:
    """The whole reply; its IDs rise, with holes, as those of the chat format do."""
    frames = [_chunk(1, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])]
    for number, piece in enumerate(pieces):
        frames.append(_chunk(5 + number, choices=[{"index": 0, "delta": {"content": piece}}]))
    last = 14 + len(pieces)
    frames.append(_chunk(last, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    frames.append(_chunk(last + 1, choices=[], usage=USAGE))
    frames.append(_frame(last + 2, "[DONE]"))
    return frames


class Ending(Enum):
    """How a cut looks to HTTP."""

    BROKEN = "the connection ends inside the body"
    CLEAN = "the body is closed properly, too early"


@dataclass(frozen=True)
class Cut:
    """Ends a response after so many body bytes."""

    after: int
    ending: Ending = Ending.BROKEN


@dataclass(frozen=True)
class Refuse:
    """Answers one request with a status."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "no"


class NoAnswer:
    """Takes the request and closes the connection without a byte."""


Step = Cut | Refuse | NoAnswer


@dataclass
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class CuttingServer:
    """Takes one step of its script per request; when the script is over, it serves to the end."""

    def __init__(self, script: Sequence[Step], frames: Sequence[bytes]) -> None:
        self.script = list(script)
        self.frames = list(frames)
        self.asked: list[Asked] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed: the test is over
                return
            with connection:
                asked = _read_request(connection)
                if asked is not None:
                    with suppress(ConnectionError):  # a client that leaves in between is what we are for
                        self._answer(connection, asked)

    def _answer(self, connection: socket.socket, asked: Asked) -> None:
        if asked.path == "/v1/models":
            _send_json(connection, 200, {}, {"data": [{"id": "scripted"}]})
            return
        self.asked.append(asked)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, NoAnswer):
            return
        if isinstance(step, Refuse):
            _send_json(connection, step.status, step.headers, {"error": {"message": step.message}})
            return
        body = self._rest(asked.headers.get("last-event-id", ""))
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n"
            + f"Location: /v1/streams/{REPLY_ID}\r\n\r\n".encode()
        )
        sent = body if step is None else body[: step.after]
        if sent:
            connection.sendall(b"%x\r\n" % len(sent) + sent + b"\r\n")
        if step is None or step.ending is Ending.CLEAN:
            connection.sendall(b"0\r\n\r\n")

    def _rest(self, last_event_id: str) -> bytes:
        if not last_event_id:
            return b"".join(self.frames)
        ids = [frame.rstrip(b"\n").rpartition(b"id: ")[2].decode() for frame in self.frames]
        return b"".join(self.frames[ids.index(last_event_id) + 1 :])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def start(self) -> None:
        self._thread.start()


def _send_json(
    connection: socket.socket, status: int, headers: dict[str, str], document: dict[str, object]
) -> None:
    body = json.dumps(document).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def _read_request(connection: socket.socket) -> Asked | None:
    connection.settimeout(5)
    with connection.makefile("rb") as file:
        first = file.readline().decode()
        if not first:
            return None
        headers = {}
        while (line := file.readline().decode().strip()) != "":
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = file.read(int(headers.get("content-length", 0)))
    method, path, _ = first.split()
    return Asked(method, path, headers, body)


@contextmanager
def cutting_server(*script: Step, frames: Sequence[bytes] | None = None) -> Iterator[CuttingServer]:
    server = CuttingServer(script, frames if frames is not None else make_frames())
    server.start()
    try:
        yield server
    finally:
        server.close()
