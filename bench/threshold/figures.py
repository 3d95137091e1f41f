"""From raw rounds to figures. Pure: the same rounds give the same figures.

Several prompts of a round make one figure, their median; a gap is compared with the idle gaps of its round.
"""

import statistics
from collections.abc import Callable, Sequence

from bench.statistics import Spread, percentile, spread
from bench.threshold.decision import Decision, LengthFigures, decide
from bench.threshold.rounds import Asked, Company, Round, Way
from bench.threshold.settings import Settings

_NEEDED_STALLS = 5  # steps that must not decide an idle p99 by themselves; each delays every stream


class Figures:
    """Everything that is said about a run. Times in seconds."""

    def __init__(self, settings: Settings, rounds: Sequence[Round]) -> None:
        self.settings = settings
        self.rounds = rounds

    @property
    def decision(self) -> Decision:
        return decide(
            [self._of_length(length) for length in self.settings.lengths], self.settings.stall_bound
        )

    def first_s(self, length: int, company: Company, way: Way) -> Spread:
        return spread(self._by_round(length, company, way, lambda asked: asked.first_s))

    def second_s(self, length: int, company: Company, way: Way) -> Spread:
        """Of the request; the handoff gap is what lies between the first and this."""
        return spread(self._by_round(length, company, way, lambda asked: asked.second_s))

    def gap_s(self, length: int, way: Way) -> Spread:
        """The steady streams' longest around a prompt."""
        return spread(self._by_round(length, Company.BESIDE, way, _gap_s))

    def stall(self, length: int, way: Way) -> Spread:
        """The same in idle p99s, round by round."""
        return spread(self._stalls(length, way))

    def idle_p50_s(self) -> Spread:
        return spread(percentile(each.idle_gaps_s, 50) for each in self.rounds)

    def idle_p99_s(self) -> Spread:
        return spread(self._idle_p99s())

    def fewest_idle_gaps(self) -> int:
        return min(len(each.idle_gaps_s) for each in self.rounds)

    @property
    def needed_idle_gaps(self) -> int:
        """In a round; with fewer, a handful of stalled steps decides the p99."""
        return 100 * _NEEDED_STALLS * self.settings.streams

    def _of_length(self, length: int) -> LengthFigures:
        return LengthFigures(
            num_tokens=length,
            second_s={
                company: {
                    way: self._by_round(length, company, way, lambda asked: asked.second_s) for way in Way
                }
                for company in Company
            },
            stalls=self._stalls(length, Way.LOCAL),
        )

    def _stalls(self, length: int, way: Way) -> list[float]:
        gaps = self._by_round(length, Company.BESIDE, way, _gap_s)
        return [gap / p99 for gap, p99 in zip(gaps, self._idle_p99s(), strict=True)]

    def _idle_p99s(self) -> list[float]:
        return [percentile(each.idle_gaps_s, 99) for each in self.rounds]

    def _by_round(
        self, length: int, company: Company, way: Way, value: Callable[[Asked], float]
    ) -> list[float]:
        wanted = (length, company, way)
        return [
            statistics.median(
                value(asked) for asked in each.asked if (asked.num_tokens, asked.company, asked.way) == wanted
            )
            for each in self.rounds
        ]


def _gap_s(asked: Asked) -> float:
    if asked.gap_s is None:
        raise ValueError("no stream ran beside this prompt")
    return asked.gap_s
