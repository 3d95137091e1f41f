"""One worker as a gateway sees it: its channel, its identity, its live load, whether it is there.

Invariant: a worker is up only while its load stream speaks; one that is silent for `SILENCE_S` counts
as gone, and every call to it is told (`lost`). A process that comes back on the same address is up
again once it has introduced itself, and starts with a clean record.

Its load is what this gateway has under way there, which is known exactly, and what others have: the last
report, up to 0.1 s old, less those of this gateway's that had been admitted by then. So a burst counts at
once, and what has ended counts no more. A prefill worker is taken to have what decode has admitted; while
that waits in decode's own queue, others' requests are underestimated by as many.
Must not know: which worker is the better choice, replies.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from random import Random
from typing import Any

from grpc import aio

from baton.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc
from gateway.routing.circuit_breaker import CircuitBreaker
from gateway.routing.holds import Holds
from gateway.routing.policy import Candidate
from gateway.signals import Pulse
from services.rpc.channel import DEFAULT_PINGS, Pings, create_channel

SILENCE_S = 3.0  # workers report at least once a second
_INTRODUCTION_S = 2.0
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 1.0

_log = logging.getLogger(__name__)


class WorkerGone(Exception):
    """The load stream has ended, or says nothing any more."""


class WorkerWatch:
    """Keeps one worker in view from `start` to `close`.

    Args:
        on_change: called when the worker comes, goes or begins to drain.
    """

    def __init__(
        self,
        address: str,
        stub_for: Callable[[aio.Channel], Any],
        interceptors: Sequence[aio.ClientInterceptor],
        *,
        clock: Callable[[], float],
        random: Random,
        on_change: Callable[[], None],
        pings: Pings = DEFAULT_PINGS,
    ) -> None:
        self.address = address
        self.info: common_pb2.WorkerInfo | None = None
        self.load: common_pb2.Load | None = None
        self.heard_at = float("-inf")
        self.lost = Pulse()
        self.breaker = CircuitBreaker(address, clock=clock, random=random)
        self.last_picked = 0  # the router's count; ties go to the longest rested
        self._clock = clock
        self._on_change = on_change
        self._channel = create_channel(address, interceptors, pings=pings)
        self.stub = stub_for(self._channel)
        self.holds = Holds()
        self._num_others = 0  # requests of other gateways, at the last report
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.load is not None

    @property
    def takes_work(self) -> bool:
        load = self.load  # once: metrics are read in another thread
        return load is not None and not load.draining

    @property
    def fingerprint(self) -> str | None:
        return self.info.identity.fingerprint if self.is_up and self.info is not None else None

    @property
    def instance(self) -> str | None:
        """The process behind the address."""
        return self.info.instance if self.is_up and self.info is not None else None

    @property
    def process(self) -> str:
        """The one last seen at the address, gone or not; the address itself before there was any."""
        return (self.info.instance if self.info is not None else "") or self.address

    @property
    def block_size(self) -> int:
        """Tokens; 1 until it has introduced itself."""
        return max(self.info.block_size, 1) if self.info is not None else 1

    @property
    def runs_prompts(self) -> bool:
        """Whether it can do without a prefill worker."""
        return self.info is not None and self.info.runs_prompts

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def note_draining(self, instance: str | None) -> None:
        """That process refused a request because it drains; its load report is still on the way."""
        if instance == self.instance and self.load is not None and not self.load.draining:
            self.load.draining = True
            self._on_change()

    def candidate(self, num_tokens: int) -> Candidate:
        """The worker as a policy sees it, for a prompt of `num_tokens`. Only for one that is up."""
        assert self.info is not None
        assert self.load is not None
        load = self.load
        num_free = load.blocks_total - load.blocks_used  # cached blocks are given up on demand
        return Candidate(
            address=self.address,
            num_requests=self._num_others + self.holds.num,
            capacity=max(self.info.max_num_seqs, 1),
            share_of_blocks=load.blocks_used / max(load.blocks_total, 1),
            lacks_room=num_free * self.block_size < num_tokens,
            last_picked=self.last_picked,
        )

    async def _watch(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                info = await self.stub.GetInfo(common_pb2.GetInfoRequest(), timeout=_INTRODUCTION_S)
                async with aclosing(self._loads()) as loads:
                    async for load in loads:
                        self._take(info, load)
                        backoff_s = _FIRST_BACKOFF_S
            except (aio.AioRpcError, WorkerGone) as error:
                self._forget(_reason(error))
            except asyncio.CancelledError:
                # grpc.aio raises this also for a call that the worker cancelled, as on its way down.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._forget("the worker has cancelled the call")
            except Exception:  # noqa: BLE001  # a worker that nobody watches would look alive for ever
                _log.exception("watching worker %s failed", self.address)
                self._forget("its load cannot be read")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _loads(self) -> AsyncGenerator[common_pb2.Load, None]:
        call = self.stub.WatchLoad(common_pb2.WatchLoadRequest())
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        load = await call.read()
                except TimeoutError:
                    raise WorkerGone(f"no load report for {SILENCE_S} s") from None
                if load is aio.EOF:
                    raise WorkerGone("the load stream has ended")
                yield load
        finally:
            call.cancel()

    def _take(self, info: common_pb2.WorkerInfo, load: common_pb2.Load) -> None:
        now = self._clock()
        before = (self.takes_work, self.fingerprint)
        if self.info is not None and self.info.instance != info.instance:
            self.breaker.reset()
        if self.load is not None and _work_done(load) != _work_done(self.load):
            self.breaker.heard()
        self.info, self.load, self.heard_at = info, load, now
        self._num_others = max(0, load.running + load.waiting - self.holds.num_there)
        if before != (self.takes_work, self.fingerprint):
            self._on_change()

    def _forget(self, reason: str) -> None:
        if self.load is None:
            return
        _log.warning("worker %s is gone: %s", self.address, reason)
        self.load = None
        self._on_change()
        self.lost.beat()


def _work_done(load: common_pb2.Load) -> tuple[int, ...]:
    """What moves while a long prompt runs, of which nobody hears anything else."""
    return load.prompt_tokens_computed, load.tokens_recomputed, load.kv_bytes_sent, load.kv_bytes_received


def _reason(error: aio.AioRpcError | WorkerGone) -> str:
    return error.code().name if isinstance(error, aio.AioRpcError) else str(error)


def decode_watch(
    address: str,
    interceptors: Sequence[aio.ClientInterceptor],
    *,
    clock: Callable[[], float],
    random: Random,
    on_change: Callable[[], None],
    pings: Pings = DEFAULT_PINGS,
) -> WorkerWatch:
    stub_for = decode_pb2_grpc.DecodeStub
    return WorkerWatch(
        address, stub_for, interceptors, clock=clock, random=random, on_change=on_change, pings=pings
    )


def prefill_watch(
    address: str,
    *,
    clock: Callable[[], float],
    random: Random,
    on_change: Callable[[], None],
    pings: Pings = DEFAULT_PINGS,
) -> WorkerWatch:
    """Gateways ask prefill workers for nothing but their load."""
    stub_for = prefill_pb2_grpc.PrefillStub
    return WorkerWatch(address, stub_for, (), clock=clock, random=random, on_change=on_change, pings=pings)
