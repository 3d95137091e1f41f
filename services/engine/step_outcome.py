"""What a step gave, and whether it speaks against the engine."""

from collections.abc import Sequence
from typing import NamedTuple

from services.engine.request import NoToken, SampledToken
from services.engine.scheduled_chunk import ScheduledChunk


class Outcome(NamedTuple):
    """What a step gave one of its chunks."""

    chunk: ScheduledChunk
    token: SampledToken | NoToken | None  # None if it does not sample


def count_failed(num_failed: int, outcomes: Sequence[Outcome]) -> int:
    """Failed steps in a row, after one more that gave these outcomes.

    One sequence whose logits are no numbers may be at fault itself. Where there are no others, it may be the
    weights: such a step has failed. One that sampled nothing says nothing about the engine. (One that raised
    gave no outcomes; it has failed, whether it was to sample or not.)

    Requests that share a bad beginning and end differently, or that are equal but share no cache, may fail
    one a step, and three in a row end the engine. Where all prompts begin alike, damaged weights look just
    the same, and these must end it.
    """
    tokens = [outcome.token for outcome in outcomes if outcome.token is not None]
    if not tokens:
        return num_failed
    return num_failed + 1 if all(token is NoToken.LOGITS for token in tokens) else 0
