"""Sends one sequence's KV cache: pages as layers are computed, the first token ahead of those that wait.

Invariant: the result is sent last, and only when every page has been taken. A page's bytes are copied
out of the pool shortly before its turn, so pages that wait cost no memory; off the event loop, while
those before it are being sent.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from baton.v1 import prefill_pb2
from services.engine import interface
from services.engine.page_range import PageRange
from services.engine.request import FirstTokenSampled, KvComputed
from services.kv.background import Background
from services.kv.data_server import DataStream
from services.kv.resources import KvResources
from services.prefill.page_sealer import PageSealer, SealedPage
from services.wire import token_to_proto

_MS = 1000.0
_MOST_AHEAD = 3  # pages that are copied out before their turn, so that the wire never waits for one


class KvSender:
    """The messages of one Prefill call, in the order they should go.

    Args:
        sealer: makes the pages.
        num_held_tokens: first positions, which the receiver has.
        data: where the pieces of pages go that the sealer leaves out of their messages.
    """

    def __init__(
        self,
        sequence: interface.Sequence,
        sealer: PageSealer,
        resources: KvResources,
        num_held_tokens: int = 0,
        data: DataStream | None = None,
    ) -> None:
        self._sequence = sequence
        self._sealer = sealer
        self._num_prompt_tokens = len(sequence.request.prompt_token_ids)
        self._resources = resources
        self._num_held_tokens = num_held_tokens
        self._data = data
        self._waiting: deque[PageRange] = deque()
        self._sealed: deque[SealedPage] = deque()
        self._first_token: FirstTokenSampled | None = None
        self._changed = asyncio.Event()
        self._has_ended = False
        self.num_bytes = 0
        self.num_pages = 0

    async def messages(self) -> AsyncGenerator[prefill_pb2.PrefillMessage | bytes, None]:
        """Yields FirstToken as soon as it is known, pages (encoded) meanwhile, then the result.

        Raises what the sequence raises. Close it (`aclosing`) on every path.
        """
        collect = asyncio.create_task(self._collect())
        sealing = Background(self._resources.threads, self._changed.set)
        sending: asyncio.Task[None] | None = None  # bytes of a page; the first token waits for none
        try:
            while True:
                # Cleared before looking, so that nothing which arrives after the look is missed.
                self._changed.clear()
                while self._waiting and sealing.num_unfinished + len(self._sealed) < _MOST_AHEAD:
                    sealing.start(partial(self._seal, self._waiting.popleft()))
                # Before what has been sealed is looked at: a page that is sealed in between would be lost.
                is_over = self._has_ended and not sealing.num_unfinished
                if self._first_token is not None:
                    first, self._first_token = self._first_token, None
                    yield self._announce(first)
                elif sending is not None and sending.done():
                    sending.result()
                    sending = None
                elif self._sealed and sending is None:
                    sealed = self._sealed.popleft()
                    yield self._count(sealed)
                    if sealed.pieces:
                        sending = self._send(sealed.pieces)
                elif is_over and sending is None:
                    await collect  # raises here what ended the sequence early
                    break
                else:
                    sealing.check()
                    await self._changed.wait()
            yield self._result()
        finally:
            tasks = [collect] if sending is None else [collect, sending]
            for task in tasks:
                task.cancel()
            await sealing.stop()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _send(self, pieces: Sequence[memoryview]) -> "asyncio.Task[None]":
        assert self._data is not None
        sending = asyncio.create_task(self._data.send(pieces))
        sending.add_done_callback(lambda _: self._changed.set())
        return sending

    async def _collect(self) -> None:
        try:
            async for event in self._sequence.events():
                if isinstance(event, KvComputed):
                    start = max(event.token_start, self._num_held_tokens)
                    where = PageRange(event.layer_start, event.layer_end, start, event.token_end)
                    self._waiting.extend(self._sealer.split(where))
                elif isinstance(event, FirstTokenSampled):
                    self._first_token = event
                self._changed.set()
        finally:
            self._has_ended = True
            self._changed.set()

    def _seal(self, where: PageRange) -> None:
        """In a thread."""
        self._sealed.append(self._sealer.seal(where))

    def _count(self, sealed: SealedPage) -> bytes:
        self.num_pages += 1
        self.num_bytes += sealed.num_bytes
        self._resources.traffic.sent += sealed.num_bytes
        return sealed.message

    def _announce(self, first: FirstTokenSampled) -> prefill_pb2.PrefillMessage:
        return prefill_pb2.PrefillMessage(
            first_token=prefill_pb2.FirstToken(
                token=token_to_proto(first.token),
                timings=self._timings(),
                num_cached_tokens=min(first.num_cached_tokens, self._num_prompt_tokens),
            )
        )

    def _result(self) -> prefill_pb2.PrefillMessage:
        return prefill_pb2.PrefillMessage(
            result=prefill_pb2.PrefillResult(
                num_pages=self.num_pages,
                num_bytes=self.num_bytes,
                timings=self._timings(),
            )
        )

    def _timings(self) -> prefill_pb2.PrefillTimings:
        timings = self._sequence.timings
        return prefill_pb2.PrefillTimings(
            queue_ms=(timings.queue_s or 0.0) * _MS,
            prefill_ms=(timings.prefill_s or 0.0) * _MS,
        )
