"""From raw rounds to figures. Pure: the same rounds give the same figures.

A ratio is taken within each round, where both sides met the same machine, and only then over rounds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.engine.floor import WeightCount, floor_s
from bench.engine.measure import EXACT, FAST, Measured
from bench.engine.rounds import Comparison, FeaturesPoint, Round, SweepPoint
from bench.engine.settings import Settings
from bench.statistics import Spread, spread
from services.engine.precision import Precision

PEER = "transformers"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many greedy replies of two contestants were equal, token for token."""

    ours: str
    theirs: str
    num_equal: int
    num_replies: int


class Figures:
    """Everything that is said about a run."""

    def __init__(self, settings: Settings, measured: Measured, weights: WeightCount | None) -> None:
        self.settings = settings
        self.rounds: Sequence[Round] = measured.rounds
        self._kv_bytes_per_token = measured.kv_bytes_per_token
        self._weights = weights

    @property
    def bytes_per_s(self) -> Spread:
        return spread(each.bytes_per_s for each in self.rounds)

    def sweep_points(self, mode: str, batch: int, context: int) -> list[SweepPoint]:
        """One a round."""
        wanted = (mode, batch, context)
        return [p for each in self.rounds for p in each.sweep if (p.mode, p.batch, p.context) == wanted]

    def features(self, mode: str) -> list[FeaturesPoint]:
        """One a round."""
        return [point for each in self.rounds for point in each.features if point.mode == mode]

    def overhead_b16(self, mode: str) -> Spread:
        """Share of a step outside the forward pass at batch 16, every sampling feature on."""
        return spread(point.split.overhead for point in self.features(mode))

    def lag_p99_s(self) -> Spread:
        """Of the worse mode of each round."""
        return spread(max(point.lag.p99_s for point in each.features) for each in self.rounds)

    def floor_bytes(self, mode: str, context: int) -> tuple[int, float] | None:
        """Bytes of weights and of KV that a step of one stream reads, halfway through its reply."""
        if self._weights is None:
            return None
        precision = Precision.FP32 if mode == EXACT else self.settings.precision
        tokens = context + self.settings.sweep_tokens / 2
        return self._weights.num_bytes(precision), tokens * self._kv_bytes_per_token

    def bandwidth_fraction(self, mode: str, context: int) -> Spread | None:
        """Floor time / measured step time at batch 1, each round with its own bandwidth. None: no floor
        is known for this model, or batch 1 was not in the sweep."""
        needed = self.floor_bytes(mode, context)
        points = self.sweep_points(mode, 1, context)
        if needed is None or not points:
            return None
        return spread(
            floor_s(*needed, each.bytes_per_s) / point.split.step_s
            for each, point in zip(self.rounds, points, strict=True)
        )

    def compared(self, name: str, value: Callable[[Comparison], float]) -> Spread:
        """A contestant's own figure."""
        return spread(value(each.comparisons[name]) for each in self.rounds)

    def ratio(self, name: str, value: Callable[[Comparison], float]) -> Spread | None:
        """Ours over theirs, None without a peer."""
        if not self.settings.peers:
            return None
        return spread(value(e.comparisons[name]) / value(e.comparisons[PEER]) for e in self.rounds)

    def agreements(self) -> list[Agreement]:
        """Of every mode with `generate`, with continuous batching, and with our exact mode."""

        def singles(comparison: Comparison) -> tuple[tuple[int, ...], ...]:
            return comparison.single_replies

        def batches(comparison: Comparison) -> tuple[tuple[int, ...], ...]:
            return comparison.batch_replies

        found = []
        if self.settings.peers:
            for mode in (EXACT, FAST):
                found.append(self._agreement(mode, PEER, "generate", singles))
                found.append(self._agreement(mode, PEER, "generate_batch", batches))
        found.append(self._agreement(FAST, EXACT, "exact, batch 16", batches))
        return found

    def _agreement(
        self,
        ours: str,
        theirs: str,
        label: str,
        replies: Callable[[Comparison], Iterable[tuple[int, ...]]],
    ) -> Agreement:
        pairs = [
            pair
            for each in self.rounds
            for pair in zip(replies(each.comparisons[ours]), replies(each.comparisons[theirs]), strict=True)
        ]
        return Agreement(ours, label, sum(a == b for a, b in pairs), len(pairs))

    def result(self) -> dict[str, float | None]:
        """The figures of the last line: medians, to four digits; None where there is none.

        `quick` where nothing was measured.
        """
        context = self.settings.contexts[0]
        spreads: dict[str, Spread | None] = {
            "tokens_per_s_ratio_b16": self.ratio(FAST, decode_tokens_per_s),
            "step_time_ratio_b1": self.ratio(FAST, step_s),
            "overhead_b16": self.overhead_b16(FAST),
            "bandwidth_fraction_b1": self.bandwidth_fraction(FAST, context),
            "exact_tokens_per_s_ratio_b16": self.ratio(EXACT, decode_tokens_per_s),
            "exact_step_time_ratio_b1": self.ratio(EXACT, step_s),
            "exact_overhead_b16": self.overhead_b16(EXACT),
            "loop_lag_p99_ms": self.lag_p99_s().scaled(1000),
        }
        found: dict[str, float | None] = {"quick": True} if self.settings.is_quick else {}
        return found | {
            name: None if value is None else float(f"{value.median:.4g}") for name, value in spreads.items()
        }


def step_s(comparison: Comparison) -> float:
    return comparison.step_s


def decode_tokens_per_s(comparison: Comparison) -> float:
    return comparison.decode_tokens_per_s


def run_tokens_per_s(comparison: Comparison) -> float:
    return comparison.run_tokens_per_s
