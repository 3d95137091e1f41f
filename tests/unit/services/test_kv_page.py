"""A page that verifies holds exactly what was sealed, for exactly the ranges it names."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services import kv_page
from services.engine.errors import InvalidKvPage
from services.engine.request import ModelIdentity

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
WHERE = kv_page.PageRange(1, 3, 16, 19)


def sealed() -> kv_page.prefill_pb2.KvPage:
    kv = torch.arange(2 * 2 * 3 * 2 * 4, dtype=torch.float32).reshape(2, 2, 3, 2, 4)
    return kv_page.seal("t1", "float32", WHERE, kv)


def test_a_sealed_page_verifies_and_names_its_ranges() -> None:
    assert kv_page.verify(sealed(), "t1", "float32") == WHERE


@given(st.integers(0, 2 * 2 * 3 * 2 * 4 * 4 * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    page = sealed()
    damaged = bytearray(page.payload)
    damaged[bit // 8] ^= 1 << (bit % 8)
    page.payload = bytes(damaged)
    with pytest.raises(InvalidKvPage, match="checksum"):
        kv_page.verify(page, "t1", "float32")


@pytest.mark.parametrize("name", ["layer_start", "layer_end", "token_start", "token_end"])
def test_a_page_moved_elsewhere_is_found(name: str) -> None:
    page = sealed()
    setattr(page, name, getattr(page, name) + 1)
    with pytest.raises(InvalidKvPage, match="checksum"):
        kv_page.verify(page, "t1", "float32")


def test_a_truncated_page_is_found() -> None:
    page = sealed()
    page.payload = page.payload[:-4]
    with pytest.raises(InvalidKvPage, match="checksum"):
        kv_page.verify(page, "t1", "float32")


def test_a_page_of_another_transfer_or_dtype_is_refused() -> None:
    with pytest.raises(InvalidKvPage, match="transfer 't2'"):
        kv_page.verify(sealed(), "t2", "float32")
    with pytest.raises(InvalidKvPage, match="float16"):
        kv_page.verify(sealed(), "t1", "float16")


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 20_000))
def test_split_covers_every_layer_of_every_token_once(start: int, length: int, max_bytes: int) -> None:
    covered: dict[tuple[int, int], int] = {}
    unit = kv_page.bytes_per_token_layer(IDENTITY)
    for where in kv_page.split(IDENTITY, start, start + length, max_bytes):
        size = unit * (where.layer_end - where.layer_start) * (where.token_end - where.token_start)
        assert size <= max(max_bytes, unit)
        for layer in range(where.layer_start, where.layer_end):
            for token in range(where.token_start, where.token_end):
                covered[layer, token] = covered.get((layer, token), 0) + 1
    wanted = {(layer, token) for layer in range(5) for token in range(start, start + length)}
    assert set(covered) == wanted
    assert set(covered.values()) <= {1}


def test_bfloat16_round_trips() -> None:
    kv = torch.randn(2, 1, 2, 2, 4).to(torch.bfloat16)
    page = kv_page.seal("t", "bfloat16", kv_page.PageRange(0, 1, 0, 2), kv)
    kv_page.verify(page, "t", "bfloat16")
    back = torch.frombuffer(bytearray(page.payload), dtype=torch.bfloat16).reshape(kv.shape)
    assert torch.equal(back, kv)
