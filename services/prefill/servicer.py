"""The Prefill service: admit, compute, send, release.

Handlers write to the context instead of yielding: a generator that is dropped mid-yield would
release its blocks only when it is collected, a coroutine does so on the spot.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing

from grpc import aio

from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.engine.errors import EngineError, InvalidRequest
from services.engine.identity import check_compatible
from services.engine.request import SequenceTimings, SubmitMode
from services.kv.data_server import DataServer
from services.kv.payload import PayloadFormat
from services.prefill.kv_sender import KvSender
from services.prefill.page_sealer import SHARED_PAGE_BYTES, PageSealer
from services.rpc.status import DataConnectionLost, Draining, abort
from services.wire import engine_request, identity_from_proto, payload_format_from_proto
from services.worker import Worker

PrefillContext = aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillMessage | bytes]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Runs prompts for decode workers.

    Args:
        data_server: where these may fetch the bytes of pages; None: in messages only.
    """

    def __init__(self, worker: Worker, data_server: DataServer | None = None) -> None:
        self._worker = worker
        self._data_server = data_server
        self._taken: dict[str, asyncio.Event] = {}  # by transfer: its pages have been read

    async def Prefill(  # type: ignore[override]  # the stub knows only generators
        self, request: prefill_pb2.PrefillRequest, context: PrefillContext
    ) -> None:
        """Streams the KV cache and the first token of one prompt; frees both when the call ends."""
        try:
            with self._worker.lifecycle.track():
                await self._prefill(request, context)
        except (EngineError, Draining, DataConnectionLost) as error:
            await abort(context, error)

    async def _prefill(self, request: prefill_pb2.PrefillRequest, context: PrefillContext) -> None:
        worker = self._worker
        if worker.lifecycle.draining.is_set():
            raise Draining("this prefill worker is draining")
        identity = worker.engine.info.identity
        check_compatible(identity, identity_from_proto(request.identity))
        form = _payload_format(request)
        accepted_ns = time.time_ns()
        sequence = worker.engine.submit(engine_request(request), SubmitMode.PREFILL_ONLY)
        pool = worker.engine.info.shared_pool
        is_shared = pool is not None and request.shared_pool == pool.pool_id
        taken = self._taken[request.transfer_id] = asyncio.Event()
        exits = ExitStack()
        data = None
        try:
            if self._data_server is not None and not is_shared:
                data = exits.enter_context(self._data_server.expecting(request.transfer_id))
            await context.send_initial_metadata(())
            sealer = PageSealer(
                sequence.kv,
                identity,
                request.transfer_id,
                SHARED_PAGE_BYTES if is_shared else self._max_page_bytes(request),
                form,
                is_shared=is_shared,
                data=data,
            )
            sender = KvSender(sequence, sealer, worker.kv, request.num_held_tokens, data)
            async with aclosing(sender.messages()) as messages:
                async for message in messages:
                    await context.write(message)
            if is_shared and sender.num_pages:
                await taken.wait()
        finally:
            exits.close()
            sequence.release()
            if self._taken.get(request.transfer_id) is taken:
                del self._taken[request.transfer_id]
            self._record_spans(accepted_ns, sequence.timings)

    def _max_page_bytes(self, request: prefill_pb2.PrefillRequest) -> int:
        ours = self._worker.settings.max_page_bytes
        return min(request.max_page_bytes or ours, ours)

    def _record_spans(self, accepted_ns: int, timings: SequenceTimings) -> None:
        """Opens the stages' spans after the fact: the engine's thread only took durations."""
        start_ns = accepted_ns
        for name, duration_s in (("queue", timings.queue_s), ("prefill", timings.prefill_s)):
            if duration_s is None:
                return
            span = self._worker.telemetry.tracer.start_span(name, start_time=start_ns)
            start_ns += int(duration_s * 1e9)
            span.end(end_time=start_ns)

    async def Release(
        self,
        request: prefill_pb2.ReleaseRequest,
        context: aio.ServicerContext[prefill_pb2.ReleaseRequest, prefill_pb2.ReleaseReply],
    ) -> prefill_pb2.ReleaseReply:
        """Lets a transfer's call end. See prefill.proto."""
        if (taken := self._taken.get(request.transfer_id)) is not None:
            taken.set()
        return prefill_pb2.ReleaseReply()

    async def GetInfo(
        self,
        request: common_pb2.GetInfoRequest,
        context: aio.ServicerContext[common_pb2.GetInfoRequest, common_pb2.WorkerInfo],
    ) -> common_pb2.WorkerInfo:
        return self._worker.info()

    async def WatchLoad(
        self,
        request: common_pb2.WatchLoadRequest,
        context: aio.ServicerContext[common_pb2.WatchLoadRequest, common_pb2.Load],
    ) -> AsyncIterator[common_pb2.Load]:
        async for load in self._worker.watch_load(request.interval_ms):
            yield load


def _payload_format(request: prefill_pb2.PrefillRequest) -> PayloadFormat:
    """Raises InvalidRequest."""
    try:
        return payload_format_from_proto(request.payload_format)
    except ValueError as error:
        raise InvalidRequest("payload_format", str(error)) from error
