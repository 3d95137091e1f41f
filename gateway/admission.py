"""Gets a request admitted by some decode worker.

Invariant: either one call is admitted and returned, or none is left open. A worker that is full, gone,
silent or never admits costs an attempt, not the request; only when nobody is left, or no time, is the
client refused.
Must not know: replies, logs, what is generated.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

import grpc
from grpc import aio

from baton.v1 import decode_pb2
from gateway.decode_call import Call, CallFailed, DecodeCall
from gateway.errors import DeadlineExceeded, GatewayError, InvalidRequest, Overloaded, Unavailable
from gateway.router import Route, Router
from gateway.routing.outcome import Blame

_SILENCE_S = 1.5  # a worker that neither admits nor reports its load for this long is not there
_LEAST_PATIENCE_S = 0.3  # whatever the load stream said
_DEADLINE_SLACK_S = 1.0  # the gateway's own timer comes first; this one is for the worker's benefit

_log = logging.getLogger(__name__)


def timed_out() -> DeadlineExceeded:
    return DeadlineExceeded("the time for this request is over", code="timeout")


class Admission:
    """Opens calls to the workers that the router names, one after the other."""

    def __init__(self, router: Router, *, admit_timeout_s: float, clock: Callable[[], float]) -> None:
        self._router = router
        self._admit_timeout_s = admit_timeout_s
        self._clock = clock

    async def admit(
        self,
        request: decode_pb2.GenerateRequest,
        *,
        deadline: float,
        give_up_at: float | None = None,
        avoid: Collection[str] = (),
    ) -> DecodeCall:
        """The admitted call. Raises GatewayError: of what was refused, Overloaded is told first.

        Args:
            request: complete but for the prefill targets.
            deadline: when the whole reply must be over; the worker is told.
            give_up_at: when to stop looking, if before the admission timeout.
            avoid: addresses not to try.
        """
        patience_ends = min(self._clock() + self._admit_timeout_s, give_up_at or deadline, deadline)
        tried = set(avoid)
        refusal: GatewayError | None = None
        while True:
            try:
                route = self._router.route(
                    request.prompt_token_ids,
                    num_generated=len(request.generated_token_ids),
                    salt=request.cache_salt,
                    cause=request.reply_id,
                    exclude=tried,
                )
            except Unavailable as nobody:
                raise refusal or nobody from None
            tried.add(route.decode.address)
            attempt_ends = self._attempt_ends(route, patience_ends)
            del request.prefill_targets[:]
            request.prefill_targets.extend(route.prefill_targets)
            try:
                return await self._open(route, request, attempt_ends, deadline)
            except CallFailed as failure:
                route.outcome.failed(failure.blame)
                _log.info("decode worker %s did not admit: %s", route.decode.address, failure)
                if isinstance(failure.error, InvalidRequest):
                    raise failure.error from failure
                if self._clock() >= deadline:
                    raise timed_out() from failure
                if not isinstance(refusal, Overloaded):
                    refusal = failure.error
                if self._clock() >= patience_ends:
                    raise refusal from failure
            except BaseException:
                route.outcome.dropped()
                raise

    def _attempt_ends(self, route: Route, patience_ends: float) -> float:
        """One worker that lives and never admits must leave time for the others."""
        if not route.has_spare:
            return patience_ends
        now = self._clock()
        share_s = max((patience_ends - now) / 2, _LEAST_PATIENCE_S)
        if route.outcome.is_probe:
            share_s = min(share_s, _SILENCE_S)
        return min(now + share_s, patience_ends)

    async def _open(
        self, route: Route, request: decode_pb2.GenerateRequest, attempt_ends: float, deadline: float
    ) -> DecodeCall:
        sent_at = self._clock()
        timeout_s = max(deadline - sent_at, 0.0) + _DEADLINE_SLACK_S
        call = route.decode.stub.Generate(request, timeout=timeout_s)
        # In a task of its own: an intercepted call swallows a cancellation that arrives in here.
        answer = asyncio.ensure_future(call.initial_metadata())
        try:
            await self._answered(answer, route.decode.address, sent_at, attempt_ends)
            await _raise_if_refused(call)
        except BaseException:
            answer.cancel()
            call.cancel()
            raise
        route.outcome.admitted()
        return DecodeCall(route, call, sent_at=sent_at, clock=self._clock)

    async def _answered(
        self, answer: "asyncio.Future[Any]", address: str, sent_at: float, attempt_ends: float
    ) -> None:
        """Waits for initial metadata, as long as the worker gives signs of life. Raises CallFailed."""
        while not answer.done():
            heard_at = self._router.heard_at(address)
            now = self._clock()
            silent_at = max(
                heard_at + _SILENCE_S if heard_at is not None else 0.0, sent_at + _LEAST_PATIENCE_S
            )
            if now >= min(silent_at, attempt_ends):
                # What is left of the patience after others may be too short to blame anybody.
                blame = Blame(decode=now - sent_at >= min(_SILENCE_S, self._admit_timeout_s / 4))
                reason = "silent" if now >= silent_at else "admission_timeout"
                raise CallFailed.unavailable(reason, blame=blame)
            await asyncio.wait({answer}, timeout=min(silent_at, attempt_ends) - now)


async def _raise_if_refused(call: Call) -> None:
    """A refused call has no initial metadata but a status; asked for, it gives empty metadata."""
    if not call.done():
        return
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return
    error = aio.AioRpcError(
        code,
        aio.Metadata(),
        aio.Metadata(*(await call.trailing_metadata() or ())),
        await call.details(),
    )
    raise CallFailed.of_rpc(error)
