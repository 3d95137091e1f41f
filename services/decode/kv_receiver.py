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

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.engine.interface import Sequence
from services.engine.request import ModelIdentity
from services.kv import codec, page
from services.kv.background import Background
from services.kv.service import PrefillClient
from services.worker import KvTraffic

_MOST_UNFINISHED = 4  # pages: enough that neither the wire nor the thread waits for the other


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one completed pull moved, and how long it took beyond the first token."""

    num_pages: int
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
        self._num_pages = 0
        self._num_bytes = 0

    async def pull(
        self, client: PrefillClient, request: prefill_pb2.PrefillRequest, timeout_s: float | None
    ) -> Transfer:
        """Runs the call to its end.

        Raises InvalidKvPage (damaged, missing or surplus pages) or AioRpcError (the worker's status).
        """
        request.transfer_id = secrets.token_hex(16)
        result: prefill_pb2.PrefillResult | None = None
        imports = Background(self._threads, self._changed.set)
        call = client.prefill(request, timeout=timeout_s)
        try:
            async for data in call:
                if result is not None:
                    raise InvalidKvPage("a message after the result")
                message = codec.decode_message(data)
                if isinstance(message, page.Page):
                    await self._until_unfinished(imports, _MOST_UNFINISHED - 1)
                    self._count(message)
                    imports.start(partial(self._import, message, request.transfer_id))
                    continue
                match message.WhichOneof("message"):
                    case "first_token":
                        self._take_first_token(message.first_token)
                    case "result":
                        result = message.result
                    case unknown:
                        raise InvalidKvPage(f"unknown prefill message {unknown!r}")
            await self._until_unfinished(imports, 0)
        finally:
            call.cancel()  # leaving the loop early cancels nothing by itself
            await imports.stop()
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

    def _count(self, received: page.Page) -> None:
        self._num_pages += 1
        self._num_bytes += len(received.payload)
        self._traffic.received += len(received.payload)

    def _import(self, received: page.Page, transfer_id: str) -> None:
        where = page.verify(received, transfer_id, self._identity.dtype)
        self._sequence.import_kv(*where, received.payload)

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
        if not self._sequence.kv_complete:
            raise InvalidKvPage("parts of the KV cache are missing")
        return Transfer(self._num_pages, self._num_bytes, time.monotonic() - self._first_token_at)
