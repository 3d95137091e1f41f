"""A client on a raw socket, so that a test decides to the byte where a stream breaks."""

import json
import socket
from dataclasses import dataclass
from typing import Any, Self

import httpx


@dataclass(frozen=True, slots=True)
class Frame:
    """One SSE event as sent: its raw text, its id and its data."""

    raw: str
    event_id: str
    data: str

    @property
    def text(self) -> str:
        """Reply text of an OpenAI chat chunk."""
        return "".join(choice["delta"].get("content") or "" for choice in self.choices)

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The choices of an OpenAI chat chunk; none in other events."""
        return [] if self.data == "[DONE]" else json.loads(self.data).get("choices", [])

    @property
    def usage(self) -> dict[str, Any] | None:
        """The usage of an OpenAI chat chunk."""
        return None if self.data == "[DONE]" else json.loads(self.data).get("usage")


def _request(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: baton", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class RawStream:
    """One HTTP response, read byte by byte, with chunked coding undone as it comes."""

    def __init__(
        self, port: int, method: str, path: str, body: dict[str, Any] | None = None, **headers: str
    ) -> None:
        payload = json.dumps(body).encode() if body is not None else b""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.sendall(_request(method, path, payload, {"Content-Type": "application/json", **given}))
        self._raw = b""
        self.body = b""
        self.complete = False  # whether the chunked body was closed
        while b"\r\n\r\n" not in self._raw:
            if not self._fill():
                raise AssertionError(f"no response headers: {self._raw!r}")
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        self.status = int(status.split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self._unchunk()

    def _fill(self) -> bool:
        received = self._socket.recv(65536)
        self._raw += received
        return bool(received)

    def _unchunk(self) -> None:
        while not self.complete:
            size, separator, rest = self._raw.partition(b"\r\n")
            if not separator or len(rest) < int(size, 16) + 2:
                return
            length = int(size, 16)
            self.body += rest[:length]
            self._raw = rest[length + 2 :]
            self.complete = length == 0

    def read_bytes(self, count: int) -> bytes:
        """Reads until `count` body bytes are there or the body ends; returns exactly those."""
        while len(self.body) < count and not self.complete and self._fill():
            self._unchunk()
        return self.body[:count]

    def read_frames(self, count: int) -> list[Frame]:
        """Reads until `count` events are there or the body ends."""
        while len(frames(self.body)) < count and not self.complete and self._fill():
            self._unchunk()
        return frames(self.body)[:count]

    def read_to_text(self) -> Frame:
        """Reads until an event carries reply text; returns it."""
        while True:
            for frame in frames(self.body):
                if frame.text:
                    return frame
            if self.complete or not self._fill():
                raise AssertionError(f"the stream ended without text: {self.body!r}")
            self._unchunk()

    def read_all(self) -> list[Frame]:
        """Reads to the end of the body or of the connection."""
        while not self.complete and self._fill():
            self._unchunk()
        return frames(self.body)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def frames(body: bytes) -> list[Frame]:
    """Whole events of a body; what follows the last blank line is not one yet."""
    found = []
    for block in body.split(b"\n\n")[:-1]:
        lines = [line for line in block.decode().split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        found.append(Frame("\n".join(lines), fields.get("id", ""), fields["data"]))
    return found


def post_json(
    port: int, path: str, body: dict[str, Any] | bytes, **headers: str
) -> tuple[int, dict[str, Any]]:
    """A plain POST whose response is JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(
        f"http://127.0.0.1:{port}{path}",
        content=content,
        headers={"content-type": "application/json", **headers},
        timeout=60,
    )
    return response.status_code, response.json()


def stream_chat(port: int, **body: Any) -> RawStream:
    """POSTs a streamed chat completion."""
    request = {
        "model": "baton-sim",
        "messages": [{"role": "user", "content": "Tell me about relay races."}],
        "stream": True,
    }
    return RawStream(port, "POST", "/v1/chat/completions", {**request, **body})


def resume(port: int, event_id: str) -> RawStream:
    """Resumes after an event ID."""
    reply_id = event_id.partition(":")[0]
    return RawStream(port, "GET", f"/v1/streams/{reply_id}", Last_Event_ID=event_id)
