"""One submitted request: its tokens, its progress, its blocks and its events.

The public methods are `interface.Sequence` and run on the event loop; what the engine's thread calls
is named so. Both hold the host's lock while they touch anything but the events.
Knows nothing of how tokens are computed.
"""

import time
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence

from services.engine.completion import Completion
from services.engine.detokenizer import TextStream
from services.engine.errors import EngineError, InvalidKvPage, SequenceReleased
from services.engine.prefix_digests import PrefixDigests, SequencePrefix
from services.engine.request import (
    EngineRequest,
    FirstTokenSampled,
    KvComputed,
    SampledToken,
    SequenceEvent,
    SequenceFinished,
    SequenceTimings,
    SubmitMode,
)
from services.engine.sequence_events import SequenceEvents
from services.engine.sequence_host import SequenceHost
from services.engine.sequence_kv import EngineSequenceKv
from services.engine.sequence_state import SequenceState


class EngineSequence:
    """See `interface.Sequence`.

    Args:
        arrival: place in the order of arrival.
        natural_length: generated tokens after which a simulated model ends by itself.
    """

    def __init__(
        self,
        request: EngineRequest,
        mode: SubmitMode,
        host: SequenceHost,
        text: TextStream,
        *,
        arrival: int,
        natural_length: int | None = None,
    ) -> None:
        self.request = request
        self.mode = mode
        self.timings = SequenceTimings()
        self.arrival = arrival
        self.state = SequenceState.WAITING
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.prefix = SequencePrefix(PrefixDigests(request.cache_salt, host.cache.block_size))
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache
        self.num_held_tokens = 0  # found there by a sequence that imports the rest
        self.num_once_computed_tokens = 0  # before a preemption; computed again if not found in the cache
        self.was_preempted = False
        self.failure: EngineError | None = None  # what took its blocks away
        self.computes_locally = mode is not SubmitMode.HANDOFF
        self.submitted_at = time.monotonic()
        self.first_chunk_at: float | None = None
        self.joined_at: float | None = None
        self._host = host
        self._completion = Completion(
            request,
            text,
            eos_token_ids=host.eos_token_ids,
            max_model_len=host.max_model_len,
            natural_length=natural_length,
        )
        self.kv = EngineSequenceKv(self, host)
        self._events = SequenceEvents()

    # Derived

    @property
    def token_ids(self) -> "array[int]":
        return self._completion.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._completion.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return self._completion.num_generated_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def detokenize_s(self) -> float:
        return self._completion.detokenize_s

    @property
    def most_tokens(self) -> int:
        """Positions the sequence can ever fill: the last token generated is never computed."""
        if self.mode is SubmitMode.PREFILL_ONLY:
            return self.request.num_context_tokens
        return self.request.most_positions(self._host.max_model_len)

    @property
    def is_preemptible(self) -> bool:
        """A prefill worker's pages may be on their way out, and reserved blocks on their way in."""
        return self.state is SequenceState.RUNNING and self.mode is not SubmitMode.PREFILL_ONLY

    @property
    def awaits_kv(self) -> bool:
        return self.state is SequenceState.RESERVED

    # On the event loop

    def events(self) -> AsyncIterator[SequenceEvent]:
        return self._events.iterate()

    async def reserved(self) -> None:
        await self._events.reserved()

    def accept_first_token(self, token: SampledToken) -> None:
        with self._host.lock():
            if self.state is SequenceState.RELEASED:
                raise SequenceReleased(self.request.request_id)
            if self.computes_locally:  # a step in progress would mistake it for its own
                raise ValueError("the sequence is computed here and takes no first token")
            if self.num_tokens != self.request.num_context_tokens:
                raise ValueError("the first token has been accepted already")
            if token.token_id >= self._host.vocab_size:
                raise InvalidKvPage(f"first token {token.token_id} is none of the model's")
            events = self.take_tokens([token])
        self.post(events)
        if self.state is SequenceState.ENDED:  # in the queue, perhaps: it will never be let in
            self.announce_reserved()

    def join(self) -> None:
        with self._host.lock():
            if self.state is SequenceState.ENDED:
                return
            if self.state is not SequenceState.RESERVED:
                raise SequenceReleased(self.request.request_id)
            if not self.kv.is_complete:
                raise InvalidKvPage("the sequence cannot join: parts of its KV cache are missing")
            if self.num_tokens == self.request.num_context_tokens:
                raise InvalidKvPage("the sequence cannot join: it has no first token")
            self._host.check_imported(self)
            self.num_computed_tokens = self.request.num_context_tokens
            self._host.on_computed(self)
            self.joined_at = time.monotonic()
            self._run()

    def compute_locally(self) -> None:
        with self._host.lock():
            if self.state is SequenceState.ENDED:
                return
            if self.state is not SequenceState.RESERVED:
                raise SequenceReleased(self.request.request_id)
            self._host.adopt_prefix(self)
            self._run()

    def release(self) -> None:
        with self._host.lock():
            if self.state is SequenceState.RELEASED:
                return
            self.state = SequenceState.RELEASED
            self._host.on_released(self)
        self.fail(SequenceReleased(self.request.request_id))

    def post(self, events: Iterable[SequenceEvent]) -> None:
        """Delivers events to whoever iterates."""
        self._events.post(events)

    def fail(self, error: EngineError) -> None:
        """Ends the iteration with an error, after what was posted before."""
        self._events.fail(error)

    def announce_reserved(self) -> None:
        """Blocks are held (or none are needed): wakes `reserved`."""
        if self.mode is SubmitMode.HANDOFF and self.timings.queue_s is None:
            self.timings.queue_s = time.monotonic() - self.submitted_at
        if self.mode is SubmitMode.PREFILL_ONLY and self.num_cached_tokens:
            self.post([KvComputed(0, self._host.cache.layout.num_layers, 0, self.num_cached_tokens)])
        self._events.announce_reserved()

    # With the lock held, in the engine's thread too

    def take_chunk(
        self, start: int, end: int, token: SampledToken | None, layers_reported: int = 0
    ) -> list[SequenceEvent]:
        """Positions [start, end) have been computed, and `token` sampled if they end with the last one.

        Args:
            layers_reported: whose keys and values of these positions have been reported during the step.
        """
        self.num_computed_tokens = end
        self._host.on_computed(self)
        if self.mode is not SubmitMode.PREFILL_ONLY:
            return [] if token is None else self.take_tokens([token])
        events: list[SequenceEvent] = []
        if layers_reported < (num_layers := self._host.cache.layout.num_layers):
            events.append(KvComputed(layers_reported, num_layers, start, end))
        if token is not None:
            self.state = SequenceState.ENDED  # the blocks stay until the pages have been taken
            events.append(FirstTokenSampled(token, self.num_cached_tokens))
        return events

    def take_tokens(self, tokens: Sequence[SampledToken]) -> list[SequenceEvent]:
        """Appends a step's tokens; returns what they lead to. Ends the sequence where it should end."""
        events: list[SequenceEvent] = [*self._completion.take(tokens)]
        self.timings.text_hold_s = self._completion.text_hold_s
        return [*events, *self._finish_if_ended()]

    def end_if_complete(self) -> list[SequenceEvent]:
        """Ends a continuation whose tokens already meet an end condition; nothing otherwise."""
        self._completion.end_if_complete()
        return self._finish_if_ended()

    def preempt(self) -> None:
        """The blocks are gone: what the prefix cache cannot give back is computed again."""
        self.state = SequenceState.WAITING
        self.num_once_computed_tokens = max(self.num_once_computed_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.computes_locally = True
        self.was_preempted = True

    def hold_prefix(self, num_tokens: int) -> None:
        """The first `num_tokens` positions are in the block table already and need no import."""
        self.num_held_tokens = num_tokens
        self.kv.hold(num_tokens)

    def start_after_prefix(self, num_tokens: int) -> None:
        """The first `num_tokens` positions are in the block table already."""
        self.num_computed_tokens = num_tokens
        if not self.was_preempted:
            self.num_cached_tokens = num_tokens

    def _run(self) -> None:
        self.computes_locally = True
        self.state = SequenceState.RUNNING
        self._host.on_runnable(self)

    def _finish_if_ended(self) -> list[SequenceEvent]:
        reason = self._completion.end
        if reason is None:
            return []
        self.state = SequenceState.ENDED
        self._host.on_ended(self)
        num_prompt_tokens = len(self.request.prompt_token_ids)
        finished = SequenceFinished(
            reason,
            self._completion.take_textless(),
            num_prompt_tokens=num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=min(self.num_cached_tokens, num_prompt_tokens),
        )
        return [finished]
