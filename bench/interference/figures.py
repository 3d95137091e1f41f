"""From raw rounds to figures. Pure: the same rounds give the same figures.

A ratio, loaded over idle, is taken within each turn, where both sides met the same machine one right after
the other, and only then over rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.interference.rounds import PromptTimes, Round, Turn, Window
from bench.interference.settings import Settings
from bench.statistics import Spread, percentile, spread

_STALL_S = 0.25
_STALL_MEDIANS = 5
_LEAST_STALL_MEDIANS = 2
STALL = (
    f"longer than {_STALL_S * 1000:.0f} ms or {_STALL_MEDIANS} idle medians of the same turn, whichever is "
    f"less, but never less than {_LEAST_STALL_MEDIANS} idle medians"
)


def stall_s(idle_median_s: float) -> float:
    """Above this, a gap is a stall."""
    return min(_STALL_MEDIANS * idle_median_s, max(_STALL_S, _LEAST_STALL_MEDIANS * idle_median_s))


@dataclass(frozen=True, slots=True)
class Itl:
    """Inter-token latencies of one window, in seconds. Gaps that several tokens ended do not count: the
    text of some was held back until it was whole, so their times are not those of tokens."""

    num_gaps: int
    num_held: int
    p50: float
    p99: float
    max: float
    num_stalls: int
    tokens_per_s: float


def itl(window: Window, idle: Window) -> Itl:
    """Raises ValueError where nothing arrived."""
    gaps = _single(window)
    limit = stall_s(percentile(_single(idle), 50))
    return Itl(
        num_gaps=len(gaps),
        num_held=len(window.gaps) - len(gaps),
        p50=percentile(gaps, 50),
        p99=percentile(gaps, 99),
        max=max(gaps),
        num_stalls=sum(gap > limit for gap in gaps),
        tokens_per_s=sum(gap.num_tokens for gap in window.gaps) / window.seconds,
    )


def _single(window: Window) -> list[float]:
    return [gap.seconds for gap in window.gaps if gap.is_itl]


class Figures:
    """Everything that is said about a run. Times in seconds."""

    def __init__(self, settings: Settings, rounds: Sequence[Round]) -> None:
        self.settings = settings
        self.rounds = rounds
        self._turns = {name: [each.turns[name] for each in rounds] for name in rounds[0].turns}
        self._idle = {name: [itl(t.idle, t.idle) for t in turns] for name, turns in self._turns.items()}
        self._loaded = {name: [itl(t.loaded, t.idle) for t in turns] for name, turns in self._turns.items()}

    @property
    def names(self) -> list[str]:
        """Of the arrangements that were measured."""
        return list(self._turns)

    def idle(self, name: str, value: Callable[[Itl], float]) -> Spread:
        return spread(map(value, self._idle[name]))

    def loaded(self, name: str, value: Callable[[Itl], float]) -> Spread:
        return spread(map(value, self._loaded[name]))

    def ratio(self, name: str, value: Callable[[Itl], float]) -> Spread:
        """Loaded over idle, turn by turn."""
        pairs = zip(self._loaded[name], self._idle[name], strict=True)
        return spread(value(loaded) / value(idle) for loaded, idle in pairs)

    def prompts(self, name: str, value: Callable[[PromptTimes], float | None]) -> Spread | None:
        """Of the prompts that arrived: the median of each round, then over rounds. None: nobody has it."""
        found = [[value(each) for each in turn.loaded.prompts] for turn in self._turns[name]]
        known = [[each for each in times if each is not None] for times in found]
        if not all(known):
            return None
        return spread(percentile(times, 50) for times in known)

    def turns(self, name: str, value: Callable[[Turn], float | None]) -> Spread | None:
        """Any other figure of a turn; None if a turn lacks it."""
        found = [value(turn) for turn in self._turns[name]]
        known = [each for each in found if each is not None]
        return spread(known) if len(known) == len(found) else None

    def short_first_s(self, name: str) -> Spread:
        """To the first text of a short prompt with nothing else running; the median of each round."""
        return spread(percentile(each.short_first_s[name], 50) for each in self.rounds)

    def short_first_ratio(self, name: str, other: str) -> Spread:
        """The same of one arrangement over another, round by round."""
        return spread(
            percentile(each.short_first_s[name], 50) / percentile(each.short_first_s[other], 50)
            for each in self.rounds
        )

    def fewest_gaps(self) -> int:
        """In any window."""
        return min(
            each.num_gaps for side in (self._idle, self._loaded) for them in side.values() for each in them
        )

    @property
    def has_enough_gaps(self) -> bool:
        return self.fewest_gaps() >= self.settings.needed_gaps
