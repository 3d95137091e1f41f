"""The events of a reply's log: the one source of truth that every format renders.

A reply is an append-only log. Sequence numbers start at 1 and are contiguous; a log ends with
exactly one terminal event (`done` or `error`). Every event renders to at most one SSE frame in any
format, so that an event ID marks an exact point of the byte stream.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    """What happened, finely enough that no format needs two frames for one event.

    Payloads (JSON objects; `choice` is the choice index):

    created      {"created": unix seconds, "model": str, "num_prompt_tokens": int, "num_choices": int}
    in_progress  {}
    item_start   {"choice"}
    part_start   {"choice"}
    delta        {"choice", "text": str (never empty), "token_ids": [int, ...],
                  "logprobs": [{"token_id", "token", "logprob",
                                "top": [[token_id, token, logprob]]}] or absent,
                  "at_ms": ms since the request arrived, on the owner's monotonic clock}
    text_done    {"choice"}
    part_done    {"choice"}
    item_done    {"choice"}
    finish       {"choice", "reason": "stop" | "length" | "cancelled", "token_ids": [int, ...]
                  (tokens without text), "num_generated_tokens": int, "num_cached_tokens": int
                  (of the prompt, the most that any choice found cached so far), "at_ms"}
    usage        {"prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens"}
    done         {"timings": {stage: ms}, "at_ms"}
    error        {"status": int, "type": str, "code": str, "message": str, "timings": {stage: ms},
                  "at_ms"}

    A reply with n choices has item_start, part_start, delta..., text_done, part_done, item_done and
    finish once per choice, interleaved, then one usage and one done.
    """

    CREATED = "created"
    IN_PROGRESS = "in_progress"
    ITEM_START = "item_start"
    PART_START = "part_start"
    DELTA = "delta"
    TEXT_DONE = "text_done"
    PART_DONE = "part_done"
    ITEM_DONE = "item_done"
    FINISH = "finish"
    USAGE = "usage"
    DONE = "done"
    ERROR = "error"


TERMINAL_KINDS = frozenset({EventKind.DONE, EventKind.ERROR})


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a reply's log. `epoch` is that of the owner that wrote it.

    `logged` is False only for an event that had to go out while the log was down: its SSE frame
    then says `id: <reply>:<seq>.<epoch>`. It is no part of the event's identity.
    """

    seq: int
    kind: EventKind
    payload: dict[str, Any]
    epoch: int = 1
    logged: bool = field(default=True, compare=False)

    @property
    def is_terminal(self) -> bool:
        return self.kind in TERMINAL_KINDS


class ReplyStatus(StrEnum):
    """Where a reply stands. The last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    ERROR = "error"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
