"""Writes one reply's events: from decode's messages to the log, in the order that `EventKind` gives.

Invariant: exactly one terminal event; each choice's events are complete and in order whether it
ended by itself or was ended. Must not know: workers, calls' failures, why a reply ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.v1 import common_pb2, decode_pb2
from gateway.decode_call import DecodeCall
from gateway.errors import GatewayError
from gateway.events import Event, EventKind
from gateway.owned_reply import OwnedReply
from gateway.reply_timings import ReplyTimings
from gateway.sampling import ReplySpec
from gateway.tokenizer import ChatTokenizer
from observability.metrics import Metrics

_FINISH_REASONS = {decode_pb2.FINISH_REASON_STOP: "stop", decode_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class _ChoiceProgress:
    num_tokens: int = 0
    last_delta_at: float | None = None
    finish_reason: str = ""


class ReplyWriter:
    """The one place that emits into a reply's log. Every method may raise ReplyClosed.

    On a reply that was taken over it goes on from the events there are, and writes none of them twice.
    """

    def __init__(
        self,
        reply: OwnedReply,
        spec: ReplySpec,
        tokenizer: ChatTokenizer,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.timings = ReplyTimings(reply)
        self._reply = reply
        self._spec = spec
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._choices = [_ChoiceProgress() for _ in range(spec.num_choices)]
        self.num_cached_tokens = 0
        self._written: set[tuple[EventKind, int | None]] = set()  # of the kinds that come once
        for event in reply.events:
            self._note(event)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.finish_reason for choice in self._choices if choice.finish_reason]

    @property
    def token_ids(self) -> list[list[int]]:
        """By choice: what earlier owners of the reply have emitted."""
        token_ids: list[list[int]] = [[] for _ in self._choices]
        for event in self._reply.events:
            if event.kind is EventKind.DELTA:
                token_ids[event.payload["choice"]] += event.payload["token_ids"]
        return token_ids

    def has_finished(self, choice: int) -> bool:
        return (EventKind.FINISH, choice) in self._written

    def open(self) -> None:
        """What every reply begins with."""
        created = {
            "created": self._reply.meta.created,
            "model": self._spec.model,
            "num_prompt_tokens": len(self._spec.prompt_token_ids),
            "num_choices": self._spec.num_choices,
        }
        self._once(EventKind.CREATED, created)
        self._once(EventKind.IN_PROGRESS, {})
        for choice in range(self._spec.num_choices):
            self._once(EventKind.ITEM_START, {"choice": choice})
            self._once(EventKind.PART_START, {"choice": choice})

    def delta(self, choice: int, delta: decode_pb2.Delta, call: DecodeCall) -> None:
        now = self._clock()
        self.timings.note_delta(call, delta, now)
        payload: dict[str, Any] = {
            "choice": choice,
            "text": delta.text,
            "token_ids": [token.token_id for token in delta.tokens],
        }
        if self._spec.sampling.logprobs is not None:
            payload["logprobs"] = [self._logprob(token) for token in delta.tokens]
        payload["at_ms"] = self._at_ms()
        self._note(self._reply.emit(EventKind.DELTA, payload))
        progress = self._choices[choice]
        if progress.last_delta_at is not None:
            self._metrics.observe_itl(now - progress.last_delta_at, self._spec.model)
        progress.last_delta_at = now

    def finish(self, choice: int, finished: decode_pb2.Finished, num_calls: int) -> None:
        """A choice has ended by itself. `num_calls`: how many workers' calls it took."""
        self.timings.note_finished(finished, num_calls)
        self.num_cached_tokens = max(self.num_cached_tokens, finished.num_cached_tokens)
        self._choices[choice].num_tokens = finished.num_generated_tokens
        token_ids = [token.token_id for token in finished.tokens]
        self._close_choice(choice, _FINISH_REASONS[finished.reason], token_ids)

    async def done(self) -> None:
        """All choices have ended: usage and the terminal event."""
        self._usage()
        if self.timings.has_text and self._reply.first_delta_committed_at is None:
            await self._reply.flushed()  # a reply this short has its first text still on the way
        self._done()

    def cancelled(self) -> None:
        """Closes what is open and ends the reply, on somebody's wish."""
        for choice, progress in enumerate(self._choices):
            if not progress.finish_reason:
                self._close_choice(choice, "cancelled", [])
        self._usage()
        self._done()

    def error(self, error: GatewayError) -> None:
        """Ends the reply with an error; what was emitted stands."""
        at_ms = self._at_ms()
        payload = error.payload(at_ms) | {"timings": self.timings.as_dict(at_ms)}
        self._reply.emit(EventKind.ERROR, payload)

    def _close_choice(self, choice: int, reason: str, token_ids: list[int]) -> None:
        progress = self._choices[choice]
        for kind in (EventKind.TEXT_DONE, EventKind.PART_DONE, EventKind.ITEM_DONE):
            self._once(kind, {"choice": choice})
        finish = {
            "choice": choice,
            "reason": reason,
            "token_ids": token_ids,
            "num_generated_tokens": progress.num_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "at_ms": self._at_ms(),
        }
        self._once(EventKind.FINISH, finish)
        progress.finish_reason = reason

    def _usage(self) -> None:
        num_prompt = len(self._spec.prompt_token_ids)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": num_prompt + self.num_generated_tokens,
            "cached_tokens": min(self.num_cached_tokens, num_prompt),
        }
        self._once(EventKind.USAGE, usage)

    def _once(self, kind: EventKind, payload: dict[str, Any]) -> None:
        """Emits an event of a kind that comes once for a reply or a choice, unless it is there."""
        if (kind, payload.get("choice")) not in self._written:
            self._note(self._reply.emit(kind, payload))

    def _note(self, event: Event) -> None:
        choice = event.payload.get("choice")
        if event.kind is EventKind.DELTA:
            self._choices[event.payload["choice"]].num_tokens += len(event.payload["token_ids"])
            return
        self._written.add((event.kind, choice))
        if event.kind is EventKind.FINISH:
            self._choices[event.payload["choice"]].finish_reason = event.payload["reason"]
            self._choices[event.payload["choice"]].num_tokens = event.payload["num_generated_tokens"]
            self.num_cached_tokens = max(self.num_cached_tokens, event.payload["num_cached_tokens"])

    def _done(self) -> None:
        at_ms = self._at_ms()
        self._reply.emit(EventKind.DONE, {"timings": self.timings.as_dict(at_ms), "at_ms": at_ms})

    def _logprob(self, token: common_pb2.SampledToken) -> dict[str, Any]:
        text = self._tokenizer.token_text
        return {
            "token_id": token.token_id,
            "token": text(token.token_id),
            "logprob": token.logprob,
            "top": [[top.token_id, text(top.token_id), top.logprob] for top in token.top_logprobs],
        }

    def _at_ms(self) -> float:
        return round((self._clock() - self._reply.arrived) * 1000, 3)
