"""Medians with ranges: what is said of a figure that was measured in several rounds."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of all rounds, the smallest and the largest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)}..{_short(self.high)})"

    def scaled(self, factor: float) -> "Spread":
        """In another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)


def spread(values: Iterable[float]) -> Spread:
    """Raises ValueError if there are none: no figure without a measurement."""
    found = list(values)
    if not found:
        raise ValueError("nothing was measured")
    return Spread(statistics.median(found), min(found), max(found))


def percentile(values: Iterable[float], percent: float) -> float:
    """By nearest rank: the smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing was measured")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _short(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 5)}f}"
