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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from grpc import aio

from baton.v1 import prefill_pb2
from services.decode.data_reader import DataReader
from services.engine.errors import InvalidKvPage
from services.engine.interface import Sequence
from services.engine.request import ModelIdentity
from services.kv import codec, page
from services.kv.background import Background
from services.kv.data_connection import DataConnection
from services.kv.mapped_pool import MappedPool
from services.kv.resources import KvResources
from services.kv.service import PrefillClient
from services.rpc.channel import DEFAULT_PINGS, Pings
from services.rpc.status import DataConnectionLost, reason_of

log = structlog.get_logger()

_END_S = 1.0
_MOST_UNFINISHED = 4  # pages: enough that neither the wire nor the thread waits for the other


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one completed pull moved, and how long it took beyond the first token."""

    num_pages: int
    num_shared_pages: int  # of these, read out of the prefill worker's memory
    num_data_pages: int  # of these, read off a data connection
    num_bytes: int
    after_first_token_s: float  # first token in hand to last page verified


class KvReceiver:
    """One attempt at one prefill worker.

    Args:
        pings: when a data connection that says nothing counts as broken.
    """

    def __init__(
        self,
        sequence: Sequence,
        identity: ModelIdentity,
        resources: KvResources,
        on_first_token: Callable[[prefill_pb2.FirstToken], None],
        pings: Pings = DEFAULT_PINGS,
    ) -> None:
        self._sequence = sequence
        self._identity = identity
        self._resources = resources
        self._on_first_token = on_first_token
        self._pings = pings
        self._changed = asyncio.Event()
        self._imports = Background(resources.threads, self._changed.set)
        self._transfer_id = secrets.token_hex(16)
        self._pool: MappedPool | None = None
        self._data: DataReader | None = None
        self._first_token_at: float | None = None
        self._imported_at = 0.0
        self._num_pages = 0
        self._num_bytes = 0
        self._num_shared = 0  # pages
        self._num_data = 0  # pages

    async def pull(
        self, client: PrefillClient, request: prefill_pb2.PrefillRequest, timeout_s: float | None
    ) -> Transfer:
        """Runs the call to its end; once.

        Raises InvalidKvPage (damaged, missing or surplus pages), AioRpcError (the worker's status) or
        DataConnectionLost.
        """
        request.transfer_id = self._transfer_id
        if (pool := client.shortcuts.pool) is not None:
            self._pool, request.shared_pool = pool, pool.pool_id
        call = client.prefill(request, timeout=timeout_s)
        result: prefill_pb2.PrefillResult | None = None
        try:
            async with asyncio.timeout(None) as bound:
                if pool is None:
                    self._open_data(client, request.max_page_bytes, bound)
                async for data in call:
                    if result is not None:
                        raise InvalidKvPage("a message after the result")
                    message = codec.decode_message(data)
                    if isinstance(message, page.Page):
                        await self._take_page(message)
                        continue
                    match message.WhichOneof("message"):
                        case "first_token":
                            self._take_first_token(message.first_token)
                        case "result":
                            result = message.result
                            await self._until_imported()
                            if self._num_shared:
                                await client.release(self._transfer_id)
                            # All is here: whoever does not end the call is not waited for.
                            bound.reschedule(asyncio.get_running_loop().time() + _END_S)
                        case unknown:
                            raise InvalidKvPage(f"unknown prefill message {unknown!r}")
        except TimeoutError:
            if self._data is not None and (lost := self._data.lost) is not None:
                raise lost from None  # also after the result: bytes may still have been on their way
            log.warning("prefill did not end a call whose result it has sent", transfer=self._transfer_id)
        except aio.AioRpcError as error:
            if reason_of(error) == DataConnectionLost.__name__:
                raise DataConnectionLost(f"prefill says: {error.details()}") from error
            raise
        finally:
            call.cancel()  # leaving the loop early cancels nothing by itself
            await self._stop(client)
        return self._finish(result)

    def _open_data(self, client: PrefillClient, most_bytes: int, bound: asyncio.Timeout) -> None:
        if (address := client.shortcuts.data_address) is None:
            return

        def end_pull() -> None:
            with suppress(RuntimeError):  # it has ended by itself
                bound.reschedule(asyncio.get_running_loop().time())

        self._data = DataReader(
            partial(DataConnection.open, *address, self._transfer_id, self._pings),
            self._resources.staging,
            max(most_bytes, page.bytes_per_token_layer(self._identity)),
            self._take_data_page,
            end_pull,
        )

    async def _stop(self, client: PrefillClient) -> None:
        """Nobody writes to the sequence's blocks from then on."""
        if self._data is not None:
            await self._data.close()
            if isinstance(self._data.failure, DataConnectionLost):
                client.shortcuts.leave_data()
        await self._imports.stop()
        if self._pool is not None and self._num_pages and not self._num_shared:
            client.shortcuts.forget()  # another process answers at this address

    async def _take_page(self, received: page.Page) -> None:
        self._count(received)
        if received.header.data_bytes:
            return  # `_take_data_page` is called with it
        await self._until_unfinished(_MOST_UNFINISHED - 1)
        self._imports.start(partial(self._import, received))

    async def _take_data_page(
        self, header: prefill_pb2.KvPage, payload: memoryview, on_read: Callable[[], None]
    ) -> None:
        def job() -> None:
            self._import(page.Page(header, payload))
            on_read()

        await self._until_unfinished(_MOST_UNFINISHED - 1)
        self._imports.start(job)

    async def _until_imported(self) -> None:
        """Waits until all that was named has been written to blocks. Raises what an import has raised."""
        if self._data is not None:
            await self._data.drained()
        await self._until_unfinished(0)
        self._imported_at = time.monotonic()

    def _take_first_token(self, message: prefill_pb2.FirstToken) -> None:
        if self._first_token_at is not None:
            raise InvalidKvPage("two first tokens in one transfer")
        self._first_token_at = time.monotonic()
        self._on_first_token(message)

    async def _until_unfinished(self, most: int) -> None:
        """Waits until no more imports than that are unfinished. Raises what one has raised."""
        imports = self._imports
        while imports.num_unfinished > most:
            self._changed.clear()
            imports.check()
            if imports.num_unfinished > most:
                await self._changed.wait()
        imports.check()

    def _count(self, received: page.Page) -> None:
        """Raises InvalidKvPage for what cannot be a page elsewhere, before its numbers are used."""
        header, num_bytes = received.header, len(received.payload)
        if bool(num_bytes) + bool(header.blocks) + bool(header.data_bytes) > 1:
            raise InvalidKvPage("a page that is said to be in several places")
        if header.blocks:
            if self._pool is None:
                raise InvalidKvPage("a page in shared memory, which was not asked for")
            where = page.range_of(header)
            self._pool.check(where, header.blocks)
            num_bytes = page.num_bytes(self._identity, where)
            self._num_shared += 1
        elif header.data_bytes:
            if self._data is None:
                raise InvalidKvPage("a page on a data connection, of which there is none")
            self._data.name(header)
            num_bytes = header.data_bytes
            self._num_data += 1
        self._num_pages += 1
        self._num_bytes += num_bytes
        self._resources.traffic.received += num_bytes

    def _import(self, received: page.Page) -> None:
        """In a thread, one page at a time."""
        header, pool = received.header, self._pool
        if pool is None or not header.blocks:
            where = page.verify(header, [received.payload], self._transfer_id, self._identity)
            self._sequence.kv.import_page(where, received.payload)
            return
        self._sequence.kv.copy_page(
            page.range_of(header),
            pool.rows,
            header.blocks,
            lambda pieces: page.verify(header, pieces, self._transfer_id, self._identity),
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
        return Transfer(self._num_pages, self._num_shared, self._num_data, self._num_bytes, after_s)
