"""The real engine: one thread of its own that schedules, runs the model, samples and reports.

The lock is held while a step is planned and while its results are taken in, never during the forward
pass, so the event loop is never held up by it. Blocks of a sequence that is released in mid-step are
freed after the step: the forward pass may still write to them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import structlog
import torch

from services.engine.config import EngineConfig
from services.engine.errors import EngineError, EngineStopped, InvalidRequest, NoTokenToChoose
from services.engine.layer_report import LayerReport
from services.engine.model_runner import ModelRunner
from services.engine.paged_engine import PagedEngine
from services.engine.request import NoToken, SequenceEvent
from services.engine.sampler import Sampler, SampleRow
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.sequence import EngineSequence
from services.engine.sequence_state import SequenceState
from services.engine.step_outcome import Outcome, count_failed
from services.engine.step_times import StepClock, StepTimes

log = structlog.get_logger()

_MAX_FAILED_STEPS = 3  # in a row; one bad batch is that batch's fault, three are the engine's


class Delivery(NamedTuple):
    """What a step led to, for one sequence; after a failure there is nothing more."""

    sequence: EngineSequence
    events: Sequence[SequenceEvent]
    failure: EngineError | None = None


class HfEngine(PagedEngine):
    """A transformers model behind `interface.Engine`.

    Args:
        on_step: told in the engine's thread what each step took.
        runner_type: loads and runs the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepTimes], None] | None = None,
        runner_type: type[ModelRunner] = ModelRunner,
    ) -> None:
        self._on_step = on_step
        torch.set_num_threads(config.threads)
        self._runner = runner_type(config.model, config.precision, config.device)
        super().__init__(
            config,
            self._runner.layout,
            vocab_size=self._runner.vocab_size,
            model_max_len=self._runner.max_model_len,
            eos_token_ids=self._runner.eos_token_ids,
            device=self._runner.device,
        )
        self._sampler = Sampler(self._runner.vocab_size)
        self._runner.bind(self.cache)
        self._runner.prepare_decode(config.max_num_seqs, self.max_model_len)
        self._work = threading.Condition(self._lock)
        self._stopping = False
        self._in_flight: set[EngineSequence] = set()
        self._thread = threading.Thread(target=self._run_or_fail, name="baton-engine", daemon=True)

    async def start(self) -> None:
        """See `interface.Engine.start`."""
        self._open()
        self._thread.start()

    async def close(self) -> None:
        """See `interface.Engine.close`. Waits for the step in progress."""
        with self._work:
            self._stopping = True
            self._work.notify()
        self._stop("the engine has been closed")
        if self._loop is not None and self._thread.is_alive():
            await self._loop.run_in_executor(None, self._thread.join)

    def on_runnable(self, sequence: EngineSequence) -> None:
        self._work.notify()

    def check_imported(self, sequence: EngineSequence) -> None:
        """Nothing to see: what keys and values should be, only the model itself could tell."""

    def _remove(self, sequence: EngineSequence) -> None:
        if sequence not in self._in_flight:
            super()._remove(sequence)

    def _run_or_fail(self) -> None:
        """The thread. Whatever ends it but `close`, nobody is left waiting."""
        try:
            self._run()
        except Exception:
            log.exception("the engine's thread failed")
        finally:
            if not self._stopping:
                self._on_loop(self._fail)

    def _run(self) -> None:
        """Steps, until the engine closes or cannot compute any more."""
        num_failed = 0
        while num_failed < _MAX_FAILED_STEPS:
            clock = StepClock()
            chunks = self._next_chunks(clock)
            if self._stopping:
                return
            started = time.monotonic()
            report = LayerReport(chunks, self.cache.layout, self._report)
            try:
                outcomes = self._compute(chunks, clock, report)
            except Exception as error:
                log.exception("step failed", sequences=len(chunks))
                num_failed += 1
                self._hand_over(self._abandon(chunks, EngineStopped(f"a step failed: {error}")))
                continue
            num_failed = count_failed(num_failed, outcomes)
            detokenized_s = _detokenized_s(chunks)
            with self._work:
                self._in_flight = set()
                deliveries = self._take_in(outcomes, started, time.monotonic(), report.num_layers)
            self._hand_over(deliveries)
            if self._on_step is not None and chunks:
                self._on_step(clock.times(chunks, _detokenized_s(chunks) - detokenized_s))

    def _next_chunks(self, clock: StepClock) -> list[ScheduledChunk]:
        """What the next step runs; waits until there is something, or the engine is to stop."""
        with self._work:
            self.scheduler.make_way()
            if admitted := self.scheduler.admit():
                self._on_loop(partial(self._announce, admitted))
            while not self._stopping and not self.scheduler.has_runnable:
                self._work.wait()
                clock.began = time.perf_counter()
            chunks = [] if self._stopping else self.scheduler.schedule()
            self._in_flight = {chunk.sequence for chunk in chunks}
        clock.scheduled = time.perf_counter()
        return chunks

    def _compute(
        self, chunks: Sequence[ScheduledChunk], clock: StepClock, report: LayerReport
    ) -> list[Outcome]:
        if not chunks:
            return []
        logits = self._runner.forward(chunks, report if report.is_wanted else None)
        clock.forwarded = time.perf_counter()
        rows = [self._sample_row(chunk.sequence) for chunk in chunks if chunk.samples]
        tokens = iter(self._sampler.sample(logits, rows))
        outcomes = [Outcome(chunk, next(tokens) if chunk.samples else None) for chunk in chunks]
        clock.sampled = time.perf_counter()
        return outcomes

    def _sample_row(self, sequence: EngineSequence) -> SampleRow:
        request = sequence.request
        stops = request.sampling.stop_token_ids
        ends = stops if request.sampling.ignore_eos else (*self.info.eos_token_ids, *stops)
        return SampleRow(
            sampling=request.sampling,
            choice_index=request.choice_index,
            token_ids=sequence.token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            end_token_ids=ends,
        )

    def _take_in(
        self, outcomes: Sequence[Outcome], started: float, ended: float, layers_reported: int
    ) -> list[Delivery]:
        """Moves every sequence of the step on; the lock is held."""
        bad = [chunk.sequence for chunk, token in outcomes if token is NoToken.LOGITS]
        failing = self._with_equals(bad)
        for sequence in bad:
            self.scheduler.distrust(sequence)
        deliveries = [self._drop(sequence, NoTokenToChoose(NoToken.LOGITS.value)) for sequence in failing]
        for chunk, token in outcomes:
            sequence = chunk.sequence
            if token is NoToken.LOGITS:
                log.error("no token to choose", request=sequence.request.request_id, reason=token.value)
            elif token is NoToken.REQUEST:
                deliveries.append(self._drop(sequence, InvalidRequest("sampling", token.value)))
            elif sequence.state is SequenceState.RELEASED:
                self._remove(sequence)
            else:
                self._count_computed(sequence, chunk.start, chunk.end)
                _note_times(sequence, started, ended, sampled=token is not None)
                events = sequence.take_chunk(chunk.start, chunk.end, token, layers_reported)
                deliveries.append(Delivery(sequence, events))
        return deliveries

    def _abandon(self, chunks: Sequence[ScheduledChunk], failure: EngineError) -> list[Delivery]:
        """Drops the sequences of a step that gave nothing."""
        with self._work:
            self._in_flight = set()
            failing = self._with_equals([chunk.sequence for chunk in chunks])
            return [self._drop(sequence, failure) for sequence in failing]

    def _with_equals(self, sequences: list[EngineSequence]) -> list[EngineSequence]:
        """Sequences that fail, and those that wait to share all of their context.

        These would fail next, one a step: the choices of one bad request would look like a bad engine. To
        be asked before anything is distrusted or dropped, which leaves nobody to wait for.
        """
        return [*sequences, *self.scheduler.equals_of(sequences)] if sequences else []

    def _drop(self, sequence: EngineSequence, failure: EngineError) -> Delivery:
        """Ends a sequence with an error; the lock is held."""
        if sequence.state is not SequenceState.RELEASED:
            sequence.state = SequenceState.ENDED
            sequence.failure = failure
        self._remove(sequence)
        return Delivery(sequence, [], failure)

    def _hand_over(self, deliveries: Sequence[Delivery]) -> None:
        """One wake-up of the event loop for everything that a step led to."""

        def deliver() -> None:
            for delivery in deliveries:
                delivery.sequence.post(delivery.events)
                if delivery.failure is not None:
                    delivery.sequence.fail(delivery.failure)

        self._on_loop(deliver)

    def _report(self, sequence: EngineSequence, event: SequenceEvent) -> None:
        self._on_loop(partial(sequence.post, [event]))

    def _on_loop(self, action: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _fail(self) -> None:
        self._stop("the engine has failed: see the worker's log")
        self._has_failed.set()


def _detokenized_s(chunks: Sequence[ScheduledChunk]) -> float:
    return sum(chunk.sequence.detokenize_s for chunk in chunks)


def _note_times(sequence: EngineSequence, started: float, ended: float, *, sampled: bool) -> None:
    timings = sequence.timings
    if sequence.joined_at is not None:
        if timings.join_s is None:
            timings.join_s = started - sequence.joined_at
            timings.first_step_s = ended - started
        return
    if sequence.first_chunk_at is None:
        sequence.first_chunk_at = started
        if timings.queue_s is None:
            timings.queue_s = started - sequence.submitted_at
    if sampled and timings.prefill_s is None:
        timings.prefill_s = ended - sequence.first_chunk_at
