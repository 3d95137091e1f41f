"""A page that verifies holds exactly what was sealed, for exactly the ranges it names."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.v1.prefill_pb2 import KvPage
from services.engine.errors import InvalidKvPage
from services.engine.page_range import PageRange
from services.engine.request import ModelIdentity
from services.kv import codec, page
from services.kv.page import Page

IDENTITY = ModelIdentity(
    model="m",
    fingerprint="f",
    dtype="float32",
    num_layers=5,
    num_kv_heads=2,
    head_size=4,
    rope="",
    wire_version=1,
)
WHERE = PageRange(1, 3, 16, 19)


def sealed() -> Page:
    return seal(torch.arange(2 * 2 * 3 * 2 * 4, dtype=torch.float32), WHERE)


def seal(kv: torch.Tensor, where: PageRange, identity: ModelIdentity = IDENTITY) -> Page:
    """A page of these elements, as a sender makes it."""
    header = page.header_of("t1", identity, where)
    payload = memoryview(kv.view(torch.uint8).numpy().tobytes())
    header.checksum = page.checksum(header, [payload])
    return Page(header, payload)


def encode_page(header: KvPage, payload: memoryview) -> bytes:
    """A PrefillMessage with this page in it."""
    bare = KvPage()
    bare.CopyFrom(header)
    bare.ClearField("checksum")
    message = codec.PageMessage(bare, len(payload))
    message.payload[:] = payload
    return message.finish(header.checksum)


def verify(received: Page, transfer_id: str = "t1", identity: ModelIdentity = IDENTITY) -> PageRange:
    return page.verify(received.header, [received.payload], transfer_id, identity)


def test_a_sealed_page_verifies_and_names_its_ranges() -> None:
    assert verify(sealed()) == WHERE


@given(st.integers(0, 2 * 2 * 3 * 2 * 4 * 4 * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    header, payload = sealed()
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(InvalidKvPage, match="checksum"):
        verify(Page(header, memoryview(damaged)))


@pytest.mark.parametrize("name", ["layer_start", "layer_end", "token_start", "token_end"])
def test_a_page_moved_elsewhere_is_found(name: str) -> None:
    moved = sealed()
    setattr(moved.header, name, getattr(moved.header, name) + 1)
    with pytest.raises(InvalidKvPage, match="checksum"):
        verify(moved)


def test_a_truncated_page_is_found() -> None:
    header, payload = sealed()
    with pytest.raises(InvalidKvPage, match="checksum"):
        verify(Page(header, payload[:-4]))


def test_a_page_of_another_transfer_or_dtype_is_refused() -> None:
    with pytest.raises(InvalidKvPage, match="transfer 't2'"):
        verify(sealed(), "t2")
    with pytest.raises(InvalidKvPage, match="float16"):
        verify(sealed(), identity=replace(IDENTITY, dtype="float16"))


@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 50), st.integers(0, 200), st.integers(1, 20_000))
def test_split_covers_every_layer_of_every_token_once(
    layer: int, num_layers: int, start: int, length: int, max_bytes: int
) -> None:
    whole = PageRange(layer, min(5, layer + num_layers), start, start + length)
    covered: dict[tuple[int, int], int] = {}
    unit = page.bytes_per_token_layer(IDENTITY)
    for where in page.split(IDENTITY, whole, max_bytes):
        size = unit * (where.layer_end - where.layer_start) * (where.token_end - where.token_start)
        assert size <= max(max_bytes, unit)
        for place in range(where.layer_start, where.layer_end):
            for token in range(where.token_start, where.token_end):
                covered[place, token] = covered.get((place, token), 0) + 1
    layers, tokens = range(whole.layer_start, whole.layer_end), range(start, start + length)
    assert set(covered) == {(place, token) for place in layers for token in tokens}
    assert set(covered.values()) <= {1}


def test_bfloat16_round_trips() -> None:
    identity = replace(IDENTITY, dtype="bfloat16")
    kv = torch.randn(1 * 2 * 2 * 2 * 4).to(torch.bfloat16)
    sealed = seal(kv, PageRange(0, 1, 0, 2), identity)
    verify(sealed, identity=identity)
    assert torch.equal(page.tensor_over(sealed.payload, identity), kv)


@given(st.lists(st.integers(0, 96), max_size=5))
def test_a_payload_in_pieces_has_the_checksum_of_the_whole(cuts: list[int]) -> None:
    header, payload = sealed()
    edges = [0, *sorted(cuts), len(payload)]
    pieces = [payload[start:end] for start, end in pairwise(edges)]
    assert page.checksum(header, pieces) == header.checksum
