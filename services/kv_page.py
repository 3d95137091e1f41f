"""One page of KV cache on the wire: laid out, sealed and checked.

Invariant: a page that passes `verify` holds exactly the bytes that `seal` saw, for exactly the
layers, tokens and transfer that its header names. The checksum (XXH3, 64 bits) therefore covers
header and payload; it guards against faults, not against forgery.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.engine.request import ModelIdentity

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PageRange:
    """Layers and context positions of one page, ends exclusive."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int


def bytes_per_token_layer(identity: ModelIdentity) -> int:
    """Keys and values of one token in one layer: 2 x kv heads x head size x element bytes."""
    return 2 * identity.num_kv_heads * identity.head_size * _ELEMENT_BYTES[identity.dtype]


def split(identity: ModelIdentity, token_start: int, token_end: int, max_bytes: int) -> Iterator[PageRange]:
    """Cuts a token range into pages of at most `max_bytes`, all layers together where they fit.

    A page never goes below one token in one layer, whatever the bound.
    """
    unit = bytes_per_token_layer(identity)
    layers = min(identity.num_layers, max(1, max_bytes // unit))
    tokens = max(1, max_bytes // (unit * layers))
    for start in range(token_start, token_end, tokens):
        for layer in range(0, identity.num_layers, layers):
            yield PageRange(
                layer, min(layer + layers, identity.num_layers), start, min(start + tokens, token_end)
            )


def seal(transfer_id: str, dtype: str, where: PageRange, kv: torch.Tensor) -> prefill_pb2.KvPage:
    """Builds the message from a contiguous (2, layers, tokens, kv_heads, head_size) CPU tensor."""
    page = prefill_pb2.KvPage(
        transfer_id=transfer_id,
        layer_start=where.layer_start,
        layer_end=where.layer_end,
        token_start=where.token_start,
        token_end=where.token_end,
        dtype=dtype,
        payload=kv.view(torch.uint8).numpy().tobytes(),
    )
    page.checksum = _checksum(page)
    return page


def verify(page: prefill_pb2.KvPage, transfer_id: str, dtype: str) -> PageRange:
    """Checks a received page; returns its ranges. Raises InvalidKvPage saying what is wrong."""
    if page.transfer_id != transfer_id:
        raise InvalidKvPage(f"page of transfer {page.transfer_id!r} in transfer {transfer_id!r}")
    if page.dtype != dtype:
        raise InvalidKvPage(f"page holds {page.dtype!r}, the cache {dtype!r}")
    if page.checksum != _checksum(page):
        raise InvalidKvPage(
            f"checksum does not match (layers {page.layer_start}-{page.layer_end}, "
            f"tokens {page.token_start}-{page.token_end})"
        )
    return PageRange(page.layer_start, page.layer_end, page.token_start, page.token_end)


def _checksum(page: prefill_pb2.KvPage) -> int:
    header = struct.pack("<4I", page.layer_start, page.layer_end, page.token_start, page.token_end)
    digest = xxhash.xxh3_64(header)
    digest.update(f"{page.transfer_id}\0{page.dtype}\0".encode())
    digest.update(page.payload)
    return digest.intdigest()
