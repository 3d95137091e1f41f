"""Medians with ranges, percentiles by nearest rank."""

import pytest

from bench.statistics import Spread, percentile, spread


def test_a_spread_is_median_smallest_and_largest() -> None:
    assert spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)
    assert spread([5.0]) == Spread(5.0, 5.0, 5.0)


def test_nothing_measured_gives_no_figure() -> None:
    with pytest.raises(ValueError, match="nothing"):
        spread([])
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 99)


def test_a_spread_in_another_unit() -> None:
    assert spread([0.5, 1.0, 2.0]).scaled(1000) == Spread(1000.0, 500.0, 2000.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 (0..0)"),
        (0.01234, "0.0123 (0.0123..0.0123)"),
        (1.0, "1.00 (1.00..1.00)"),
        (39.26, "39.3 (39.3..39.3)"),
        (12345.6, "12,346 (12,346..12,346)"),
    ],
)
def test_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert str(Spread(value, value, value)) == text


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (0.5, 1), (0, 1)])
def test_percentiles_are_values_that_occurred(percent: float, value: float) -> None:
    assert percentile(range(100, 0, -1), percent) == value
