"""Keeps requests away from a worker that is there and fails, and finds out when it works again.

    closed ── failures in a row ──▶ open ── backoff over ──▶ half-open ── the probe answers ──▶ closed
                                     ▲                          │
                                     └──── the probe fails ─────┘   each time for twice as long

Invariants: half-open lets one call in at a time, the probe, which has failed when the worker is silent for
too long; a call that was sent before the last opening says nothing about the worker since; one reply
counts as one failure however often it is tried again, so that a request which breaks every worker opens
none.
Must not know: what a call is, which errors are a worker's fault, who else there is.

Own, because what the registry has (aiobreaker, purgatory, aiocircuitbreaker, asyncbreaker) wraps one
awaited function and raises when open. Here a call is picked, admitted, read and finished in four
places, a report on a prefill worker comes from elsewhere, and an open one is ranked last, not refused.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

THRESHOLD = 3  # failures of different replies, in a row
FORGIVEN_AFTER = 10  # replies that began well, in a row: long ones take minutes to end well
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 30.0  # before the jitter, which takes up to half of it
SILENT_S = 15.0  # a worker that has told nobody anything for so long lets the calls wait that it has

_log = logging.getLogger(__name__)


class BreakerState(StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


class CircuitBreaker:
    """One worker's. It asks nobody and sets no timer: it is looked at when somebody picks.

    Args:
        name: for the log.
        random: draws the jitter, so that gateways do not probe in step.
    """

    def __init__(self, name: str, *, clock: Callable[[], float], random: Random) -> None:
        self._name = name
        self._clock = clock
        self._random = random
        self._causes: set[str] = set()  # what has failed in a row
        self._answers: set[str] = set()  # what has begun well since the last failure
        self._retry_at: float | None = None  # None: closed
        self._probe: Trial | None = None
        self._epoch = 0  # of the last opening
        self._heard_at = self._answered_at = float("-inf")
        self.num_openings = 0  # in a row, without a good record in between

    @property
    def state(self) -> BreakerState:
        retry_at = self._retry_at  # once: metrics are read in another thread
        if retry_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < retry_at else BreakerState.HALF_OPEN

    def lets_in(self) -> bool:
        """Whether the worker may be picked like any other. A probe that is overdue fails here."""
        if self._probe is not None and self._is_silent_since(self._probe.began_at):
            self._open()
        return self.state is BreakerState.CLOSED or (
            self.state is BreakerState.HALF_OPEN and self._probe is None
        )

    def begin(self, cause: str) -> "Trial":
        """A call is sent. In a half-open breaker it is the probe, if there is none.

        Args:
            cause: on whose behalf; failures with the same one count once.
        """
        is_probe = self.state is BreakerState.HALF_OPEN and self.lets_in()
        trial = self.observe(cause)
        if is_probe:
            self._probe = trial
        return trial

    def observe(self, cause: str) -> "Trial":
        """A call that may be sent, later and by somebody else: never the probe."""
        return Trial(self, cause, self._epoch, self._clock())

    def heard(self) -> None:
        """The worker does something, for whomever."""
        self._heard_at = self._clock()

    def reset(self) -> None:
        """Another process has come to the worker's address."""
        self._forgive()
        self._retry_at = self._probe = None
        self._heard_at = self._answered_at = float("-inf")
        self._epoch += 1

    def _is_silent_since(self, began_at: float) -> bool:
        return self._clock() - max(began_at, self._heard_at) >= SILENT_S

    def _answered(self, cause: str) -> None:
        """Others are let in, on parole: the next failure opens it again."""
        self._answered_at = self._clock()
        if self._retry_at is not None:
            self._retry_at = self._probe = None
            _log.info("worker %s answers again", self._name)
        self._answers.add(cause)
        if len(self._answers) >= FORGIVEN_AFTER:
            self._forgive()

    def _succeeded(self, cause: str) -> None:
        self._answered(cause)
        self._forgive()

    def _forgive(self) -> None:
        self._causes.clear()
        self._answers.clear()
        self.num_openings = 0

    def _failed(self, cause: str) -> None:
        if self.state is BreakerState.OPEN:
            return
        self._causes.add(cause)
        self._answers.clear()
        if self.num_openings or len(self._causes) >= THRESHOLD:
            self._open()

    def _open(self) -> None:
        whole_s = min(FIRST_BACKOFF_S * 2.0**self.num_openings, LAST_BACKOFF_S)
        backoff_s = whole_s * self._random.uniform(0.5, 1.0)
        _log.warning("worker %s keeps failing: nothing new for %.1f s", self._name, backoff_s)
        self._retry_at = self._clock() + backoff_s
        self._probe = None
        self._causes.clear()
        self._answers.clear()
        self._epoch += 1
        self.num_openings += 1


@dataclass(slots=True, eq=False)
class Trial:
    """What one call may say about its worker; after its failure, or the next opening, nothing."""

    _breaker: CircuitBreaker
    _cause: str
    _epoch: int
    began_at: float
    _has_failed: bool = False

    def heard(self) -> None:
        """The worker has sent something."""
        self._breaker.heard()

    def answered(self) -> None:
        """The worker has begun well; a long reply must not keep everybody else waiting."""
        if self._is_current:
            self._breaker._answered(self._cause)

    def succeeded(self) -> None:
        """The call has ended well."""
        if self._is_current:
            self._breaker._succeeded(self._cause)

    def failed(self) -> None:
        """The call has failed, and the worker is at fault."""
        if self._is_current:
            self._has_failed = True
            self._breaker._failed(self._cause)

    def given_up(self) -> None:
        """Nobody waits for it any more: the worker's fault if it was silent, to everybody, for too long."""
        if self._breaker._is_silent_since(self.began_at):
            self.failed()

    def dropped(self) -> None:
        """The call has ended in a way that says nothing. Idempotent."""
        if self.is_probe:
            self._breaker._probe = None

    @property
    def answers_others(self) -> bool:
        """Whether the worker has answered any call lately."""
        return self._breaker._clock() - self._breaker._answered_at < SILENT_S

    @property
    def is_probe(self) -> bool:
        return self._breaker._probe is self

    @property
    def _is_current(self) -> bool:
        return not self._has_failed and self._epoch == self._breaker._epoch
