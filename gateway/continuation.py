"""One choice of a reply, carried through by as many decode workers as it takes.

Invariant: what was emitted stands. A call that breaks off is followed by one that carries every token
emitted so far, so the text goes on exactly where it stopped; tokens whose text was still held are
generated again. Must not know: logs, HTTP, the other choices.
"""

import logging
from collections.abc import Callable, Collection
from contextlib import aclosing

from baton.v1 import decode_pb2
from gateway.admission import Admission, timed_out
from gateway.decode_call import CallFailed, DecodeCall, decode_unavailable
from gateway.errors import GatewayError, InvalidRequest, Unavailable
from gateway.reply_writer import ReplyWriter
from gateway.router import Router
from observability.metrics import Metrics

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 0.5

_log = logging.getLogger(__name__)


class Choice:
    """Reads one choice into the writer.

    Args:
        request: of this choice; grows by the tokens that are emitted.
        call: admitted for it; None for a choice that was taken over from another gateway.
        retry_s: how long the choice may go without a new token while workers fail.
        deadline: when the whole reply must be over.
    """

    def __init__(
        self,
        request: decode_pb2.GenerateRequest,
        call: DecodeCall | None,
        writer: ReplyWriter,
        *,
        router: Router,
        admission: Admission,
        metrics: Metrics,
        retry_s: float,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self._request = request
        self._call = call
        self._num_calls = 1 if call is not None else 2  # another gateway's came first
        self._writer = writer
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._retry_s = retry_s
        self._deadline = deadline
        self._clock = clock
        self._stuck_since: float | None = None  # the first failure since the last token
        self._pause_s = 0.0

    async def run(self) -> None:
        """Returns when the choice has finished.

        Raises GatewayError when no worker can go on, ReplyClosed when the log takes no more.
        """
        call = self._call
        try:
            while call is None or not await self._forward(call):
                call = self._call = await self._continued()
                self._num_calls += 1
            await call.close()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the present call, also of a choice that never began to run. Idempotent."""
        if self._call is not None:
            self._call.cancel()

    async def _forward(self, call: DecodeCall) -> bool:
        """Emits what the present call brings; True if it brought the end, False if it failed."""
        try:
            async with aclosing(call.messages()) as messages:
                async for message in messages:
                    if isinstance(message, decode_pb2.Delta):
                        self._take(message, call)
                    else:
                        self._writer.finish(self._request.choice_index, message, self._num_calls)
        except CallFailed as failure:
            call.cancel()
            _log.warning(
                "reply %s: decode worker %s failed after %d tokens: %s",
                self._request.reply_id,
                call.address,
                len(self._request.generated_token_ids),
                failure,
            )
            if isinstance(failure.error, InvalidRequest):
                raise failure.error from failure
            self._metrics.retry(failure.reason)
            return False
        return True

    def _take(self, delta: decode_pb2.Delta, call: DecodeCall) -> None:
        self._writer.delta(self._request.choice_index, delta, call)
        self._request.generated_token_ids.extend(token.token_id for token in delta.tokens)
        self._stuck_since = None
        self._pause_s = 0.0

    async def _continued(self) -> DecodeCall:
        """A call that goes on from what was emitted: at another worker, then at any."""
        if self._stuck_since is None:
            self._stuck_since = self._clock()
        give_up_at = min(self._stuck_since + self._retry_s, self._deadline)
        avoid: Collection[str] = (self._call.address,) if self._call is not None else ()
        while (remaining_s := give_up_at - self._clock()) > 0:
            if self._pause_s:
                await self._router.wait_for_change(min(self._pause_s, remaining_s))
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S) or _FIRST_PAUSE_S
            self._check_model()
            try:
                return await self._admission.admit(
                    self._request, deadline=self._deadline, give_up_at=give_up_at, avoid=avoid
                )
            except InvalidRequest:
                raise
            except GatewayError as error:
                _log.info("reply %s cannot go on yet: %s", self._request.reply_id, error)
            avoid = ()
        raise timed_out() if self._clock() >= self._deadline else decode_unavailable()

    def _check_model(self) -> None:
        model = self._router.model
        if model is not None and model.fingerprint != self._request.fingerprint:
            raise Unavailable("the model was replaced while this reply was written", code="model_replaced")
