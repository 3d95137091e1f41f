"""Which steps speak against the engine."""

import pytest

from services.engine.request import NoToken, SampledToken
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.step_outcome import Outcome, count_failed
from tests.unit.engine.scheduling import Bench

TOKEN, LOGITS, REQUEST = SampledToken(5), NoToken.LOGITS, NoToken.REQUEST


@pytest.mark.parametrize(
    ("tokens", "num_failed"),
    [
        ([LOGITS], 3),
        ([LOGITS, LOGITS, None], 3),
        ([LOGITS, REQUEST], 0),
        ([LOGITS, TOKEN], 0),
        ([REQUEST], 0),
        ([TOKEN], 0),
        ([None], 2),
        ([], 2),
    ],
)
def test_only_a_step_in_which_no_logits_were_of_use_counts(
    tokens: list[SampledToken | NoToken | None], num_failed: int
) -> None:
    chunk = ScheduledChunk(Bench().add(4), 0, 4)
    assert count_failed(2, [Outcome(chunk, token) for token in tokens]) == num_failed
