"""One page of KV cache on the wire: laid out, sealed and checked.

Invariant: a page that passes `verify` holds exactly the bytes that its `checksum` was taken of, for exactly
the layers, tokens and transfer that its header names. The checksum (XXH3, 64 bits) therefore covers header
and payload; it guards against faults, not against forgery.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import xxhash

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.engine.kv_cache import DTYPES
from services.engine.page_range import PageRange
from services.engine.request import ModelIdentity
from services.kv import payload
from services.kv.payload import PayloadFormat
from services.wire import payload_format_from_proto, payload_format_to_proto


class Page(NamedTuple):
    """A page apart from its bytes, which nobody should copy without need.

    Attributes:
        header: the message without its payload.
        payload: C-order (layers, 2, tokens, kv_heads, head_size), keys before values, in the header's format.
    """

    header: prefill_pb2.KvPage
    payload: memoryview


def bytes_per_token_layer(identity: ModelIdentity) -> int:
    """Keys and values of one token in one layer: 2 x kv heads x head size x element bytes."""
    return 2 * identity.num_kv_heads * identity.head_size * DTYPES[identity.dtype].itemsize


def dtype_of(identity: ModelIdentity) -> torch.dtype:
    """Of the elements of the identity's cache."""
    return DTYPES[identity.dtype]


def tensor_over(exact: memoryview, identity: ModelIdentity) -> torch.Tensor:
    """The elements of an exact payload, (elements,), in its memory."""
    return torch.frombuffer(exact, dtype=DTYPES[identity.dtype])


def shape_of(identity: ModelIdentity, where: PageRange) -> tuple[int, int, int, int, int]:
    """(layers, 2, tokens, kv_heads, head_size)"""
    return (where.num_layers, 2, where.num_tokens, identity.num_kv_heads, identity.head_size)


def num_bytes(identity: ModelIdentity, where: PageRange, form: PayloadFormat = PayloadFormat.EXACT) -> int:
    """Size of the payload of a page."""
    return payload.num_bytes(form, shape_of(identity, where), dtype_of(identity))


def widen(received: memoryview, form: PayloadFormat, identity: ModelIdentity, where: PageRange) -> memoryview:
    """The page as the cache has it, from a payload that has been verified. Raises InvalidKvPage."""
    if form is PayloadFormat.EXACT:
        return received
    widened = payload.widen(received, form, shape_of(identity, where), dtype_of(identity))
    exact: memoryview = widened.view(-1).view(torch.uint8).numpy().data
    return exact


def split(identity: ModelIdentity, where: PageRange, max_bytes: int) -> Iterator[PageRange]:
    """Cuts a range into pages of at most `max_bytes` of the cache, all of its layers together where they fit.

    A page never goes below one token in one layer, whatever the bound.
    """
    unit = bytes_per_token_layer(identity)
    layers = min(where.num_layers, max(1, max_bytes // unit))
    tokens = max(1, max_bytes // (unit * layers))
    for start in range(where.token_start, where.token_end, tokens):
        for layer in range(where.layer_start, where.layer_end, layers):
            yield PageRange(
                layer, min(layer + layers, where.layer_end), start, min(start + tokens, where.token_end)
            )


def header_of(
    transfer_id: str, identity: ModelIdentity, where: PageRange, form: PayloadFormat = PayloadFormat.EXACT
) -> prefill_pb2.KvPage:
    """Without a checksum yet."""
    return prefill_pb2.KvPage(
        transfer_id=transfer_id,
        layer_start=where.layer_start,
        layer_end=where.layer_end,
        token_start=where.token_start,
        token_end=where.token_end,
        dtype=identity.dtype,
        payload_format=payload_format_to_proto(form),
    )


def format_of(header: prefill_pb2.KvPage) -> PayloadFormat:
    """As it says, checked or not. Raises InvalidKvPage for none that is known."""
    try:
        return payload_format_from_proto(header.payload_format)
    except ValueError as error:
        raise InvalidKvPage(str(error)) from error


def verify(
    header: prefill_pb2.KvPage, pieces: Iterable[memoryview], transfer_id: str, identity: ModelIdentity
) -> PageRange:
    """Checks a received page; returns its ranges. Raises InvalidKvPage saying what is wrong."""
    if header.transfer_id != transfer_id:
        raise InvalidKvPage(f"page of transfer {header.transfer_id!r} in transfer {transfer_id!r}")
    if header.dtype != identity.dtype:
        raise InvalidKvPage(f"page holds {header.dtype!r}, the cache {identity.dtype!r}")
    if header.checksum != checksum(header, pieces):
        raise InvalidKvPage(f"checksum does not match ({range_of(header)})")
    return range_of(header)


def range_of(header: prefill_pb2.KvPage) -> PageRange:
    """As it says, checked or not."""
    return PageRange(header.layer_start, header.layer_end, header.token_start, header.token_end)


def checksum(header: prefill_pb2.KvPage, pieces: Iterable[memoryview]) -> int:
    """Of the header's ranges, transfer, dtype and format, and of the payload, in however many pieces."""
    ranges = struct.pack("<4I", header.layer_start, header.layer_end, header.token_start, header.token_end)
    digest = xxhash.xxh3_64(ranges + struct.pack("<I", header.payload_format))
    digest.update(f"{header.transfer_id}\0{header.dtype}\0".encode())
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()
