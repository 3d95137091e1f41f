"""What one round measured: raw figures in seconds, as in the JSON."""

from dataclasses import dataclass, field
from enum import StrEnum


class Way(StrEnum):
    """Who computes an arriving prompt."""

    HANDED_OVER = "handed_over"  # a prefill worker
    LOCAL = "local"  # the decode worker


class Company(StrEnum):
    """What else the decode worker does."""

    ALONE = "alone"  # nothing
    BESIDE = "beside_streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt that arrived.

    Attributes:
        first_s, second_s: from its sending to the arrival of its first token, and of its second.
        gap_s: the longest gap of any steady stream from sending to second token; None where none runs.
    """

    way: Way
    company: Company
    num_tokens: int
    first_s: float
    second_s: float
    gap_s: float | None = None


@dataclass(slots=True)
class Round:
    """Everything, once.

    Attributes:
        idle_gaps_s: of the steady streams, while no prompt was there or had just gone.
    """

    asked: list[Asked] = field(default_factory=list)
    idle_gaps_s: list[float] = field(default_factory=list)
