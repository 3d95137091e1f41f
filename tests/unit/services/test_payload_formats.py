"""Pages narrower on the wire than in the cache: what arrives, what is refused, what goes as it is."""

import random
from collections.abc import Callable

import pytest
import torch

from baton.v1 import prefill_pb2
from services.engine.page_range import PageRange
from services.engine.request import SubmitMode
from services.kv import page
from services.kv.payload import PayloadFormat
from services.prefill.page_sealer import PageSealer
from services.wire import payload_format_from_proto, payload_format_to_proto
from tests.unit.engine.tiny_models import make_request
from tests.unit.services.recorded_transfer import MAX_PAGE_BYTES, PROMPT, TRANSFER, Messages, Pair
from tests.unit.services.test_damaged_data import record, serving
from tests.unit.services.test_damaged_transfers import flip, swap_tails, truncate

EXACT, FLOAT16, INT8 = PayloadFormat
NARROW = (FLOAT16, INT8)
Damage = Callable[[Messages, random.Random], Messages]


def pages(messages: Messages) -> list[prefill_pb2.KvPage]:
    parsed = [prefill_pb2.PrefillMessage.FromString(message) for message in messages]
    return [message.page for message in parsed if message.HasField("page")]


def relabel(messages: Messages, number: int, *, reseals: bool) -> Messages:
    """With another format in every page's header, by somebody who may know how checksums are made."""
    relabelled = []
    for message in messages:
        parsed = prefill_pb2.PrefillMessage.FromString(message)
        if parsed.HasField("page"):
            parsed.page.payload_format = number  # type: ignore[assignment]
            if reseals:
                parsed.page.checksum = page.checksum(parsed.page, [memoryview(parsed.page.payload)])
        relabelled.append(parsed.SerializeToString())
    return relabelled


@pytest.mark.parametrize("form", PayloadFormat)
async def test_a_cache_arrives_in_every_format(pair: Pair, form: PayloadFormat) -> None:
    messages, release = await pair.record(form)
    assert {page.payload_format for page in pages(messages)} == {payload_format_to_proto(form)}
    assert await pair.receive(messages, form)
    release()


@pytest.mark.parametrize("form", NARROW)
async def test_narrow_pages_go_on_data_connections_too(pair: Pair, form: PayloadFormat) -> None:
    messages, data, release = await record(pair, form)
    assert len(data) == sum(page.data_bytes for page in pages(messages))
    async with serving(data) as port:
        assert await pair.receive(messages, form, data_port=port)
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    async with serving(bytes(damaged)) as port:
        assert not await pair.receive(messages, form, data_port=port)
    release()


@pytest.mark.parametrize("form", NARROW)
async def test_shared_memory_is_the_cache_itself(pair: Pair, form: PayloadFormat) -> None:
    messages, release = await pair.record(form, is_shared=True)
    assert {page.payload_format for page in pages(messages)} == {prefill_pb2.PAYLOAD_FORMAT_EXACT}
    assert await pair.receive(messages, form, is_shared=True)
    lies = relabel(messages, payload_format_to_proto(form), reseals=True)
    assert not await pair.receive(lies, form, is_shared=True)
    release()


@pytest.mark.parametrize("asked", PayloadFormat)
@pytest.mark.parametrize("sent", PayloadFormat)
async def test_only_what_was_asked_for_is_taken_or_what_loses_nothing(
    pair: Pair, asked: PayloadFormat, sent: PayloadFormat
) -> None:
    messages, release = await pair.record(sent)
    assert await pair.receive(messages, asked) == (sent in (asked, EXACT))
    release()


@pytest.mark.parametrize("number", [0, 4, 2**31 - 1])
async def test_a_format_that_is_none_is_refused(pair: Pair, number: int) -> None:
    messages, release = await pair.record(INT8)
    assert not await pair.receive(relabel(messages, number, reseals=True), INT8)
    with pytest.raises(ValueError, match=f"{number} is no payload format"):
        payload_format_from_proto(number)
    release()


@pytest.mark.parametrize("reseals", [False, True])
@pytest.mark.parametrize("form", PayloadFormat)
async def test_a_page_relabelled_as_another_format_is_found(
    pair: Pair,
    form: PayloadFormat,
    reseals: bool,  # noqa: FBT001
) -> None:
    """By its checksum, or else by its size."""
    messages, release = await pair.record(form)
    for other in set(PayloadFormat) - {form}:
        relabelled = relabel(messages, payload_format_to_proto(other), reseals=reseals)
        assert not await pair.receive(relabelled, other)
    release()


@pytest.mark.parametrize("damage", [flip, truncate, swap_tails], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("form", NARROW)
async def test_damage_to_narrow_pages_is_an_error_or_nothing(
    pair: Pair, form: PayloadFormat, damage: Damage
) -> None:
    honest, release = await pair.record(form)
    outcomes = {
        await pair.receive(damage(honest, random.Random(seed)), form)  # raises if it is another cache
        for seed in range(10)
    }
    assert False in outcomes
    release()


async def test_numbers_that_float16_cannot_hold_go_as_they_are(pair: Pair) -> None:
    """In their page; the others are narrowed still."""
    sequence = pair.source.submit(make_request(PROMPT, 4), SubmitMode.PREFILL_ONLY)
    async for _ in sequence.events():
        pass
    pair.source.cache.layers[1].keys[pair.source.cache.slots(sequence.block_table, 3, 4)] = 1e6
    sealer = PageSealer(sequence.kv, pair.source.info.identity, TRANSFER, MAX_PAGE_BYTES, FLOAT16)
    whole = PageRange(0, pair.source.cache.layout.num_layers, 0, len(PROMPT))
    sealed = [sealer.seal(where) for where in sealer.split(whole)]
    forms = [page.payload_format for page in pages([each.message for each in sealed])]
    assert forms[0] == prefill_pb2.PAYLOAD_FORMAT_EXACT
    assert set(forms[1:]) == {prefill_pb2.PAYLOAD_FORMAT_FLOAT16}
    assert sealed[0].num_bytes == 2 * sealed[1].num_bytes
    first = torch.frombuffer(bytearray(pages([sealed[0].message])[0].payload), dtype=torch.float32)
    assert float(first.max()) == 1e6
    sequence.release()
