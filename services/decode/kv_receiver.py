"""Receives one sequence's KV cache: one Prefill call, verified page by page into reserved blocks.

Invariant: `pull` returns only when every layer of every context token has arrived, checked out and
been imported; anything else raises, and the caller decides who is asked next. Either way nobody writes
to the sequence's blocks any more. The first token is passed on the moment it arrives, ahead of the pages;
a page is verified and copied off the event loop, while the next one arrives.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import structlog

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.engine.interface import Sequence
from services.engine.request import ModelIdentity
from services.kv import codec, page
from services.kv.background import Background
from services.kv.mapped_pool import MappedPool
from services.kv.service import PrefillClient
from services.worker import KvTraffic

log = structlog.get_logger()

_END_S = 1.0
_MOST_UNFINISHED = 4  # pages: enough that neither the wire nor the thread waits for the other


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one completed pull moved, and how long it took beyond the first token."""

    num_pages: int
    num_shared_pages: int  # of these, read out of the prefill worker's memory
    num_bytes: int
    after_first_token_s: float  # first token in hand to last page verified


class KvReceiver:
    """One attempt at one prefill worker.

    Args:
        threads: where pages are verified and copied.
    """

    def __init__(
        self,
        sequence: Sequence,
        identity: ModelIdentity,
        traffic: KvTraffic,
        threads: Executor,
        on_first_token: Callable[[prefill_pb2.FirstToken], None],
    ) -> None:
        self._sequence = sequence
        self._identity = identity
        self._traffic = traffic
        self._threads = threads
        self._on_first_token = on_first_token
        self._changed = asyncio.Event()
        self._first_token_at: float | None = None
        self._imported_at = 0.0
        self._num_pages = 0
        self._num_bytes = 0
        self._num_shared = 0  # pages

    async def pull(
        self, client: PrefillClient, request: prefill_pb2.PrefillRequest, timeout_s: float | None
    ) -> Transfer:
        """Runs the call to its end.

        Raises InvalidKvPage (damaged, missing or surplus pages) or AioRpcError (the worker's status).
        """
        request.transfer_id = secrets.token_hex(16)
        if (pool := client.pool) is not None:
            request.shared_pool = pool.pool_id
        result: prefill_pb2.PrefillResult | None = None
        imports = Background(self._threads, self._changed.set)
        call = client.prefill(request, timeout=timeout_s)
        try:
            async with asyncio.timeout(None) as bound:
                async for data in call:
                    if result is not None:
                        raise InvalidKvPage("a message after the result")
                    message = codec.decode_message(data)
                    if isinstance(message, page.Page):
                        await self._until_unfinished(imports, _MOST_UNFINISHED - 1)
                        self._count(message, pool)
                        imports.start(partial(self._import, message, request.transfer_id, pool))
                        continue
                    match message.WhichOneof("message"):
                        case "first_token":
                            self._take_first_token(message.first_token)
                        case "result":
                            result = message.result
                            await self._until_unfinished(imports, 0)
                            self._imported_at = time.monotonic()
                            if self._num_shared:
                                await client.release(request.transfer_id)
                            # All is here: whoever does not end the call is not waited for.
                            bound.reschedule(asyncio.get_running_loop().time() + _END_S)
                        case unknown:
                            raise InvalidKvPage(f"unknown prefill message {unknown!r}")
        except TimeoutError:
            log.warning("prefill did not end a call whose result it has sent", transfer=request.transfer_id)
        finally:
            call.cancel()  # leaving the loop early cancels nothing by itself
            await imports.stop()
        if pool is not None and self._num_pages and not self._num_shared:
            client.forget_pool()  # another process answers at this address
        return self._finish(result)

    def _take_first_token(self, message: prefill_pb2.FirstToken) -> None:
        if self._first_token_at is not None:
            raise InvalidKvPage("two first tokens in one transfer")
        self._first_token_at = time.monotonic()
        self._on_first_token(message)

    async def _until_unfinished(self, imports: Background, most: int) -> None:
        """Waits until no more imports than that are unfinished. Raises what one has raised."""
        while imports.num_unfinished > most:
            self._changed.clear()
            imports.check()
            if imports.num_unfinished > most:
                await self._changed.wait()
        imports.check()

    def _count(self, received: page.Page, pool: MappedPool | None) -> None:
        """Raises InvalidKvPage for what cannot be a page in shared memory, before its ranges are used."""
        header, num_bytes = received.header, len(received.payload)
        if header.blocks:
            if pool is None:
                raise InvalidKvPage("a page in shared memory, which was not asked for")
            where = page.range_of(header)
            pool.check(where, header.blocks)
            num_bytes = page.num_bytes(self._identity, where)
            self._num_shared += 1
        self._num_pages += 1
        self._num_bytes += num_bytes
        self._traffic.received += num_bytes

    def _import(self, received: page.Page, transfer_id: str, pool: MappedPool | None) -> None:
        """In a thread, one page at a time."""
        header = received.header
        if pool is None or not header.blocks:
            where = page.verify(header, [received.payload], transfer_id, self._identity)
            self._sequence.kv.import_page(where, received.payload)
            return
        self._sequence.kv.copy_page(
            page.range_of(header),
            pool.rows,
            header.blocks,
            lambda pieces: page.verify(header, pieces, transfer_id, self._identity),
        )

    def _finish(self, result: prefill_pb2.PrefillResult | None) -> Transfer:
        if result is None:
            raise InvalidKvPage("the transfer ended without a result")
        if self._first_token_at is None:
            raise InvalidKvPage("the transfer ended without a first token")
        if (result.num_pages, result.num_bytes) != (self._num_pages, self._num_bytes):
            raise InvalidKvPage(
                f"{self._num_pages} pages of {self._num_bytes} bytes arrived, not the {result.num_pages} "
                f"of {result.num_bytes} that were sent"
            )
        if not self._sequence.kv.is_complete:
            raise InvalidKvPage("parts of the KV cache are missing")
        after_s = max(0.0, self._imported_at - self._first_token_at)
        return Transfer(self._num_pages, self._num_shared, self._num_bytes, after_s)
