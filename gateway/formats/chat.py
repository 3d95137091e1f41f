"""OpenAI's Chat Completions: chunks of a stream, or the whole reply as one JSON object."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.event_log import ReplyMeta
from gateway.events import Event, EventKind
from gateway.formats import Frame
from gateway.keepalive import KeepaliveMode

DONE = Frame(b"[DONE]")
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class ChatFormat:
    """`chat.completion.chunk` objects. A chunk's `id` is the reply ID."""

    keepalive_mode = KeepaliveMode.COMMENT_LINE

    def __init__(self, meta: ReplyMeta, *, include_usage: bool) -> None:
        self._base = {
            "id": meta.reply_id,
            "object": "chat.completion.chunk",
            "created": meta.created,
            "model": meta.model,
        }
        self._include_usage = include_usage

    def is_first_frame(self, event: Event) -> bool:
        return event.kind is EventKind.ITEM_START and event.payload["choice"] == 0

    def render(self, event: Event) -> Frame | None:
        payload = event.payload
        match event.kind:
            case EventKind.ITEM_START:
                return self._choice(event, {"role": "assistant", "content": ""}, None)
            case EventKind.DELTA:
                return self._choice(event, {"content": payload["text"]}, None)
            case EventKind.FINISH:
                return self._choice(event, {}, payload["reason"])
            case EventKind.USAGE if self._include_usage:
                return self._chunk(event, choices=[], usage=usage_json(payload))
            case EventKind.DONE:
                return DONE
            case EventKind.ERROR:
                return Frame(orjson.dumps({"error": error_json(payload), "sequence_number": event.seq}))
            case _:
                return None

    def _choice(self, event: Event, delta: dict[str, Any], reason: str | None) -> Frame:
        choice: dict[str, Any] = {
            "index": event.payload["choice"],
            "delta": delta,
            "logprobs": logprobs_json(event.payload.get("logprobs")),
            "finish_reason": _FINISH_REASONS[reason] if reason is not None else None,
        }
        if reason == "cancelled":
            choice["baton_finish_reason"] = reason
        usage = {"usage": None} if self._include_usage else {}
        return self._chunk(event, choices=[choice], **usage)

    def _chunk(self, event: Event, **fields: Any) -> Frame:
        return Frame(orjson.dumps({**self._base, **fields, "sequence_number": event.seq}))


@dataclass(slots=True)
class _ChoiceFold:
    """One choice of a buffered reply, as far as the log tells."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    reason: str | None = None

    def as_json(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(self.texts), "refusal": None},
            "logprobs": logprobs_json(self.logprobs),
            "finish_reason": _FINISH_REASONS[self.reason] if self.reason is not None else None,
        }
        if self.reason == "cancelled":
            choice["baton_finish_reason"] = self.reason
        return choice


class ChatFold:
    """Folds a log into the body of a buffered response, event by event."""

    def __init__(self, meta: ReplyMeta) -> None:
        self._meta = meta
        self._choices: dict[int, _ChoiceFold] = {}
        self._usage: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None  # payload of the error event, if that ended the reply

    def add(self, events: Iterable[Event]) -> None:
        """Takes the next events of the log."""
        for event in events:
            payload = event.payload
            if event.kind is EventKind.USAGE:
                self._usage = usage_json(payload)
            elif event.kind is EventKind.ERROR:
                self.error = payload
            elif "choice" in payload:
                choice = self._choices.setdefault(payload["choice"], _ChoiceFold())
                if event.kind is EventKind.DELTA:
                    choice.texts.append(payload["text"])
                    if "logprobs" in payload:
                        choice.logprobs = choice.logprobs or []
                        choice.logprobs += payload["logprobs"]
                elif event.kind is EventKind.FINISH:
                    choice.reason = payload["reason"]

    def body(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        return {
            "id": self._meta.reply_id,
            "object": "chat.completion",
            "created": self._meta.created,
            "model": self._meta.model,
            "choices": [choice.as_json(index) for index, choice in sorted(self._choices.items())],
            "usage": self._usage,
        }


def usage_json(payload: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `usage` from the event's payload."""
    return {
        "prompt_tokens": payload["prompt_tokens"],
        "completion_tokens": payload["completion_tokens"],
        "total_tokens": payload["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": payload["cached_tokens"]},
    }


def error_json(payload: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `error` from the event's payload."""
    return {"message": payload["message"], "type": payload["type"], "param": None, "code": payload["code"]}


def logprobs_json(logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of one choice."""
    if logprobs is None:
        return None
    content = [
        {
            **_token_json(entry["token"], entry["logprob"]),
            "top_logprobs": [_token_json(token, logprob) for _, token, logprob in entry["top"]],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _token_json(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
