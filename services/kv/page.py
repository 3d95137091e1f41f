"""One page of KV cache on the wire: laid out, sealed and checked.

Invariant: a page that passes `verify` holds exactly the bytes that `seal` saw, for exactly the
layers, tokens and transfer that its header names. The checksum (XXH3, 64 bits) therefore covers
header and payload; it guards against faults, not against forgery.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
import xxhash

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.engine.request import ModelIdentity

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class PageRange(NamedTuple):
    """Layers and context positions of one page, ends exclusive."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int


class Page(NamedTuple):
    """A page apart from its bytes, which nobody should copy without need.

    Attributes:
        header: the message without its payload.
        payload: C-order (layers, 2, tokens, kv_heads, head_size), keys before values.
    """

    header: prefill_pb2.KvPage
    payload: memoryview


def bytes_per_token_layer(identity: ModelIdentity) -> int:
    """Keys and values of one token in one layer: 2 x kv heads x head size x element bytes."""
    return 2 * identity.num_kv_heads * identity.head_size * _DTYPES[identity.dtype].itemsize


def dtype_of(identity: ModelIdentity) -> torch.dtype:
    """Of the elements of the identity's cache."""
    return _DTYPES[identity.dtype]


def scratch(identity: ModelIdentity, max_bytes: int) -> torch.Tensor:
    """Room for one page, (elements,)."""
    num_bytes = max(max_bytes, bytes_per_token_layer(identity))
    dtype = _DTYPES[identity.dtype]
    return torch.empty(num_bytes // dtype.itemsize, dtype=dtype)


def num_bytes(identity: ModelIdentity, where: PageRange) -> int:
    """Size of the payload of a page."""
    layers, tokens = where.layer_end - where.layer_start, where.token_end - where.token_start
    return bytes_per_token_layer(identity) * layers * tokens


def split(identity: ModelIdentity, where: PageRange, max_bytes: int) -> Iterator[PageRange]:
    """Cuts a range into pages of at most `max_bytes`, all of its layers together where they fit.

    A page never goes below one token in one layer, whatever the bound.
    """
    unit = bytes_per_token_layer(identity)
    layers = min(where.layer_end - where.layer_start, max(1, max_bytes // unit))
    tokens = max(1, max_bytes // (unit * layers))
    for start in range(where.token_start, where.token_end, tokens):
        for layer in range(where.layer_start, where.layer_end, layers):
            yield PageRange(
                layer, min(layer + layers, where.layer_end), start, min(start + tokens, where.token_end)
            )


def seal(transfer_id: str, dtype: str, where: PageRange, kv: torch.Tensor) -> Page:
    """A page over the memory of a contiguous (layers, 2, tokens, kv_heads, head_size) CPU tensor."""
    payload = payload_of(kv)
    header = prefill_pb2.KvPage(
        transfer_id=transfer_id,
        layer_start=where.layer_start,
        layer_end=where.layer_end,
        token_start=where.token_start,
        token_end=where.token_end,
        dtype=dtype,
    )
    header.checksum = _checksum(header, payload)
    return Page(header, payload)


def verify(page: Page, transfer_id: str, dtype: str) -> PageRange:
    """Checks a received page; returns its ranges. Raises InvalidKvPage saying what is wrong."""
    header = page.header
    if header.transfer_id != transfer_id:
        raise InvalidKvPage(f"page of transfer {header.transfer_id!r} in transfer {transfer_id!r}")
    if header.dtype != dtype:
        raise InvalidKvPage(f"page holds {header.dtype!r}, the cache {dtype!r}")
    if header.checksum != _checksum(header, page.payload):
        raise InvalidKvPage(
            f"checksum does not match (layers {header.layer_start}-{header.layer_end}, "
            f"tokens {header.token_start}-{header.token_end})"
        )
    return range_of(header)


def range_of(header: prefill_pb2.KvPage) -> PageRange:
    """As it says, checked or not."""
    return PageRange(header.layer_start, header.layer_end, header.token_start, header.token_end)


def payload_of(kv: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, as bytes."""
    return kv.view(torch.uint8).numpy().data.cast("B")


def _checksum(header: prefill_pb2.KvPage, payload: memoryview) -> int:
    ranges = struct.pack("<4I", header.layer_start, header.layer_end, header.token_start, header.token_end)
    digest = xxhash.xxh3_64(ranges)
    digest.update(f"{header.transfer_id}\0{header.dtype}\0".encode())
    digest.update(payload)
    return digest.intdigest()
