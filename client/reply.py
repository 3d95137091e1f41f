"""What a reply is so far: folds the events of OpenAI's chat format into text, usage and an end.

Invariant: `complete` only after `[DONE]`; a reply of which an event is missing is never complete. Must
not know: connections.
"""

import json
from dataclasses import dataclass
from typing import Any

from client.errors import ProtocolViolation, ReplyFailed, ReplyIncomplete
from client.sse import ServerSentEvent


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the request and of the reply."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    reply_id: str
    text: str
    finish_reason: str
    usage: Usage | None
    num_resumes: int


class ReplyFold:
    """Takes one event after the other; the single place that says when a reply is whole."""

    def __init__(self, last_event_id: str = "") -> None:
        self.last_event_id = last_event_id
        self.reply_id: str | None = last_event_id.rpartition(":")[0] or None
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.complete = False
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def take(self, event: ServerSentEvent) -> str:
        """The text that this event adds, often none.

        Raises:
            ReplyFailed: the event says that the reply has failed.
            ProtocolViolation: the event is not the next one of this reply, or no JSON.
        """
        self._advance(event.id)
        if event.data == "[DONE]":
            self.complete = True
            return ""
        chunk = _parse(event.data)
        if error := chunk.get("error"):
            raise ReplyFailed(
                str(error.get("message")), str(error.get("type") or ""), str(error.get("code") or "")
            )
        if usage := chunk.get("usage"):
            self.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])
        text = ""
        for choice in chunk.get("choices", ()):
            text += choice.get("delta", {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self._pieces.append(text)
        return text

    def result(self, num_resumes: int) -> Reply:
        """Raises ReplyIncomplete unless the terminal event has come."""
        if not self.complete or self.reply_id is None or self.finish_reason is None:
            raise ReplyIncomplete(f"the reply has no end yet (last event {self.last_event_id or 'none'})")
        return Reply(self.reply_id, self.text, self.finish_reason, self.usage, num_resumes)

    def _advance(self, event_id: str) -> None:
        reply_id, seq = _split_id(event_id)
        if self.last_event_id:
            last_reply_id, last_seq = _split_id(self.last_event_id)
            if reply_id != last_reply_id:
                raise ProtocolViolation(f"event {event_id} is of another reply than {last_reply_id}")
            if seq <= last_seq:
                raise ProtocolViolation(f"event {event_id} came after {self.last_event_id}")
        self.reply_id, self.last_event_id = reply_id, event_id


def _split_id(event_id: str) -> tuple[str, int]:
    """`<reply>:<seq>`, or `<reply>:<seq>.<epoch>` for one sent while the server's log was down."""
    reply_id, _, rest = event_id.rpartition(":")
    seq = rest.partition(".")[0]
    if not reply_id or not (seq.isascii() and seq.isdigit()):
        raise ProtocolViolation(f"event ID {event_id!r} is not <reply>:<number>: cannot be resumed after it")
    return reply_id, int(seq)


def _parse(text: str) -> dict[str, Any]:
    try:
        chunk = json.loads(text)
    except ValueError as error:
        raise ProtocolViolation(f"an event's data is no JSON: {error}") from error
    if not isinstance(chunk, dict):
        raise ProtocolViolation("an event's data is no JSON object")
    return chunk
