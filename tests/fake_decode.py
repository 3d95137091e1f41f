"""A decode worker without an engine: real gRPC on loopback, and a script for everything that goes wrong.

Token i of any reply is ID `i`, its text `word(i)`, so that joined texts can be checked whoever wrote
which part.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc import aio

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from services.rpc.channel import server_options
from services.rpc.status import FIELD_KEY

FINGERPRINT = "f" * 16


def word(position: int) -> str:
    return f"w{position} "


def text(num_tokens: int) -> str:
    return "".join(word(i) for i in range(num_tokens))


@dataclass(slots=True)
class Script:
    """What the worker does; may be changed while it runs. Durations in seconds."""

    refuse: tuple[grpc.StatusCode, str, str] | None = None  # status, details, field; before admission
    metadata: dict[str, str] = field(default_factory=dict)  # trailing, of a refusal
    admit_delay_s: float = 0.0
    first_delay_s: float = 0.0
    token_delay_s: float = 0.0
    die_after: int | None = None  # tokens of a call; then `die_with`
    die_with: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    end_after: int | None = None  # tokens of a call; then an orderly end without Finished
    stall_after: int | None = None  # tokens of a call; then silence for ever
    garbage_after: int | None = None  # tokens of a call; then `garbage`
    garbage: decode_pb2.GenerateMessage = field(default_factory=decode_pb2.GenerateMessage)
    tokens_per_delta: int = 1
    end_tokens: int = 0  # tokens without text in Finished
    timings: decode_pb2.FirstTextTimings | None = None
    handoff: decode_pb2.HandoffTimings | None = None
    frozen: bool = False  # neither loads nor admissions any more, connections stay: a stopped process
    load: common_pb2.Load = field(default_factory=lambda: common_pb2.Load(blocks_total=1000))


class _EndedEarly(Exception):
    """The script ends the call in order, without Finished."""


class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """Generates `max_tokens` words by its script."""

    def __init__(self, info: common_pb2.WorkerInfo, script: Script) -> None:
        self.info = info
        self.script = script
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.num_running = 0  # calls in the handler now

    async def Generate(self, request, context):  # type: ignore[no-untyped-def,override]
        self.requests.append(request)
        self.num_running += 1
        try:
            await self._generate(request, context)
        except _EndedEarly:
            return
        finally:
            self.num_running -= 1

    async def _generate(
        self,
        request: decode_pb2.GenerateRequest,
        context: "aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateMessage]",
    ) -> None:
        script = self.script
        if script.frozen:
            await asyncio.Event().wait()
        await asyncio.sleep(script.admit_delay_s)
        if script.refuse is not None:
            code, details, field_name = script.refuse
            field_at_fault = {FIELD_KEY: field_name} if field_name else {}
            await context.abort(code, details, tuple((field_at_fault | script.metadata).items()))
        await context.send_initial_metadata(())
        await asyncio.sleep(script.first_delay_s)
        first, last = len(request.generated_token_ids), request.sampling.max_tokens - script.end_tokens
        timings = script.timings
        for start in range(first, last, script.tokens_per_delta):
            await self._go_wrong(start - first, context)
            delta = _delta(range(start, min(start + script.tokens_per_delta, last)), request.sampling)
            if timings is not None:
                delta.timings.CopyFrom(timings)
                timings = None
            await context.write(decode_pb2.GenerateMessage(delta=delta))
            await asyncio.sleep(script.token_delay_s)
        await self._go_wrong(last - first, context)
        finished = decode_pb2.Finished(
            reason=decode_pb2.FINISH_REASON_STOP if script.end_tokens else decode_pb2.FINISH_REASON_LENGTH,
            tokens=[common_pb2.SampledToken(token_id=i) for i in range(last, last + script.end_tokens)],
            num_prompt_tokens=len(request.prompt_token_ids),
            num_generated_tokens=request.sampling.max_tokens,
            num_cached_tokens=1,
        )
        if script.handoff is not None:
            finished.handoff.CopyFrom(script.handoff)
        await context.write(decode_pb2.GenerateMessage(finished=finished))

    async def _go_wrong(self, num_sent: int, context: "aio.ServicerContext[object, object]") -> None:
        script = self.script
        if script.die_after is not None and num_sent >= script.die_after:
            await context.abort(script.die_with, "as scripted")
        if script.garbage_after is not None and num_sent >= script.garbage_after:
            await context.write(script.garbage)
            await asyncio.Event().wait()
        if script.end_after is not None and num_sent >= script.end_after:
            raise _EndedEarly
        if script.stall_after is not None and num_sent >= script.stall_after:
            await asyncio.Event().wait()

    async def GetInfo(self, request, context):  # type: ignore[no-untyped-def,override]
        if self.script.frozen:
            await asyncio.Event().wait()
        return self.info

    async def WatchLoad(self, request, context):  # type: ignore[no-untyped-def,override]
        sent, idle = None, 0.0
        while not self.script.frozen:
            if self.script.load != sent or idle >= 0.5:
                sent, idle = common_pb2.Load(), 0.0
                sent.CopyFrom(self.script.load)
                yield sent
            await asyncio.sleep(0.01)
            idle += 0.01
        await asyncio.Event().wait()


def _delta(positions: range, sampling: common_pb2.SamplingParams) -> decode_pb2.Delta:
    delta = decode_pb2.Delta(text="".join(map(word, positions)))
    for position in positions:
        token = delta.tokens.add(token_id=position)
        if sampling.HasField("logprobs"):
            token.logprob = -0.5
            for rank in range(sampling.logprobs):
                token.top_logprobs.add(token_id=rank, logprob=-1.0 - rank)
    return delta


@dataclass(slots=True)
class FakeWorker:
    """A worker process's stand-in: it can be killed and started again on its address."""

    role: common_pb2.Role = common_pb2.ROLE_DECODE
    fingerprint: str = FINGERPRINT
    script: Script = field(default_factory=Script)
    address: str = "127.0.0.1:0"
    block_size: int = 16
    instance: str = ""  # empty: another one with every start
    servicer: FakeDecode | None = None
    requests: list[decode_pb2.GenerateRequest] = field(default_factory=list)
    _server: aio.Server | None = None
    _num_starts: int = 0

    @property
    def num_running(self) -> int:
        return self.servicer.num_running if self.servicer is not None else 0

    async def start(self) -> None:
        """Serves; the first time on a free port, then on the same one, as another instance."""
        self._num_starts += 1
        info = common_pb2.WorkerInfo(
            role=self.role,
            identity=common_pb2.ModelIdentity(model="fake", fingerprint=self.fingerprint),
            max_model_len=1000,
            block_size=self.block_size,
            num_blocks=1000,
            max_num_seqs=8,
            max_queue_len=8,
            instance=self.instance or f"{id(self):x}-{self._num_starts}",
            runs_prompts=True,
        )
        self.servicer = FakeDecode(info, self.script)
        self.servicer.requests = self.requests
        self._server = aio.server(options=server_options())
        if self.role == common_pb2.ROLE_PREFILL:
            prefill_pb2_grpc.add_PrefillServicer_to_server(_prefill(self.servicer), self._server)
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(self.servicer, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def kill(self) -> None:
        """Ends everything at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


def _prefill(servicer: FakeDecode) -> prefill_pb2_grpc.PrefillServicer:
    """The same introduction and load, under the other service's name."""

    class Prefill(prefill_pb2_grpc.PrefillServicer):
        Prefill = None  # nobody calls it here
        GetInfo = staticmethod(servicer.GetInfo)
        WatchLoad = staticmethod(servicer.WatchLoad)

    return Prefill()


@asynccontextmanager
async def running(*workers: FakeWorker) -> AsyncIterator[tuple[FakeWorker, ...]]:
    """Starts the workers, and ends those that are left."""
    try:
        for worker in workers:
            await worker.start()
        yield workers
    finally:
        await asyncio.gather(*(worker.kill() for worker in workers))
