"""The Decode service: admit, hand over the KV cache, generate, release.

Invariants: one call per (reply, choice) generates at a time, the one with the highest epoch; the
sequence's blocks are released on every way out; an emitted token is never sampled again.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode.handoff import Handoff, HandoffReport
from services.decode.prefill_channels import PrefillChannels
from services.decode.reply_stream import ReplyStream
from services.engine.errors import EngineError, IncompatibleModel
from services.engine.interface import Sequence
from services.engine.request import SubmitMode
from services.rpc.interceptors import TracingClientInterceptor
from services.rpc.status import Draining, PrefillUnavailable, Superseded, abort
from services.settings import LocalPrefill
from services.wire import engine_request
from services.worker import Worker

DecodeContext = aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateMessage]


@dataclass(slots=True)
class _ActiveCall:
    epoch: int
    superseded: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Generates replies for gateways."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._active: dict[tuple[str, int], _ActiveCall] = {}
        self._channels = PrefillChannels(
            (TracingClientInterceptor(worker.telemetry.tracer),), pings=worker.pings
        )

    async def Generate(  # type: ignore[override]  # the stub knows only generators
        self, request: decode_pb2.GenerateRequest, context: DecodeContext
    ) -> None:
        """Streams one choice of one reply. See the service's comments in decode.proto."""
        try:
            with self._worker.lifecycle.track():
                await self._generate(request, context)
        except (EngineError, Draining, PrefillUnavailable, Superseded) as error:
            await abort(context, error)

    async def _generate(self, request: decode_pb2.GenerateRequest, context: DecodeContext) -> None:
        self._check(request)
        key = (request.reply_id, request.choice_index)
        active = self._take_over(key, request.epoch)
        try:
            mode = self._mode(request)
            sequence = self._worker.engine.submit(engine_request(request), mode)
            try:
                await context.send_initial_metadata(())
                report = HandoffReport()
                stream = ReplyStream(sequence, report, self._worker.telemetry)
                tasks = [asyncio.create_task(stream.write_to(context))]
                if mode is SubmitMode.HANDOFF:
                    tasks.append(asyncio.create_task(self._hand_over(sequence, request, report, context)))
                else:
                    report.attempts, report.target = 1, "local"
                await _run_until_written(tasks, active.superseded)
            finally:
                sequence.release()
        finally:
            if self._active.get(key) is active:
                del self._active[key]

    def _check(self, request: decode_pb2.GenerateRequest) -> None:
        worker = self._worker
        if worker.lifecycle.draining.is_set():
            raise Draining("this decode worker is draining")
        fingerprint = worker.engine.info.identity.fingerprint
        if request.fingerprint and request.fingerprint != fingerprint:
            raise IncompatibleModel("fingerprint", fingerprint, request.fingerprint)
        if not request.prefill_targets and worker.settings.local_prefill is LocalPrefill.NEVER:
            raise PrefillUnavailable("no prefill worker is up, and BATON_LOCAL_PREFILL=never")

    def _take_over(self, key: tuple[str, int], epoch: int) -> _ActiveCall:
        """Ends an older call for the same reply; the one with the lower epoch loses."""
        running = self._active.get(key)
        if running is not None:
            if running.epoch > epoch:
                raise Superseded(f"epoch {running.epoch} already generates this reply")
            running.superseded.set()
        active = self._active[key] = _ActiveCall(epoch)
        return active

    def _mode(self, request: decode_pb2.GenerateRequest) -> SubmitMode:
        """Conditional disaggregation: what is cheaper here than the handoff stays here."""
        settings = self._worker.settings
        if settings.local_prefill is LocalPrefill.NEVER:
            return SubmitMode.HANDOFF
        num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
        if (
            settings.local_prefill is LocalPrefill.ALWAYS
            or not request.prefill_targets
            or num_tokens <= settings.local_prefill_max_tokens
        ):
            return SubmitMode.LOCAL
        return SubmitMode.HANDOFF

    async def _hand_over(
        self,
        sequence: Sequence,
        request: decode_pb2.GenerateRequest,
        report: HandoffReport,
        context: DecodeContext,
    ) -> None:
        with self._channels.borrowed() as client_for:
            await Handoff(self._worker, sequence, request, client_for, report, context.time_remaining).run()

    async def close(self) -> None:
        """Closes the channels to prefill workers."""
        await self._channels.close()

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


async def _run_until_written(tasks: list[asyncio.Task[None]], superseded: asyncio.Event) -> None:
    """Waits for the first task (the writer); any other task's failure, or a takeover, ends it."""
    writer = tasks[0]
    takeover = asyncio.create_task(superseded.wait())
    pending: set[asyncio.Task[Any]] = {*tasks, takeover}
    try:
        while not writer.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if takeover in done:
                raise Superseded("a call with a higher epoch has taken over this reply")
            for task in done:
                task.result()
    finally:
        for task in (*tasks, takeover):
            task.cancel()
        await asyncio.gather(*tasks, takeover, return_exceptions=True)
