"""How a reply ends when no generation is there to end it: the events that its log still lacks.

Invariant: the log so far plus the ending has the shape that `EventKind` describes.
Must not know: logs, owners, formats.
"""

from collections.abc import Sequence
from typing import Any

from gateway.event_log import ReplyMeta
from gateway.events import Event, EventKind

Emission = tuple[EventKind, dict[str, Any]]

_CLOSING = (
    (EventKind.PART_START, EventKind.TEXT_DONE),
    (EventKind.PART_START, EventKind.PART_DONE),
    (EventKind.ITEM_START, EventKind.ITEM_DONE),
)


def cancelled_ending(meta: ReplyMeta, events: Sequence[Event]) -> list[Emission]:
    """Closes every open choice with `finish: cancelled`, then usage and done."""
    seen = {(event.kind, event.payload.get("choice")) for event in events}
    kinds = {event.kind for event in events}
    created = next((event.payload for event in events if event.kind is EventKind.CREATED), None)
    ending: list[Emission] = []
    if created is None:
        created = {
            "created": meta.created,
            "model": meta.model,
            "num_prompt_tokens": len(meta.prompt_token_ids),
            "num_choices": 1,
        }
        ending.append((EventKind.CREATED, created))
    at_ms = max((event.payload.get("at_ms", 0) for event in events), default=0)
    for choice in range(created.get("num_choices", 1)):
        if (EventKind.FINISH, choice) in seen:
            continue
        for opening, closing in _CLOSING:
            if (opening, choice) in seen and (closing, choice) not in seen:
                ending.append((closing, {"choice": choice}))
        counts = {"num_generated_tokens": _num_tokens(events, choice), "num_cached_tokens": 0}
        finish: dict[str, Any] = {
            "choice": choice,
            "reason": "cancelled",
            "token_ids": [],
            **counts,
            "at_ms": at_ms,
        }
        ending.append((EventKind.FINISH, finish))
    if EventKind.USAGE not in kinds:
        prompt, completion = created.get("num_prompt_tokens", 0), _num_tokens(events, None)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": 0}
        ending.append((EventKind.USAGE, usage | {"total_tokens": prompt + completion}))
    ending.append((EventKind.DONE, {"timings": {}, "at_ms": at_ms}))
    return ending


def _num_tokens(events: Sequence[Event], choice: int | None) -> int:
    return sum(
        len(event.payload.get("token_ids", ()))
        for event in events
        if choice is None or event.payload.get("choice") == choice
    )
