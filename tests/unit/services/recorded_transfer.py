"""Transfers between two simulated engines, recorded as messages (and bytes), and received from a record.

The simulated engine's keys and values follow from token, position and layer, and it compares them at the
join, so a cache that is wrong anywhere does not go unnoticed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from baton.v1 import prefill_pb2
from services.decode.kv_receiver import KvReceiver
from services.engine.errors import InvalidKvPage
from services.engine.request import SampledToken, SubmitMode
from services.engine.sim import SimEngine
from services.kv.data_server import DataStream
from services.kv.mapped_pool import map_pool
from services.kv.payload import PayloadFormat
from services.kv.resources import KvResources
from services.kv.service import PrefillCall, PrefillClient
from services.kv.shortcuts import Shortcuts
from services.prefill.kv_sender import KvSender
from services.prefill.page_sealer import PageSealer
from services.rpc.channel import create_channel
from services.wire import info_to_proto
from tests.unit.engine.tiny_models import make_request

PROMPT = [number * 7 % 200 + 5 for number in range(150)]
MAX_PAGE_BYTES = 4096  # 32 tokens of both layers
TRANSFER = "0" * 32
Messages = list[bytes]


class _Call:
    """Messages that have been recorded, as a call in progress."""

    def __init__(self, messages: Messages, *, ends: bool) -> None:
        self._messages = messages
        self._ends = ends

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[bytes]:
        for message in self._messages:
            yield message
        if not self._ends:
            await asyncio.Event().wait()

    def cancel(self) -> bool:
        return True


class _Shortcuts(Shortcuts):
    """Known from the beginning."""

    def __init__(self, data_port: int) -> None:
        super().__init__(create_channel("127.0.0.1:1"), "127.0.0.1")
        self._data_port = data_port


class _Client(PrefillClient):
    def __init__(self, messages: Messages, *, ends: bool) -> None:
        super().__init__(create_channel("127.0.0.1:1"), "127.0.0.1:1")
        self._messages = messages
        self._ends = ends
        self.released: list[str] = []

    def prefill(self, request: prefill_pb2.PrefillRequest, timeout: float | None) -> PrefillCall:
        return _Call(self._messages, ends=self._ends)

    async def release(self, transfer_id: str) -> None:
        self.released.append(transfer_id)


@dataclass(slots=True)
class Pair:
    """Two engines, and what one sends the other of a prompt."""

    source: SimEngine
    target: SimEngine
    resources: KvResources = field(default_factory=KvResources)

    async def record(
        self,
        form: PayloadFormat = PayloadFormat.EXACT,
        *,
        is_shared: bool = False,
        data: DataStream | None = None,
        max_page_bytes: int = MAX_PAGE_BYTES,
    ) -> tuple[Messages, Callable[[], None]]:
        """The honest messages, and what ends the transfer at the source."""
        sequence = self.source.submit(make_request(PROMPT, 4), SubmitMode.PREFILL_ONLY)
        identity = self.source.info.identity
        sealer = PageSealer(
            sequence.kv, identity, TRANSFER, max_page_bytes, form, is_shared=is_shared, data=data
        )
        sender = KvSender(sequence, sealer, self.resources, data=data)
        messages = [
            message if isinstance(message, bytes) else message.SerializeToString()
            async for message in sender.messages()
        ]
        return messages, sequence.release

    async def receive(
        self,
        messages: Messages,
        form: PayloadFormat = PayloadFormat.EXACT,
        *,
        is_shared: bool = False,
        ends: bool = True,
        data_port: int = 0,
    ) -> bool:
        """Whether the transfer was taken for whole; joins then, which looks at every number.

        Args:
            data_port: where bytes that messages name come from. Raises DataConnectionLost if they do not.
        """
        self.resources.traffic.received = 0
        sequence = self.target.submit(make_request(PROMPT, 4), SubmitMode.HANDOFF)
        try:
            await sequence.reserved()
            client = _Client(messages, ends=ends)
            client.shortcuts = _Shortcuts(data_port)
            if is_shared:
                info = info_to_proto(self.source.info, 1, "source", runs_prompts=True)
                client.shortcuts.pool = map_pool(info, self.source.info.identity)
                assert client.shortcuts.pool is not None
            receiver = KvReceiver(
                client,
                sequence,
                self.target.info.identity,
                self.resources,
                lambda message: sequence.accept_first_token(SampledToken(message.token.token_id)),
                form,
            )
            request = prefill_pb2.PrefillRequest(max_page_bytes=MAX_PAGE_BYTES)
            try:
                await receiver.pull(request, None)
            except InvalidKvPage:
                return False
            assert client.released == ([TRANSFER] if is_shared else [])
            sequence.join()
            return True
        finally:
            sequence.release()
            received = self.resources.traffic.received
            assert 0 <= received <= 2 * len(PROMPT) * 128, "a load report could not say that"
