"""When to ask again, and for what: the decisions of the resuming client, without any input or output.

One `Resuming` follows one reply over as many connections as it takes. The drivers in `stream.py`
(blocking and async) do what it says.

Invariant: the reply is asked for with POST once, and once only: as soon as the request may have
arrived, every further attempt is a resume by event ID. Must not know: sockets, sleeping, threads.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from client.errors import ConnectionLost, RequestRefused, ResumeRefused
from client.reply import ReplyFold
from client.sse import SseDecoder

# The log is down or the gateway is busy or starting: the reply is still there. Any other status is final.
_TRY_AGAIN = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patiently a cut stream is resumed. Durations in seconds."""

    give_up_after_s: float = 30.0  # without one new event
    first_delay_s: float = 0.1  # before the second attempt; the first comes at once
    longest_delay_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One HTTP request to make."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] | None = None


@dataclass(slots=True)
class Resuming:
    """One reply on its way.

    Args:
        request: body of the chat completion; None to go on with a reply from `fold.last_event_id`.
        clock: monotonic seconds.
        jitter: a number in [0, 1); spreads clients that lost the same gateway.
    """

    request: dict[str, Any] | None
    fold: ReplyFold
    policy: RetryPolicy
    clock: Callable[[], float]
    jitter: Callable[[], float] = field(default=random.random)
    num_resumes: int = 0
    _path: str | None = None  # of the reply's stream, once known
    _decoder: SseDecoder = field(default_factory=SseDecoder)
    _num_failures: int = 0  # since the last event
    _stuck_since: float | None = None

    def next_attempt(self) -> Attempt:
        """The request to send now."""
        self._decoder = SseDecoder(self.fold.last_event_id)
        if self._path is None and self.fold.reply_id is not None:
            self._path = f"/v1/streams/{self.fold.reply_id}"
        if self._path is None:
            return Attempt("POST", "/v1/chat/completions", {"Accept": "text/event-stream"}, self.request)
        headers = {"Accept": "text/event-stream"}
        if self.fold.last_event_id:
            headers["Last-Event-ID"] = self.fold.last_event_id
        return Attempt("GET", f"{self._path}?format=chat", headers)

    def accepted(self, headers: Mapping[str, str]) -> None:
        """A stream's headers are here."""
        if location := headers.get("location"):
            self._path = httpx.URL(location).path

    def refused(self, status: int, headers: Mapping[str, str], body: bytes) -> float:
        """The answer is no stream. Returns how long to wait; raises if asking again is of no use.

        Raises:
            RequestRefused, ResumeRefused, ConnectionLost
        """
        message = _error_message(body) or httpx.codes.get_reason_phrase(status)
        retry_after_s = _seconds(headers.get("retry-after"))
        if self._path is None:
            raise RequestRefused(status, message, retry_after_s)
        if status not in _TRY_AGAIN:
            raise ResumeRefused(status, message, retry_after_s)
        return max(self.cut(RequestRefused(status, message)), retry_after_s or 0.0)

    def feed(self, received: bytes) -> Iterator[str]:
        """Text pieces that these bytes complete. Raises what `ReplyFold.take` raises."""
        for event in self._decoder.feed(received):
            if self.fold.complete:
                return
            text = self.fold.take(event)
            self._num_failures, self._stuck_since = 0, None
            if text:
                yield text

    def cut(self, cause: Exception | None) -> float:
        """The connection ended before the reply did. Returns how long to wait before the next attempt.

        Raises:
            ConnectionLost: the request may or may not have arrived, or the policy's time is over.
        """
        why = f"{cause!r}" if cause else "the stream ended without its end mark"
        never_sent = isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout)
        if self._path is None and self.fold.reply_id is None and not never_sent:
            raise ConnectionLost(f"no answer to the request: {why}") from cause
        now = self.clock()
        if self._stuck_since is None:
            self._stuck_since = now
        delay_s = self._delay_s()
        if now + delay_s - self._stuck_since > self.policy.give_up_after_s:
            raise ConnectionLost(
                f"no progress for {now - self._stuck_since:.1f} s: {why}", self.fold.last_event_id or None
            ) from cause
        self._num_failures += 1
        if not never_sent:
            self.num_resumes += 1
        return delay_s

    def _delay_s(self) -> float:
        if self._num_failures == 0:
            return 0.0
        delay_s = self.policy.first_delay_s * 2.0 ** min(self._num_failures - 1, 30)
        return min(delay_s, self.policy.longest_delay_s) * (0.5 + self.jitter() / 2)


def _error_message(body: bytes) -> str:
    try:
        said = json.loads(body)
        return str(said["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:200]


def _seconds(value: str | None) -> float | None:
    return float(value) if value and value.isascii() and value.isdigit() else None
