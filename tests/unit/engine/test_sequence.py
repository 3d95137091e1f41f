"""A step may give a sequence several tokens: all are named, in order, up to the first that ends it."""

from collections.abc import Sequence

import pytest

from services.engine.request import (
    FinishReason,
    SampledToken,
    SequenceEvent,
    SequenceFinished,
    TextGenerated,
)
from services.engine.sequence import EngineSequence
from services.engine.sequence_state import SequenceState
from tests.unit.engine.scheduling import EOS, TOKENIZER, Bench

A, RELAY, RACE, IS = (TOKENIZER.encode(f" {word}").ids[0] for word in ("a", "relay", "race", "is"))
RUNNER = TOKENIZER.encode("🏃").ids  # a token for each byte


def running(**sampling: object) -> tuple[Bench, EngineSequence]:
    """A sequence whose prompt has been computed."""
    bench = Bench()
    sequence = bench.add(4, **{"ignore_eos": False, **sampling})  # type: ignore[arg-type]
    bench.scheduler.admit()
    sequence.num_computed_tokens = 4
    return bench, sequence


def take(sequence: EngineSequence, token_ids: Sequence[int]) -> list[SequenceEvent]:
    return sequence.take_tokens([SampledToken(token_id) for token_id in token_ids])


def named(events: Sequence[SequenceEvent]) -> list[int]:
    """The tokens that events account for."""
    return [token.token_id for event in events for token in event.tokens]  # type: ignore[union-attr]


def text(events: Sequence[SequenceEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextGenerated))


def test_the_tokens_of_a_step_come_in_order_with_their_text() -> None:
    _, sequence = running()
    events = take(sequence, [A, RELAY])
    assert {type(event) for event in events} == {TextGenerated}
    assert (named(events), text(events)) == ([A, RELAY], " a relay")
    assert sequence.state is SequenceState.RUNNING
    assert sequence.num_generated_tokens == 2
    assert sequence.num_uncomputed_tokens == 2


def test_tokens_without_whole_text_wait_for_the_next_step() -> None:
    _, sequence = running()
    events = take(sequence, [A, *RUNNER[:2]])
    assert (named(events), text(events)) == ([A], " a")
    events = take(sequence, RUNNER[2:])
    assert (named(events), text(events)) == (RUNNER, "🏃")


@pytest.mark.parametrize(
    ("sampling", "taken", "reason", "shown", "textless"),
    [
        ({}, [A, EOS, RELAY], FinishReason.STOP, " a", [EOS]),
        ({}, [EOS, A], FinishReason.STOP, "", [EOS]),
        ({"stop_token_ids": (RELAY,)}, [A, RELAY, RACE], FinishReason.STOP, " a", [RELAY]),
        ({"max_tokens": 2}, [A, RELAY, RACE], FinishReason.LENGTH, " a relay", []),
        ({"max_tokens": 2}, [A, RUNNER[0], RUNNER[1]], FinishReason.LENGTH, " a", [RUNNER[0]]),
        ({"stop": ("a",)}, [A, RELAY], FinishReason.STOP, " ", []),
        ({"stop": (" a",)}, [A, RELAY], FinishReason.STOP, "", [A]),
        ({"stop": (" a",), "include_stop": True}, [A, RELAY], FinishReason.STOP, " a", []),
        ({"stop": ("a rel",)}, [A, RELAY, RACE], FinishReason.STOP, " ", []),
        ({"stop": (" a",), "min_tokens": 2}, [A, RELAY, A, RACE], FinishReason.STOP, " a relay", [A]),
    ],
)
def test_what_lies_behind_the_end_is_dropped(
    sampling: dict[str, object],
    taken: list[int],
    reason: FinishReason,
    shown: str,
    textless: list[int],
) -> None:
    bench, sequence = running(**sampling)
    events = take(sequence, taken)
    finished = events[-1]
    assert isinstance(finished, SequenceFinished)
    assert all(isinstance(event, TextGenerated) for event in events[:-1])
    assert (finished.reason, text(events), [t.token_id for t in finished.tokens]) == (reason, shown, textless)
    assert named(events) == taken[: finished.num_generated_tokens]
    assert list(sequence.token_ids[4:]) == named(events)
    assert len(named(events)) < len(taken)
    assert sequence.state is SequenceState.ENDED
    assert bench.scheduler.blocks.num_used == 0


def test_a_stop_string_that_may_have_begun_is_held_over_the_step() -> None:
    _, sequence = running(stop=(" relay race",))
    events = take(sequence, [A, RELAY])
    assert (named(events), text(events)) == ([A], " a")
    events = take(sequence, [IS, RACE])
    assert (named(events), text(events)) == ([RELAY, IS, RACE], " relay is race")


def test_a_sequence_that_is_to_be_computed_here_takes_no_first_token_in_the_queue_either() -> None:
    sequence = Bench().add(4)
    assert sequence.state is SequenceState.WAITING
    with pytest.raises(ValueError, match="computed here"):
        sequence.accept_first_token(SampledToken(A))
