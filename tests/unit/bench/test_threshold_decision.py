"""The threshold that measured figures allow."""

from collections.abc import Sequence

import pytest

from bench.threshold.decision import Decision, LengthFigures, decide
from bench.threshold.rounds import Company, Way

CALM, STALLED = (1.0, 1.0, 1.0), (3.0, 3.0, 3.0)
QUICKER, SLOWER = (0.8, 0.8, 0.8), (1.2, 1.2, 1.2)


def made(
    num_tokens: int,
    local: Sequence[float],
    stalls: Sequence[float] = CALM,
    *,
    beside: Sequence[float] = QUICKER,
) -> LengthFigures:
    """One length in three rounds; handed over, a second token takes one second."""
    handed_over = (1.0, 1.0, 1.0)
    return LengthFigures(
        num_tokens=num_tokens,
        second_s={
            Company.ALONE: {Way.LOCAL: local, Way.HANDED_OVER: handed_over},
            Company.BESIDE: {Way.LOCAL: beside, Way.HANDED_OVER: handed_over},
        },
        stalls=stalls,
    )


def decided(*lengths: LengthFigures) -> Decision:
    return decide(lengths, stall_bound=2.0)


def test_the_longest_length_up_to_which_all_qualify() -> None:
    decision = decided(made(64, SLOWER), made(2, QUICKER), made(16, QUICKER))
    assert decision.threshold_tokens == 16
    assert decision.stopped_by is not None
    assert decision.stopped_by.num_tokens == 64
    assert not decision.is_within_noise


@pytest.mark.parametrize(
    ("local", "stalls", "threshold"),
    [
        ((1.0, 1.0, 1.0), CALM, 2),
        ((1.02, 1.02, 1.02), CALM, 2),
        ((1.03, 1.03, 1.03), CALM, 0),
        (QUICKER, (2.0, 2.0, 2.0), 2),
        (QUICKER, (2.1, 2.1, 2.1), 0),
    ],
    ids=["equal", "a tie", "more than a tie", "at the bound", "above the bound"],
)
def test_ties_count_as_local_and_a_stall_does_not(
    local: Sequence[float], stalls: Sequence[float], threshold: int
) -> None:
    assert decided(made(2, local, stalls)).threshold_tokens == threshold


def test_nothing_qualifies() -> None:
    decision = decided(made(2, SLOWER), made(4, QUICKER, STALLED))
    assert decision.threshold_tokens == 0
    assert (decision.taken, decision.left_out) == ((), ())
    assert not decision.is_within_noise


def test_everything_qualifies() -> None:
    decision = decided(made(2, QUICKER), made(4, QUICKER))
    assert (decision.threshold_tokens, decision.stopped_by) == (4, None)


def test_what_qualifies_beyond_a_length_that_does_not_is_left_out() -> None:
    decision = decided(made(2, QUICKER), made(4, SLOWER), made(8, QUICKER), made(16, QUICKER, STALLED))
    assert decision.threshold_tokens == 2
    assert decision.left_out == (8,)


@pytest.mark.parametrize(
    ("local", "stalls", "expected"),
    [
        ((0.8, 0.9, 1.3), CALM, (2, True)),
        ((0.8, 1.2, 1.3), CALM, (0, True)),
        ((0.8, 1.2, 1.3), STALLED, (0, False)),
        ((0.8, 1.2, 1.3), (1.0, 3.0, 3.0), (0, True)),
        (QUICKER, (1.0, 1.0, 9.0), (2, True)),
    ],
    ids=["one round against", "one round for", "stalls for certain", "neither for certain", "one stall"],
)
def test_medians_decide_and_rounds_that_disagree_are_noise(
    local: Sequence[float], stalls: Sequence[float], expected: tuple[int, bool]
) -> None:
    decision = decided(made(2, local, stalls))
    assert (decision.threshold_tokens, decision.is_within_noise) == expected


def test_noise_beyond_the_length_that_stops_it_does_not_matter() -> None:
    decision = decided(made(2, QUICKER), made(4, SLOWER), made(8, (0.8, 0.9, 1.3)))
    assert not decision.is_within_noise


def test_a_later_second_token_beside_streams_is_told_and_decides_nothing() -> None:
    decision = decided(made(2, QUICKER, beside=SLOWER), made(4, QUICKER, beside=(0.8, 1.2, 1.2)))
    assert decision.threshold_tokens == 4
    assert decision.slower_beside == (2,)


def test_nothing_measured_gives_no_threshold() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        decided(made(2, (), ()))
