"""The receiving end: an engine's pool in this process, filled by the code that a decode worker runs."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from bench.errors import BenchFailed
from services.decode.kv_receiver import KvReceiver, Transfer
from services.engine.config import EngineConfig
from services.engine.errors import InvalidKvPage
from services.engine.page_range import PageRange
from services.engine.request import EngineRequest, ModelIdentity, SampledToken, SamplingParams, SubmitMode
from services.engine.sim import SimEngine
from services.engine.sim_model import write_sim_model
from services.kv import page
from services.kv.payload import PayloadFormat
from services.kv.resources import KvResources
from services.kv.service import PrefillClient
from services.rpc.channel import create_channel
from services.settings import KvTransport
from services.wire import identity_from_proto, identity_to_proto

_DEADLINE_S = 300.0
_MOST_BEFORE_CONNECTION = 8  # pages


@dataclass(frozen=True, slots=True)
class Pull:
    """One cache that was handed over.

    Attributes:
        seconds: request sent to last page verified.
        after_first_token_s: first token in hand to last page verified.
    """

    seconds: float
    after_first_token_s: float
    num_bytes: int
    num_pages: int


def write_model(folder: Path, identity: ModelIdentity) -> None:
    """A simulated model whose KV cache has the same shape."""
    write_sim_model(folder)
    path = folder / "config.json"
    shape = {
        "num_hidden_layers": identity.num_layers,
        "num_key_value_heads": identity.num_kv_heads,
        "head_dim": identity.head_size,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | shape))


class Puller:
    """Takes caches from one prefill worker."""

    def __init__(
        self, engine: SimEngine, identity: ModelIdentity, client: PrefillClient, page_bytes: int
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._client = client
        self._page_bytes = page_bytes
        self._resources = KvResources()
        self._transport = KvTransport.GRPC
        self._form = PayloadFormat.EXACT

    async def pull(self, prompt: Sequence[int], salt: str) -> Pull:
        """Hands one prompt's cache over; another salt finds nothing in the worker's prefix cache."""
        sampling = SamplingParams(max_tokens=2)
        request = EngineRequest(
            request_id="bench/0", prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt
        )
        sequence = self._engine.submit(request, SubmitMode.HANDOFF)
        try:
            await sequence.reserved()
            receiver = KvReceiver(
                self._client,
                sequence,
                self._identity,
                self._resources,
                lambda message: sequence.accept_first_token(SampledToken(message.token.token_id % 200)),
                self._form,
            )
            asked = prefill_pb2.PrefillRequest(
                identity=identity_to_proto(self._identity),
                prompt_token_ids=prompt,
                sampling=common_pb2.SamplingParams(max_tokens=2),
                max_page_bytes=self._page_bytes,
                cache_salt=salt,
            )
            began = time.perf_counter()
            transfer = await receiver.pull(asked, _DEADLINE_S)
            seconds = time.perf_counter() - began
        except InvalidKvPage as error:
            raise BenchFailed(f"a page did not arrive as it should: {error}") from error
        finally:
            sequence.release()
        if not self._has_gone_as_told(transfer, len(prompt)):
            raise BenchFailed(f"pages did not go the way that was to be measured: {transfer}")
        return Pull(seconds, transfer.after_first_token_s, transfer.pages.num_bytes, transfer.pages.num_pages)

    def _has_gone_as_told(self, transfer: Transfer, num_tokens: int) -> bool:
        pages = transfer.pages
        whole = PageRange(0, self._identity.num_layers, 0, num_tokens)
        if pages.num_bytes != page.num_bytes(self._identity, whole, self._form):
            return False
        others = pages.num_pages - pages.num_shared_pages - pages.num_data_pages
        match self._transport:
            case KvTransport.AUTO:
                return pages.num_shared_pages == pages.num_pages
            case KvTransport.TCP:  # the first ones do not wait for the connection
                return pages.num_data_pages > 0 and others <= _MOST_BEFORE_CONNECTION
            case KvTransport.GRPC:
                return others == pages.num_pages

    async def use(self, transport: KvTransport, form: PayloadFormat = PayloadFormat.EXACT) -> None:
        """Pages come this way from now on. Raises BenchFailed if they cannot."""
        shortcuts = self._client.shortcuts
        await shortcuts.learn(self._identity, transport)
        if transport is KvTransport.AUTO and shortcuts.pool is None:
            raise BenchFailed("the worker's KV pool cannot be mapped here")
        if transport is KvTransport.TCP and shortcuts.data_address is None:
            raise BenchFailed("the worker has no port for data connections")
        self._transport = transport
        self._form = form


async def identity_of(address: str) -> ModelIdentity:
    """Of the worker at this address."""
    async with create_channel(address) as channel:
        info = await prefill_pb2_grpc.PrefillStub(channel).GetInfo(
            common_pb2.GetInfoRequest(), wait_for_ready=True, timeout=60
        )
    return identity_from_proto(info.identity)


@asynccontextmanager
async def connected(address: str, page_bytes: int, most_tokens: int) -> AsyncIterator[Puller]:
    """A puller from the worker at this address, with a pool of its own for `most_tokens`."""
    identity = await identity_of(address)
    channel = create_channel(address)
    with TemporaryDirectory(prefix="baton-bench-") as folder:
        write_model(Path(folder), identity)
        engine = SimEngine(
            EngineConfig(
                model=Path(folder),
                model_name="bench",
                kv_memory_bytes=_pool_bytes(identity, most_tokens),
                prefix_cache=False,
            )
        )
    await engine.start()
    try:
        yield Puller(engine, identity, PrefillClient(channel, address), page_bytes)
    finally:
        await engine.close()
        await channel.close()


def _pool_bytes(identity: ModelIdentity, num_tokens: int) -> int:
    """Twice what one cache takes: reservations get half of a pool."""
    return 2 * (num_tokens + 64) * identity.num_layers * 2 * identity.num_kv_heads * identity.head_size * 4
