"""Starts replies: from a ready request to an admitted, logged reply that goes on by itself.

Invariant: a reply is in the log only if a worker admitted it, and every admitted call belongs to a
reply or is cancelled; whoever is cancelled in `start` leaves nothing running.
Must not know: HTTP, SSE, formats.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from random import Random

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.v1 import decode_pb2
from gateway.admission import Admission
from gateway.continuation import Choice
from gateway.decode_call import DecodeCall
from gateway.endings import cancelled_ending
from gateway.errors import ContextTooLong, GatewayError, Overloaded
from gateway.event_log import ReplyMeta
from gateway.owned_reply import OwnedReply
from gateway.replies import ReplyHub
from gateway.reply_task import ReplyTask
from gateway.reply_writer import ReplyWriter
from gateway.router import Router
from gateway.sampling import ReplySpec
from gateway.tokenizer import ChatTokenizer
from observability import semconv
from observability.telemetry import Telemetry

_ID_BITS = 160
_FIRST_EPOCH = 1

_W3C = TraceContextTextMapPropagator()


class Generations:
    """All replies that are being generated here.

    Args:
        retry_s: how long a reply looks for another decode worker.
        max_replies: at once; above it, Overloaded.
        random: draws reply IDs and seeds.
    """

    def __init__(
        self,
        hub: ReplyHub,
        router: Router,
        tokenizer: ChatTokenizer,
        telemetry: Telemetry,
        *,
        admit_timeout_s: float,
        retry_s: float,
        max_replies: int,
        random: Random = random.SystemRandom(),  # noqa: B008  # stateless
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._router = router
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        self._admission = Admission(router, admit_timeout_s=admit_timeout_s, clock=clock)
        self._retry_s = retry_s
        self._max_replies = max_replies
        self._random = random
        self._clock = clock
        self._num_starting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        hub.orphans.go_on = self.go_on

    @property
    def num_active(self) -> int:
        """Replies that are being started or generated."""
        return self._num_starting + len(self._tasks)

    async def start(self, spec: ReplySpec, *, arrived: float) -> OwnedReply:
        """Returns once a worker has admitted the request and the reply is open; it then goes on.

        Raises GatewayError if it is refused. `arrived`: the request's monotonic stamp.
        """
        if self.num_active >= self._max_replies:
            raise Overloaded("this gateway serves as many replies as it may; try again soon")
        model = self._router.model
        if model is not None and len(spec.prompt_token_ids) >= model.max_model_len:
            raise ContextTooLong(
                f"The prompt has {len(spec.prompt_token_ids)} tokens; this model takes "
                f"{model.max_model_len}, prompt and reply together.",
                param="messages",
            )
        self._num_starting += 1
        span = self._telemetry.tracer.start_span(f"chat {spec.model}", kind=SpanKind.CLIENT)
        try:
            # Current from here on: the calls' own spans become its children, in continuations too.
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                return await self._start(spec, span, arrived)
        except BaseException as error:
            _end_refused(span, error)
            raise
        finally:
            self._num_starting -= 1

    async def idle(self, *, timeout_s: float) -> None:
        """Waits until nothing is generated any more, or the time is over."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Stops what is still being generated: for another gateway to go on with, or with an error event."""
        await asyncio.sleep(0)  # a task that has not begun would be cancelled without its clean-up
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, spec: ReplySpec, span: Span, arrived: float) -> OwnedReply:
        meta = self._new_meta(spec, span)
        span.set_attributes(_attributes(spec, meta))
        deadline = arrived + spec.timeout_s
        requests = [_request(spec, meta, choice, _FIRST_EPOCH) for choice in range(spec.num_choices)]
        calls = await self._admit_all(requests, deadline)
        try:
            reply = await self._open(meta, arrived)
            self._run(reply, spec, span, list(zip(requests, calls, strict=True)), deadline)
        except BaseException:
            for call in calls:
                call.cancel()
            raise
        return reply

    def go_on(self, reply: OwnedReply) -> None:
        """Continues a reply that was taken over from a gateway that is gone, from its events."""
        spec = ReplySpec.from_meta(reply.meta)
        span = self._telemetry.tracer.start_span(
            f"chat {spec.model}",
            kind=SpanKind.CLIENT,
            links=_links(reply.meta.traceparent),
            attributes=_attributes(spec, reply.meta),
        )
        requests = [_request(spec, reply.meta, choice, reply.epoch) for choice in range(spec.num_choices)]
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            self._run(
                reply, spec, span, [(request, None) for request in requests], reply.arrived + spec.timeout_s
            )
        self._telemetry.metrics.retry("takeover")

    def _run(
        self,
        reply: OwnedReply,
        spec: ReplySpec,
        span: Span,
        calls: Sequence[tuple[decode_pb2.GenerateRequest, DecodeCall | None]],
        deadline: float,
    ) -> None:
        """Starts the task that writes the reply: what its log lacks, choice by choice."""
        metrics = self._telemetry.metrics
        writer = ReplyWriter(reply, spec, self._tokenizer, metrics, self._clock)
        for (request, _), token_ids in zip(calls, writer.token_ids, strict=True):
            request.generated_token_ids.extend(token_ids)
        choices = [
            Choice(
                request,
                call,
                writer,
                router=self._router,
                admission=self._admission,
                metrics=metrics,
                retry_s=self._retry_s,
                deadline=deadline,
                clock=self._clock,
            )
            for request, call in calls
            if not writer.has_finished(request.choice_index)
        ]
        writer.open()
        task = ReplyTask(
            reply,
            choices,
            writer,
            span=span,
            metrics=metrics,
            deadline=deadline,
            clock=self._clock,
            others_can_go_on=reply.resumable and self._hub.log.is_durable,
        )
        self._track(asyncio.create_task(task.run()))

    async def _admit_all(
        self, requests: Sequence[decode_pb2.GenerateRequest], deadline: float
    ) -> list[DecodeCall]:
        """One call for each choice, or none."""
        tasks = [
            asyncio.create_task(self._admission.admit(request, deadline=deadline)) for request in requests
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_cancel_admitted)  # also if the wait below is cancelled
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _open(self, meta: ReplyMeta, arrived: float) -> OwnedReply:
        """Opens the log. A cancelled caller cannot know whether it exists by then: it is ended."""
        opening = asyncio.create_task(self._hub.open(meta, arrived=arrived))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._track(asyncio.create_task(_discard(opening)))
            raise

    def _new_meta(self, spec: ReplySpec, span: Span) -> ReplyMeta:
        headers: dict[str, str] = {}
        _W3C.inject(headers, trace.set_span_in_context(span))
        seed = spec.seed if spec.seed is not None else self._random.getrandbits(63)
        return ReplyMeta(
            reply_id=f"{self._random.getrandbits(_ID_BITS):0{_ID_BITS // 4}x}",
            owner_hash=spec.owner_hash,
            model=spec.model,
            fingerprint=spec.fingerprint,
            format=spec.format,
            format_options=spec.format_options,
            request=spec.as_dict(),
            prompt_token_ids=spec.prompt_token_ids,
            seed=seed,
            traceparent=headers.get("traceparent", ""),
            on_disconnect=spec.on_disconnect,
            created=int(time.time()),
        )

    def _track(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _links(traceparent: str) -> list[trace.Link]:
    context = _W3C.extract({"traceparent": traceparent}, Context())
    generation = trace.get_current_span(context).get_span_context()
    return [trace.Link(generation, {semconv.BATON_LINK_REASON: "takeover"})] if generation.is_valid else []


def _request(spec: ReplySpec, meta: ReplyMeta, choice: int, epoch: int) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        reply_id=meta.reply_id,
        epoch=epoch,
        choice_index=choice,
        prompt_token_ids=spec.prompt_token_ids,
        sampling=spec.sampling.to_proto(meta.seed),
        priority=spec.priority,
        fingerprint=spec.fingerprint,
        cache_salt=meta.owner_hash,
    )


def _attributes(spec: ReplySpec, meta: ReplyMeta) -> dict[str, str | int | float]:
    return {
        semconv.GEN_AI_OPERATION_NAME: semconv.OPERATION_CHAT,
        semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER_BATON,
        semconv.GEN_AI_REQUEST_MODEL: spec.model,
        semconv.GEN_AI_REQUEST_MAX_TOKENS: spec.sampling.max_tokens,
        semconv.GEN_AI_REQUEST_TEMPERATURE: spec.sampling.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: spec.sampling.top_p,
        semconv.GEN_AI_REQUEST_TOP_K: spec.sampling.top_k,
        semconv.GEN_AI_REQUEST_CHOICE_COUNT: spec.num_choices,
        semconv.GEN_AI_RESPONSE_ID: meta.reply_id,
        semconv.GEN_AI_RESPONSE_MODEL: spec.model,
        semconv.BATON_REPLY_ID: meta.reply_id,
    }


def _cancel_admitted(task: "asyncio.Task[DecodeCall]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()


async def _discard(opening: "asyncio.Task[OwnedReply]") -> None:
    """Ends a reply that nobody asks for any more."""
    reply = await opening
    for kind, payload in cancelled_ending(reply.meta, reply.events):
        reply.emit(kind, payload)


def _end_refused(span: Span, error: BaseException) -> None:
    if isinstance(error, GatewayError):
        span.set_attribute(semconv.ERROR_TYPE, error.code or error.shape.type)
        if error.shape.status >= 500:
            span.set_status(Status(StatusCode.ERROR, error.code or error.shape.type))
    elif not isinstance(error, asyncio.CancelledError):
        span.set_attribute(semconv.ERROR_TYPE, type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
    span.end()
