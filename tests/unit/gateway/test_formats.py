"""Formats are pure: an event renders to the same bytes, one frame at most, wherever a stream begins."""

import json
from typing import Any

import pytest

from gateway.errors import Overloaded
from gateway.event_log import ReplyMeta
from gateway.events import Event, EventKind
from gateway.formats import Format
from gateway.formats.chat import ChatFold
from gateway.formats.registry import format_named

LOGPROBS = [{"token_id": 7, "token": " é", "logprob": -0.5, "top": [[7, " é", -0.5], [8, "x", -1.5]]}]


def meta(**fields: Any) -> ReplyMeta:
    defaults = {"reply_id": "r" * 32, "owner_hash": "", "model": "m", "fingerprint": "f", "format": "chat"}
    return ReplyMeta(**{**defaults, "created": 1_700_000_000, **fields})


def log_of(*choices: tuple[list[str], str], logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
    """A whole log: what each choice says, and why it ends."""
    entries: list[tuple[EventKind, dict[str, Any]]] = [
        (
            EventKind.CREATED,
            {"created": 1, "model": "m", "num_prompt_tokens": 3, "num_choices": len(choices)},
        ),
        (EventKind.IN_PROGRESS, {}),
    ]
    for index in range(len(choices)):
        entries += [(kind, {"choice": index}) for kind in (EventKind.ITEM_START, EventKind.PART_START)]
    for index, (texts, _) in enumerate(choices):
        for text in texts:
            delta = {"choice": index, "text": text, "token_ids": [7], "at_ms": 1.0}
            entries.append((EventKind.DELTA, delta | ({"logprobs": logprobs} if logprobs else {})))
    for index, (_, reason) in enumerate(choices):
        for kind in (EventKind.TEXT_DONE, EventKind.PART_DONE, EventKind.ITEM_DONE):
            entries.append((kind, {"choice": index}))
        finish = {"choice": index, "reason": reason, "token_ids": [], "num_generated_tokens": 2, "at_ms": 2.0}
        entries.append((EventKind.FINISH, finish))
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 1}
    entries += [(EventKind.USAGE, usage), (EventKind.DONE, {"timings": {}, "at_ms": 2.0})]
    return [Event(seq, kind, payload) for seq, (kind, payload) in enumerate(entries, 1)]


def rendering(name: str = "chat", **options: Any) -> Format:
    found = format_named(name, meta(format_options=options))
    assert found is not None
    return found


def chunks(events: list[Event], **options: Any) -> list[dict[str, Any]]:
    """The chat chunks before `[DONE]`, which must be the last frame."""
    frames = [frame for event in events if (frame := rendering(**options).render(event))]
    assert frames[-1].data == b"[DONE]"
    return [json.loads(frame.data) for frame in frames[:-1]]


def test_a_chat_stream_is_role_then_deltas_then_finish() -> None:
    found = chunks(log_of((["Hel", "lo"], "stop")))
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "stop"]
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in found} == {
        ("r" * 32, "chat.completion.chunk", 1_700_000_000, "m")
    }


def test_sequence_numbers_are_the_events_own_and_only_grow() -> None:
    events = log_of((["Hel", "lo"], "stop"))
    numbers = [chunk["sequence_number"] for chunk in chunks(events)]
    assert numbers == sorted(set(numbers))
    by_number = {event.seq: event for event in events}
    assert [by_number[n].kind for n in numbers] == ["item_start", "delta", "delta", "finish"]


def test_usage_is_a_chunk_without_choices_and_only_on_request() -> None:
    events = log_of((["x"], "length"))
    assert all(chunk["choices"] for chunk in chunks(events))
    *before, last = chunks(events, include_usage=True)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all(chunk["usage"] is None for chunk in before)


def test_a_cancelled_choice_reads_as_stop_and_says_so_beside_it() -> None:
    last = chunks(log_of((["x"], "cancelled")))[-1]["choices"][0]
    assert (last["finish_reason"], last["baton_finish_reason"]) == ("stop", "cancelled")
    assert "baton_finish_reason" not in chunks(log_of((["x"], "stop")))[-1]["choices"][0]


def test_an_error_event_has_openais_shape() -> None:
    frame = rendering().render(Event(3, EventKind.ERROR, Overloaded("full").payload(1.0)))
    assert frame is not None
    error = json.loads(frame.data)["error"]
    assert error == {"message": "full", "type": "rate_limit_error", "param": None, "code": "overloaded"}


def test_logprobs_travel_with_their_delta_and_whole_in_the_body() -> None:
    events = log_of((["é", "é"], "stop"), logprobs=LOGPROBS)
    entry = chunks(events)[1]["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (" é", -0.5, [32, 195, 169])
    assert [top["token"] for top in entry["top_logprobs"]] == [" é", "x"]
    assert fold(events)["choices"][0]["logprobs"]["content"] == [entry, entry]
    assert chunks(log_of((["x"], "stop")))[1]["choices"][0]["logprobs"] is None


def fold(events: list[Event]) -> dict[str, Any]:
    folded = ChatFold(meta())
    folded.add(events)
    return folded.body()


def test_the_body_is_the_stream_folded_choice_by_choice() -> None:
    events = log_of((["a", "b"], "stop"), (["c"], "length"), ([], "cancelled"))
    body = fold(events)
    assert body["object"] == "chat.completion"
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks(events):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert {choice["index"]: choice["message"]["content"] for choice in body["choices"]} == texts
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length", "stop"]
    assert body["choices"][2]["baton_finish_reason"] == "cancelled"
    assert body["usage"] == chunks(events, include_usage=True)[-1]["usage"]


def test_a_fold_is_the_same_however_the_log_is_paged() -> None:
    events = log_of((list("relay"), "stop"))
    paged = ChatFold(meta())
    for event in events:
        paged.add([event])
    assert paged.body() == fold(events)


def test_the_native_format_shows_every_event_with_its_fields() -> None:
    events = log_of((["a"], "stop"))
    frames = [rendering("baton").render(event) for event in events]
    assert [json.loads(frame.data)["seq"] for frame in frames if frame] == list(range(1, len(events) + 1))
    for event, frame in zip(events, frames, strict=True):
        assert frame is not None
        assert frame.name == event.kind
        assert json.loads(frame.data) == {"seq": event.seq, "kind": event.kind, **event.payload}


@pytest.mark.parametrize("name", ["chat", "baton"])
def test_exactly_the_first_frame_of_a_stream_says_that_it_is(name: str) -> None:
    events = log_of((["a"], "stop"), (["b"], "stop"))
    shown = [event for event in events if rendering(name).render(event)]
    assert [event for event in shown if rendering(name).is_first_frame(event)] == shown[:1]


@pytest.mark.parametrize("name", ["chat", "baton"])
def test_rendering_from_any_point_gives_the_same_bytes(name: str) -> None:
    events = log_of((["a", "b"], "stop"), (["c"], "length"), logprobs=LOGPROBS)
    whole = [rendering(name, include_usage=True).render(event) for event in events]
    for cut in range(len(events)):
        resumed = rendering(name, include_usage=True)
        assert [resumed.render(event) for event in events[cut:]] == whole[cut:]


def test_another_format_does_not_inherit_the_creating_ones_options() -> None:
    created_elsewhere = meta(format="baton", format_options={"include_usage": True})
    found = format_named("chat", created_elsewhere)
    assert found is not None
    assert found.render(log_of((["x"], "stop"))[-2]) is None


def test_a_format_that_does_not_exist_is_none() -> None:
    assert format_named("telegram", meta()) is None
