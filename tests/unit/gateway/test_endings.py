"""An ending completes any prefix of a reply's log to the shape that formats rely on."""

from collections import Counter
from typing import Any

import pytest

from gateway.endings import cancelled_ending
from gateway.events import Event, EventKind
from tests.unit.gateway.event_logs import new_meta

META = new_meta(prompt_token_ids=(1, 2, 3), created=7)


def undisturbed(num_choices: int) -> list[Event]:
    """A whole reply: the choices in step, then usage and done."""
    created = {"created": 7, "model": "m", "num_prompt_tokens": 3, "num_choices": num_choices}
    emissions: list[tuple[EventKind, dict[str, Any]]] = [
        (EventKind.CREATED, created),
        (EventKind.IN_PROGRESS, {}),
    ]
    for kind in (EventKind.ITEM_START, EventKind.PART_START, EventKind.DELTA, EventKind.DELTA):
        for choice in range(num_choices):
            extra = {"text": "x", "token_ids": [5, 6], "at_ms": 10} if kind is EventKind.DELTA else {}
            emissions.append((kind, {"choice": choice} | extra))
    for choice in range(num_choices):
        closing = (EventKind.TEXT_DONE, EventKind.PART_DONE, EventKind.ITEM_DONE)
        emissions.extend((kind, {"choice": choice}) for kind in closing)
        last = {"reason": "stop", "token_ids": [9], "num_generated_tokens": 5, "at_ms": 20}
        emissions.append((EventKind.FINISH, {"choice": choice} | last))
    tokens = 5 * num_choices
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens, "cached_tokens": 0}
    emissions.append((EventKind.USAGE, usage))
    emissions.append((EventKind.DONE, {"timings": {}, "at_ms": 21}))
    return [Event(seq, kind, payload) for seq, (kind, payload) in enumerate(emissions, 1)]


@pytest.mark.parametrize("num_choices", [1, 2, 3])
def test_every_prefix_is_completed_to_the_same_shape(num_choices: int) -> None:
    whole = undisturbed(num_choices)
    for length in range(len(whole)):
        prefix = whole[:length]
        ended = [(event.kind, event.payload) for event in prefix] + cancelled_ending(META, prefix)
        kinds = Counter((kind, payload.get("choice")) for kind, payload in ended)
        assert ended[-1][0] is EventKind.DONE
        assert ended[-2][0] is EventKind.USAGE
        assert (
            kinds[EventKind.CREATED, None] == kinds[EventKind.USAGE, None] == kinds[EventKind.DONE, None] == 1
        )
        choices = num_choices if length else 1  # before `created`, nothing tells of more
        for choice in range(choices):
            own = [kind for kind, payload in ended if payload.get("choice") == choice]
            assert own[-1] is EventKind.FINISH
            for start, end in (
                (EventKind.ITEM_START, EventKind.ITEM_DONE),
                (EventKind.PART_START, EventKind.PART_DONE),
                (EventKind.PART_START, EventKind.TEXT_DONE),
            ):
                assert kinds[start, choice] == kinds[end, choice] <= 1
            assert kinds[EventKind.FINISH, choice] == 1


@pytest.mark.parametrize("num_choices", [1, 2])
def test_the_tokens_add_up(num_choices: int) -> None:
    whole = undisturbed(num_choices)
    for length in range(len(whole) - 1):
        prefix = whole[:length]
        ending = cancelled_ending(META, prefix)
        emitted = sum(len(event.payload.get("token_ids", ())) for event in prefix)
        finishes = [event.payload for event in prefix if event.kind is EventKind.FINISH]
        finishes += [payload for kind, payload in ending if kind is EventKind.FINISH]
        assert sum(payload["num_generated_tokens"] for payload in finishes) == emitted
        for kind, payload in ending:
            if kind is EventKind.USAGE:
                assert payload["completion_tokens"] == emitted
                assert payload["total_tokens"] == 3 + emitted


def test_an_empty_log_is_ended_from_its_meta() -> None:
    ending = cancelled_ending(META, [])
    assert [kind for kind, _ in ending] == [
        EventKind.CREATED,
        EventKind.FINISH,
        EventKind.USAGE,
        EventKind.DONE,
    ]
    assert ending[0][1] == {"created": 7, "model": "m", "num_prompt_tokens": 3, "num_choices": 1}
