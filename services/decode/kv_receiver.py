"""Receives one sequence's KV cache: one Prefill call, verified page by page into reserved blocks.

Invariant: `pull` returns only when every layer of every context token has arrived, checked out and
been imported; anything else raises, and the caller decides who is asked next. The first token is
passed on the moment it arrives, ahead of the pages.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from services import kv_page
from services.engine.errors import InvalidKvPage
from services.engine.interface import Sequence
from services.engine.request import ModelIdentity
from services.worker import KvTraffic


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one completed pull moved, and how long it took beyond the first token."""

    num_pages: int
    num_bytes: int
    after_first_token_s: float  # first token in hand to last page verified


class KvReceiver:
    """One attempt at one prefill worker."""

    def __init__(
        self,
        sequence: Sequence,
        identity: ModelIdentity,
        traffic: KvTraffic,
        on_first_token: Callable[[prefill_pb2.FirstToken], None],
    ) -> None:
        self._sequence = sequence
        self._identity = identity
        self._traffic = traffic
        self._on_first_token = on_first_token
        self._first_token_at: float | None = None
        self._num_pages = 0
        self._num_bytes = 0

    async def pull(
        self,
        stub: "prefill_pb2_grpc.PrefillAsyncStub",
        request: prefill_pb2.PrefillRequest,
        timeout_s: float | None,
    ) -> Transfer:
        """Runs the call to its end.

        Raises InvalidKvPage (damaged, missing or surplus pages) or AioRpcError (the worker's status).
        """
        request.transfer_id = secrets.token_hex(16)
        result: prefill_pb2.PrefillResult | None = None
        call = stub.Prefill(request, timeout=timeout_s)
        try:
            async for message in call:
                if result is not None:
                    raise InvalidKvPage("a message after the result")
                match message.WhichOneof("message"):
                    case "first_token":
                        self._take_first_token(message.first_token)
                    case "page":
                        self._take_page(message.page, request.transfer_id)
                    case "result":
                        result = message.result
                    case unknown:
                        raise InvalidKvPage(f"unknown prefill message {unknown!r}")
        finally:
            call.cancel()  # leaving the loop early cancels nothing by itself
        return self._finish(result)

    def _take_first_token(self, message: prefill_pb2.FirstToken) -> None:
        if self._first_token_at is not None:
            raise InvalidKvPage("two first tokens in one transfer")
        self._first_token_at = time.monotonic()
        self._on_first_token(message)

    def _take_page(self, page: prefill_pb2.KvPage, transfer_id: str) -> None:
        where = kv_page.verify(page, transfer_id, self._identity.dtype)
        self._sequence.import_kv(
            where.layer_start, where.layer_end, where.token_start, where.token_end, memoryview(page.payload)
        )
        self._num_pages += 1
        self._num_bytes += len(page.payload)
        self._traffic.received += len(page.payload)

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
