"""Brings a sequence's prompt into this worker's cache: from a prefill worker, a spare, or here.

Invariant: the first token that was passed on stands. A later attempt fetches the KV cache again and
its own first token is discarded; a worker that fails costs time, never text.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from grpc import StatusCode, aio
from opentelemetry import trace

from baton.v1 import decode_pb2, prefill_pb2
from observability import semconv
from services.decode.kv_receiver import KvReceiver, Transfer
from services.decode.prefill_channels import ClientFor
from services.engine.errors import InvalidKvPage, InvalidRequest
from services.engine.interface import Sequence
from services.rpc.status import DataConnectionLost, PrefillUnavailable, field_of, is_fault
from services.settings import KvTransport, LocalPrefill
from services.wire import identity_to_proto, token_from_proto
from services.worker import Worker

log = structlog.get_logger()

_MS = 1000.0


@dataclass(slots=True)
class HandoffReport:
    """What the handoff took, for the reply's timings."""

    attempts: int = 0
    target: str = ""
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    num_cached_tokens: int = 0  # of the prompt, on the worker that gave the first token
    transfer: Transfer | None = None
    failed_targets: list[str] = field(default_factory=list)  # for the router; by their own fault


class Handoff:
    """One sequence's way into the running batch.

    Args:
        client_for: a client for a `host:port`.
        report: filled in as things happen, read by whoever writes the messages.
    """

    def __init__(
        self,
        worker: Worker,
        sequence: Sequence,
        request: decode_pb2.GenerateRequest,
        client_for: ClientFor,
        report: HandoffReport,
        time_remaining: Callable[[], float | None],
    ) -> None:
        self._worker = worker
        self._sequence = sequence
        self._request = request
        self._client_for = client_for
        self._report = report
        self._time_remaining = time_remaining
        self._has_first_token = False
        self._reserved_at = 0.0  # monotonic; what came before is `decode_queue`
        self._tracer = worker.telemetry.tracer

    async def run(self) -> None:
        """Returns once the sequence has joined the batch (or runs its prompt here).

        Raises PrefillUnavailable when nobody could, InvalidRequest if a worker refused the prompt then.
        """
        with self._tracer.start_as_current_span("queue"):
            await self._sequence.reserved()
        self._reserved_at = time.monotonic()
        if not self._sequence.awaits_kv:
            return  # a continuation whose tokens already meet an end condition
        if self._is_nearly_held():
            self._report.attempts, self._report.target = 1, "local"
            self._sequence.compute_locally()
            return
        failures: list[str] = []
        refusal: InvalidRequest | None = None
        for target in self._request.prefill_targets:
            try:
                await self._attempt(target)
                self._sequence.join()
            except (aio.AioRpcError, InvalidKvPage, DataConnectionLost) as error:
                failures.append(f"{target}: {_reason(error)}")
                log.warning("prefill attempt failed", target=target, reason=_reason(error))
                refusal = refusal or _refusal(error)
                if _is_fault(error):
                    self._report.failed_targets.append(target)
                self._sequence.kv.reset()
                continue
            return
        if self._worker.settings.local_prefill is LocalPrefill.NEVER:
            if refusal is not None:
                raise refusal
            raise PrefillUnavailable(
                "no prefill worker delivered: " + "; ".join(failures or ["none was named"]),
                self._report.failed_targets,
            )
        self._report.attempts += 1
        self._report.target = "local"
        if not self._has_first_token:
            self._report.prefill_queue_ms = self._lost_ms(time.monotonic())
        self._sequence.compute_locally()

    def _is_nearly_held(self) -> bool:
        """Conditional disaggregation: what the prefix cache has left to do is cheaper here than a transfer.

        The last token is always left, and costs what any token of a reply does.
        """
        settings = self._worker.settings
        if settings.local_prefill is LocalPrefill.NEVER:
            return False
        num_left = self._sequence.request.num_context_tokens - self._sequence.num_held_tokens
        return num_left <= max(1, settings.local_prefill_max_tokens)

    async def _attempt(self, target: str) -> None:
        """Raises AioRpcError, InvalidKvPage or DataConnectionLost."""
        try:
            await self._pull_from(target)
        except DataConnectionLost as error:
            # The worker may be as well as can be; and what it has computed is in its prefix cache.
            log.warning("pages go in messages for a while", target=target, reason=str(error))
            self._sequence.kv.reset()
            await self._pull_from(target)

    async def _pull_from(self, target: str) -> None:
        self._report.attempts += 1
        began = time.monotonic()
        settings, identity = self._worker.settings, self._worker.engine.info.identity
        client = self._client_for(target)
        if settings.kv_transport is not KvTransport.GRPC:
            client.shortcuts.learn(identity, settings.kv_transport)
        receiver = KvReceiver(
            client,
            self._sequence,
            identity,
            self._worker.kv,
            lambda message: self._take_first_token(target, began, message),
            settings.kv_payload,
            self._worker.pings,
        )
        outcome = "error"
        try:
            with self._tracer.start_as_current_span("kv_transfer") as span:
                transfer = await receiver.pull(self._prefill_request(), self._time_remaining())
                span.set_attributes(
                    {
                        semconv.BATON_KV_BYTES: transfer.pages.num_bytes,
                        semconv.BATON_KV_PAGES: transfer.pages.num_pages,
                        semconv.BATON_KV_SHARED_PAGES: transfer.pages.num_shared_pages,
                        semconv.BATON_KV_DATA_PAGES: transfer.pages.num_data_pages,
                    }
                )
            outcome = "ok"
        except (aio.AioRpcError, InvalidKvPage) as error:
            if _is_fault(error):
                client.shortcuts.forget()  # it may be gone, or another's
            raise
        finally:
            self._worker.telemetry.metrics.prefill_attempt(outcome)
        self._report.transfer = transfer
        self._worker.telemetry.metrics.kv_transfer(transfer.pages.num_bytes, transfer.after_first_token_s)

    def _take_first_token(self, target: str, began: float, message: prefill_pb2.FirstToken) -> None:
        if self._has_first_token:
            return  # what was emitted stands
        self._sequence.accept_first_token(token_from_proto(message.token))
        self._has_first_token = True
        report = self._report
        report.target = target
        report.prefill_queue_ms = message.timings.queue_ms + self._lost_ms(began)
        report.prefill_ms = message.timings.prefill_ms
        report.num_cached_tokens = message.num_cached_tokens
        trace.get_current_span().add_event("first_token")

    def _lost_ms(self, until: float) -> float:
        """Time spent on workers that failed is time spent waiting for one that works."""
        return (until - self._reserved_at) * _MS

    def _prefill_request(self) -> prefill_pb2.PrefillRequest:
        request = self._request
        return prefill_pb2.PrefillRequest(
            reply_id=request.reply_id,
            identity=identity_to_proto(self._worker.engine.info.identity),
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=request.generated_token_ids,
            sampling=request.sampling,
            choice_index=request.choice_index,
            priority=request.priority,
            cache_salt=request.cache_salt,
            max_page_bytes=self._worker.settings.max_page_bytes,
            num_held_tokens=self._sequence.num_held_tokens,
        )


def _is_fault(error: Exception) -> bool:
    """Whether an attempt's failure speaks against the worker that was asked."""
    return isinstance(error, InvalidKvPage) or (isinstance(error, aio.AioRpcError) and is_fault(error))


def _refusal(error: Exception) -> InvalidRequest | None:
    """What this worker admitted may be too long for the pool of one and not for that of the next."""
    if isinstance(error, aio.AioRpcError) and error.code() is StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(field_of(error) or "request", error.details() or "refused by prefill")
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
