"""Pages as bytes are what protobuf writes and reads; what is no message is a typed error, never a page."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.kv import codec
from services.kv.page import Page
from tests.unit.services.kv.test_page import WHERE, encode_page, sealed, verify

uint32 = st.integers(0, 2**32 - 1)
headers = st.builds(
    prefill_pb2.KvPage,
    transfer_id=st.text(),
    layer_start=uint32,
    layer_end=uint32,
    token_start=uint32,
    token_end=uint32,
    dtype=st.text(),
    checksum=st.integers(0, 2**64 - 1),
)


@given(headers, st.binary(max_size=1000))
def test_protobuf_reads_what_is_written(header: prefill_pb2.KvPage, payload: bytes) -> None:
    message = prefill_pb2.PrefillMessage.FromString(encode_page(header, memoryview(payload)))
    header.payload = payload
    assert message.page == header


@given(headers, st.binary(max_size=1000))
def test_what_protobuf_writes_is_read(header: prefill_pb2.KvPage, payload: bytes) -> None:
    header.payload = payload
    read = codec.decode_message(prefill_pb2.PrefillMessage(page=header).SerializeToString())
    assert isinstance(read, Page)
    assert bytes(read.payload) == payload
    header.ClearField("payload")
    assert read.header == header


def test_other_messages_pass_through() -> None:
    message = prefill_pb2.PrefillMessage(result=prefill_pb2.PrefillResult(num_pages=3))
    assert codec.decode_message(codec.encode(message)) == message


def test_fields_of_a_later_version_are_passed_over() -> None:
    header = prefill_pb2.KvPage(layer_end=7)
    unknown = (
        bytes([15 << 3 | 0, 0x96, 0x01]) + bytes([14 << 3 | 1]) + bytes(8) + bytes([13 << 3 | 2, 2, 1, 2])
    )
    fields = unknown + header.SerializeToString() + bytes([7 << 3 | 2, 3]) + b"abc" + unknown
    read = codec.decode_message(bytes([2 << 3 | 2, len(fields)]) + fields)
    assert isinstance(read, Page)
    assert (read.header.layer_end, bytes(read.payload)) == (7, b"abc")


def test_a_page_that_is_not_the_first_field_is_read_too() -> None:
    whole = bytes([15 << 3 | 0, 1]) + encode_page(*sealed())
    read = codec.decode_message(whole)
    assert isinstance(read, Page)
    assert verify(read) == WHERE


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_message_that_is_cut_off_is_an_error(cut: int) -> None:
    whole = encode_page(*sealed())
    with pytest.raises(InvalidKvPage):
        codec.decode_message(whole[:-cut])


def test_damage_anywhere_is_an_error_or_does_no_harm() -> None:
    """Every bit of a message, payload apart, and some of those."""
    honest = sealed()
    whole = encode_page(*honest)
    bits = [*range(8 * 120), *random.Random(7).sample(range(8 * 120, 8 * len(whole)), 200)]
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            read = codec.decode_message(bytes(damaged))
            assert isinstance(read, Page)
            where = verify(read)
        except (InvalidKvPage, AssertionError):
            continue
        assert where == WHERE, "another page verified"
        assert bytes(read.payload) == bytes(honest.payload)


@given(st.binary(max_size=300))
def test_noise_is_an_error_or_some_message_but_never_a_page_that_verifies(noise: bytes) -> None:
    for data in (noise, b"\x12" + bytes([len(noise) & 0x7F]) + noise[:127]):
        try:
            read = codec.decode_message(data)
        except InvalidKvPage:
            continue
        if isinstance(read, Page):
            with pytest.raises(InvalidKvPage):
                verify(read)
