"""The stages add up, and survive the way through JSON."""

import pytest

from observability.timings import TTFT_STAGES, HandoffStages, TtftStages

PARTS = {
    "gateway": 1.0,
    "decode_queue": 2.0,
    "prefill_queue": 3.0,
    "prefill": 40.0,
    "text_hold": 5.0,
    "log_append": 0.5,
    "flush": 0.25,
}


def test_relay_is_the_remainder() -> None:
    stages = TtftStages.from_parts(55.0, **PARTS)
    assert stages.relay == pytest.approx(55.0 - sum(PARTS.values()))
    assert stages.total == pytest.approx(55.0)


def test_relay_is_never_negative() -> None:
    stages = TtftStages.from_parts(50.0, **PARTS)
    assert stages.relay == 0.0
    assert stages.total == pytest.approx(sum(PARTS.values()))


def test_as_dict_keeps_the_order_and_ends_with_the_total() -> None:
    stages = TtftStages.from_parts(55.0, **PARTS)
    as_dict = stages.as_dict()
    assert list(as_dict) == [*TTFT_STAGES, "ttft"]
    assert sum(as_dict[stage] for stage in TTFT_STAGES) == pytest.approx(as_dict["ttft"])


def test_from_dict_reads_it_back_and_leaves_the_handoff_alone() -> None:
    stages = TtftStages.from_parts(55.0, **PARTS)
    handoff = HandoffStages(kv_transfer=4.0, join=1.5, first_step=8.0)
    timings = {**stages.as_dict(), **handoff.as_dict()}
    assert TtftStages.from_dict(timings) == stages
    assert HandoffStages.from_dict(timings) == handoff
    assert handoff.total == 13.5


def test_a_reply_without_handoff_has_no_handoff_stages() -> None:
    assert HandoffStages.from_dict(TtftStages().as_dict()) is None
