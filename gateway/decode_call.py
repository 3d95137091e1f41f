"""One call to a decode worker after its admission: read message by message, then ended.

Invariant: a call ends with `Finished` or it has failed; an end of stream without it is a failure, and
so is a message that breaks the protocol. Dropping a call cancels nothing in grpc.aio, so whoever
holds one calls `cancel` on every way out; the breakers hear how each call ended.
Must not know: replies, events, retries.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import grpc
from grpc import aio

from baton.v1 import decode_pb2
from gateway.errors import ContextTooLong, GatewayError, InternalError, InvalidRequest, Unavailable, from_rpc
from gateway.router import Route
from gateway.routing.outcome import Blame

_LAST_READ_S = 0.5  # for the status behind `Finished`
_FINISH_REASONS = frozenset({decode_pb2.FINISH_REASON_STOP, decode_pb2.FINISH_REASON_LENGTH})

# Fields of GenerateRequest and SamplingParams whose HTTP names differ.
_HTTP_NAMES: dict[str, str | None] = {
    "prompt_token_ids": "messages",
    "logprobs": "top_logprobs",
    "include_stop": "include_stop_str_in_output",
    "timeout_s": "timeout",
    "sampling": None,  # several fields together
}
_LENGTH_FIELDS = frozenset({"prompt_token_ids", "max_tokens"})  # at fault only when they do not fit

Call = aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateMessage]
Message = decode_pb2.Delta | decode_pb2.Finished


class CallFailed(Exception):
    """The call broke off or was refused.

    Args:
        reason: a bounded label.
        error: what a client is told.
        blame: what the breakers are told.
    """

    def __init__(self, reason: str, detail: str, error: GatewayError, blame: Blame) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.error = error
        self.blame = blame

    @classmethod
    def of_rpc(cls, error: aio.AioRpcError) -> "CallFailed":
        reason, detail = error.code().name.lower(), error.details() or ""
        return cls(reason, detail, _client_view(error), Blame.of_rpc(error))

    @classmethod
    def unavailable(cls, reason: str, detail: str = "", *, blame: Blame) -> "CallFailed":
        return cls(reason, detail, decode_unavailable(), blame)


def decode_unavailable() -> Unavailable:
    return Unavailable("no decode worker could take the request now", code="decode_unavailable")


def _client_view(error: aio.AioRpcError) -> GatewayError:
    """Names fields as HTTP does, and keeps workers' addresses, which transports quote, to the log."""
    view = from_rpc(error)
    if isinstance(view, InvalidRequest):
        field = view.param
        message = view.message.removeprefix(f"{field}: ")
        param = _HTTP_NAMES.get(field, field) if field else None
        kind = ContextTooLong if field in _LENGTH_FIELDS else InvalidRequest
        return kind(message, param=param)
    if view.shape.status in (503, 504):
        return decode_unavailable()
    return view


class DecodeCall:
    """A call that a worker has admitted. Its first message is fetched ahead, to be stamped on arrival."""

    def __init__(self, route: Route, call: Call, *, sent_at: float, clock: Callable[[], float]) -> None:
        self.address = route.decode.address
        self.sent_at = sent_at
        self.first_message_at: float | None = None
        self._call = call
        self._outcome = route.outcome
        self._clock = clock
        self._lost = route.decode.lost.next()
        self._guard = asyncio.create_task(self._cancel_when_lost())
        self._first = asyncio.create_task(self._read_first())
        # A call that is cancelled before it is read has nobody to fetch its outcome.
        self._first.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Deltas, then Finished, then no more. Raises CallFailed."""
        try:
            message = _checked(await self._first)
            self._outcome.answered(message.timings)
            while not isinstance(message, decode_pb2.Finished):
                yield message
                message = _checked(await self._read())
                self._outcome.heard()
        except CallFailed as failure:
            self._outcome.failed(failure.blame)
            raise
        self._outcome.finished(message.timings)
        yield message

    async def close(self) -> None:
        """Lets a call that has finished end with its own status, for a moment, then cancels it."""
        with suppress(TimeoutError, CallFailed):
            async with asyncio.timeout(_LAST_READ_S):
                await self._read()
        self.cancel()

    def cancel(self) -> None:
        """Ends the call and the worker's part of it. Idempotent."""
        self._guard.cancel()
        self._first.cancel()
        self._call.cancel()
        self._outcome.dropped()

    async def _read_first(self) -> decode_pb2.GenerateMessage | None:
        message = await self._read()
        self.first_message_at = self._clock()
        return message

    async def _read(self) -> decode_pb2.GenerateMessage | None:
        """The next message, None at the end."""
        try:
            message = await self._call.read()
        except aio.AioRpcError as error:
            raise CallFailed.of_rpc(error) from error
        except asyncio.CancelledError:
            # grpc.aio raises this also when the call, not the task, was cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if self._lost.is_set():
                raise CallFailed.unavailable("silent", blame=Blame(decode=True)) from None
            raise CallFailed.unavailable(grpc.StatusCode.CANCELLED.name.lower(), blame=Blame()) from None
        return message if isinstance(message, decode_pb2.GenerateMessage) else None

    async def _cancel_when_lost(self) -> None:
        await self._lost.wait()
        self._call.cancel()


def _checked(message: decode_pb2.GenerateMessage | None) -> Message:
    if message is None:
        raise CallFailed.unavailable(
            "unfinished", "the call ended without Finished", blame=Blame(decode=True)
        )
    kind = message.WhichOneof("message")
    if kind == "delta" and message.delta.text and message.delta.tokens:
        return message.delta
    if kind == "finished" and message.finished.reason in _FINISH_REASONS:
        return message.finished
    fault = InternalError("the decode worker sent something that is no part of a reply")
    raise CallFailed("protocol", f"unexpected message of kind {kind}", fault, Blame(decode=True))
