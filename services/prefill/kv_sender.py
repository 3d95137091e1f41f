"""Sends one sequence's KV cache: pages as chunks are computed, the first token ahead of them.

Invariant: the result is sent last, and only when every page has been taken. A page's bytes are
copied out of the pool when it is about to be sent, so pages that wait cost no memory.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from baton.v1 import prefill_pb2
from services import kv_page
from services.engine.interface import Sequence
from services.engine.request import ChunkComputed, FirstTokenSampled, ModelIdentity
from services.wire import token_to_proto

_MS = 1000.0


class KvSender:
    """The messages of one Prefill call, in the order they should go.

    Args:
        num_held_tokens: first positions, which the receiver has.
    """

    def __init__(
        self,
        sequence: Sequence,
        identity: ModelIdentity,
        transfer_id: str,
        max_page_bytes: int,
        num_held_tokens: int = 0,
    ) -> None:
        self._sequence = sequence
        self._identity = identity
        self._num_prompt_tokens = len(sequence.request.prompt_token_ids)
        self._transfer_id = transfer_id
        self._max_page_bytes = max_page_bytes
        self._num_held_tokens = num_held_tokens
        self._pages: deque[kv_page.PageRange] = deque()
        self._first_token: FirstTokenSampled | None = None
        self._changed = asyncio.Event()
        self._ended = False
        self.num_bytes = 0
        self.num_pages = 0

    async def messages(self) -> AsyncGenerator[prefill_pb2.PrefillMessage, None]:
        """Yields FirstToken as soon as it is known, pages meanwhile, then the result.

        Raises what the sequence raises. Close it (`aclosing`) on every path.
        """
        collect = asyncio.create_task(self._collect())
        try:
            while True:
                # Cleared before looking, so that nothing which arrives after the look is missed.
                self._changed.clear()
                if self._first_token is not None:
                    first, self._first_token = self._first_token, None
                    yield prefill_pb2.PrefillMessage(
                        first_token=prefill_pb2.FirstToken(
                            token=token_to_proto(first.token),
                            timings=self._timings(),
                            num_cached_tokens=min(first.num_cached_tokens, self._num_prompt_tokens),
                        )
                    )
                elif self._pages:
                    yield prefill_pb2.PrefillMessage(page=self._seal(self._pages.popleft()))
                elif self._ended:
                    await collect  # raises here what ended the sequence early
                    break
                else:
                    await self._changed.wait()
            yield self._result()
        finally:
            collect.cancel()

    async def _collect(self) -> None:
        try:
            async for event in self._sequence.events():
                if isinstance(event, ChunkComputed):
                    start = max(event.token_start, self._num_held_tokens)
                    self._pages.extend(
                        kv_page.split(self._identity, start, event.token_end, self._max_page_bytes)
                    )
                elif isinstance(event, FirstTokenSampled):
                    self._first_token = event
                self._changed.set()
        finally:
            self._ended = True
            self._changed.set()

    def _seal(self, where: kv_page.PageRange) -> prefill_pb2.KvPage:
        kv = self._sequence.export_kv(where.layer_start, where.layer_end, where.token_start, where.token_end)
        page = kv_page.seal(self._transfer_id, self._identity.dtype, where, kv)
        self.num_pages += 1
        self.num_bytes += len(page.payload)
        return page

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
