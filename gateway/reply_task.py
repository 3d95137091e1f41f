"""The life of one reply after its admission: all choices, until they end, are stopped or run late.

Invariant: however the work ends, its calls are gone before the terminal event is written, and there
is exactly one unless another gateway took the reply over. Must not know: HTTP, routing.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from opentelemetry.trace import Span, Status, StatusCode

from gateway.admission import timed_out
from gateway.continuation import Choice
from gateway.errors import GatewayError, InternalError, ReplyExpired, Unavailable
from gateway.owned_reply import OwnedReply, ReplyClosed
from gateway.reply_writer import ReplyWriter
from observability import semconv
from observability.metrics import Metrics

_log = logging.getLogger(__name__)


class ReplyTask:
    """Runs one reply to its end and reports it."""

    def __init__(
        self,
        reply: OwnedReply,
        choices: Sequence[Choice],
        writer: ReplyWriter,
        *,
        span: Span,
        metrics: Metrics,
        deadline: float,
        clock: Callable[[], float],
        others_can_go_on: bool,
    ) -> None:
        self._others_can_go_on = others_can_go_on
        self._reply = reply
        self._choices = choices
        self._writer = writer
        self._span = span
        self._metrics = metrics
        self._deadline = deadline
        self._clock = clock

    async def run(self) -> None:
        """Never raises but when cancelled: then a reply that no other gateway can go on with is ended."""
        work = asyncio.create_task(self._generate())
        stop = asyncio.create_task(self._reply.stop.wait())
        try:
            try:
                timeout_s = max(0.0, self._deadline - self._clock())
                await asyncio.wait({work, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stop.cancel()
                work.cancel()
                try:
                    await asyncio.wait({work, stop})
                finally:  # whoever is cancelled twice waits no longer
                    for choice in self._choices:
                        choice.cancel()
            self._end(work)
        except asyncio.CancelledError:
            if not self._others_can_go_on:
                self._fail(Unavailable("this gateway is stopping", code="gateway_stopping"))
            raise
        finally:
            self._report()

    async def _generate(self) -> None:
        tasks = [asyncio.create_task(choice.run()) for choice in self._choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._writer.done()

    def _end(self, work: "asyncio.Task[None]") -> None:
        """Writes the terminal event, unless the work has done so."""
        error = None if work.cancelled() else work.exception()
        if self._reply.fenced or isinstance(error, ReplyClosed) or self._reply.ended:
            return
        if isinstance(error, GatewayError):
            self._fail(error)
        elif error is not None:
            _log.error("generating reply %s failed", self._reply.meta.reply_id, exc_info=error)
            self._fail(InternalError("generating this reply failed"))
        elif self._reply.stop_reason == "cancelled":
            self._writer.cancelled()
        elif self._reply.stop_reason == "abandoned":
            self._fail(ReplyExpired("nobody was attached to this reply for too long", code="abandoned"))
        elif self._reply.stop_reason == "overflow":
            self._fail(Unavailable("the event log was down for too long", code="log_unavailable"))
        else:
            self._fail(timed_out())

    def _fail(self, error: GatewayError) -> None:
        try:
            self._writer.error(error)
        except ReplyClosed:
            return
        self._span.set_attribute(semconv.ERROR_TYPE, error.code or error.shape.type)
        if error.shape.status >= 500:
            self._span.set_status(Status(StatusCode.ERROR, error.code or error.shape.type))

    def _report(self) -> None:
        reply, writer, span = self._reply, self._writer, self._span
        outcome = "fenced" if reply.fenced else reply.status.value
        span.set_attributes(
            {
                semconv.BATON_OUTCOME: outcome,
                semconv.BATON_REPLY_EPOCH: reply.epoch,
                semconv.GEN_AI_RESPONSE_FINISH_REASONS: writer.finish_reasons,
                semconv.GEN_AI_USAGE_INPUT_TOKENS: len(reply.meta.prompt_token_ids),
                semconv.GEN_AI_USAGE_OUTPUT_TOKENS: writer.num_generated_tokens,
                semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: writer.num_cached_tokens,
            }
        )
        ttft = writer.timings.ttft()
        if ttft is not None:
            for stage, stage_ms in ttft.as_dict().items():
                name = semconv.BATON_TTFT_MS if stage == "ttft" else semconv.ttft_stage_attribute(stage)
                span.set_attribute(name, stage_ms)
            self._metrics.observe_ttft(ttft, reply.meta.model)
        if reply.ended and not reply.fenced:  # else whoever goes on with it reports it
            self._metrics.observe_reply(
                outcome=outcome,
                finish_reason=writer.finish_reasons[-1] if writer.finish_reasons else "",
                duration_s=self._clock() - reply.arrived,
                prompt_tokens=len(reply.meta.prompt_token_ids),
                completion_tokens=writer.num_generated_tokens,
                model=reply.meta.model,
                ttft_s=ttft.total / 1000 if ttft is not None else None,
            )
        span.end()
