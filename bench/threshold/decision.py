"""The threshold that measured figures allow. Pure: the same figures give the same threshold."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from bench.threshold.rounds import Company, Way

TIE = 0.02  # of the other way's time: so close is a tie, and local then spares a prefill worker the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFigures:
    """One prompt length; a round's figures stand at the same place in each.

    Attributes:
        second_s: request sent to second token in hand.
        stalls: longest gap of the steady streams around a local prompt, in idle p99s of the same round.
    """

    num_tokens: int
    second_s: Mapping[Company, Mapping[Way, Sequence[float]]]
    stalls: Sequence[float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the medians say, and how many of the rounds say so by themselves.

    Attributes:
        is_yes: of the medians.
        num_yes: of the rounds.
    """

    is_yes: bool
    num_yes: int
    num_rounds: int

    @property
    def is_unanimous(self) -> bool:
        """Whether every round agrees with the medians."""
        return self.num_yes == (self.num_rounds if self.is_yes else 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether prompts of one length should be computed locally.

    Attributes:
        no_slower: local's second token comes no later, by company. Only that alone decides: beside streams
            both ways wait for the end of a step, so which is ahead is chance until they are a step apart.
        no_stall: the running streams' longest gap stays within the bound.
    """

    num_tokens: int
    no_slower: Mapping[Company, Answer]
    no_stall: Answer

    @property
    def answers(self) -> tuple[Answer, Answer]:
        """Those that decide."""
        return (self.no_slower[Company.ALONE], self.no_stall)

    @property
    def qualifies(self) -> bool:
        return all(answer.is_yes for answer in self.answers)

    @property
    def is_within_noise(self) -> bool:
        """Whether rounds disagree so that it could have come out the other way."""
        if self.qualifies:
            return not all(answer.is_unanimous for answer in self.answers)
        return not any(answer.is_unanimous for answer in self.answers if not answer.is_yes)


@dataclass(frozen=True, slots=True)
class Decision:
    """The threshold, and the verdicts that it rests on, by ascending length."""

    verdicts: tuple[Verdict, ...]

    @property
    def taken(self) -> tuple[Verdict, ...]:
        """Those up to the threshold."""
        return tuple(takewhile(lambda verdict: verdict.qualifies, self.verdicts))

    @property
    def threshold_tokens(self) -> int:
        """0 if the shortest length does not qualify."""
        return self.taken[-1].num_tokens if self.taken else 0

    @property
    def slower_beside(self) -> tuple[int, ...]:
        """Lengths up to the threshold whose local second token came later beside streams, in every round."""
        beside = ((verdict.num_tokens, verdict.no_slower[Company.BESIDE]) for verdict in self.taken)
        return tuple(length for length, answer in beside if not answer.is_yes and answer.is_unanimous)

    @property
    def stopped_by(self) -> Verdict | None:
        """The shortest length that does not qualify; None if all do."""
        rest = self.verdicts[len(self.taken) :]
        return rest[0] if rest else None

    @property
    def left_out(self) -> tuple[int, ...]:
        """Longer lengths that would qualify by themselves: a threshold takes everything shorter along."""
        rest = self.verdicts[len(self.taken) :]
        return tuple(verdict.num_tokens for verdict in rest if verdict.qualifies)

    @property
    def uncertain(self) -> tuple[int, ...]:
        """Lengths that it rests on and whose verdicts are within noise."""
        rests_on = self.taken if self.stopped_by is None else (*self.taken, self.stopped_by)
        return tuple(verdict.num_tokens for verdict in rests_on if verdict.is_within_noise)

    @property
    def is_within_noise(self) -> bool:
        return bool(self.uncertain)


def decide(figures: Sequence[LengthFigures], stall_bound: float) -> Decision:
    """The largest length up to which every measured one is no slower locally, with no stall above the bound.

    By medians over rounds; ties count as local. Raises ValueError where nothing was measured.
    """
    return Decision(
        tuple(
            Verdict(
                each.num_tokens,
                {
                    company: _no_slower(ways[Way.LOCAL], ways[Way.HANDED_OVER])
                    for company, ways in each.second_s.items()
                },
                _answer(
                    (stall <= stall_bound for stall in each.stalls),
                    of_medians=_median(each.stalls) <= stall_bound,
                ),
            )
            for each in sorted(figures, key=lambda each: each.num_tokens)
        )
    )


def _no_slower(local: Sequence[float], handed_over: Sequence[float]) -> Answer:
    rounds = (ours <= theirs * (1 + TIE) for ours, theirs in zip(local, handed_over, strict=True))
    return _answer(rounds, of_medians=_median(local) <= _median(handed_over) * (1 + TIE))


def _answer(rounds: Iterable[bool], *, of_medians: bool) -> Answer:
    found = list(rounds)
    return Answer(of_medians, sum(found), len(found))


def _median(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("nothing was measured")
    return statistics.median(values)
