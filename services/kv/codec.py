"""Messages of a transfer as bytes: a payload is written once on the way out, and not copied on the way in.

What is written is what protobuf would write, field for field, and any protobuf library reads it. But its
own Python classes copy a payload three times on either side, and make room for it anew each time: measured
on loopback at 1 MB a message, a third of the time of a transfer, and much more at larger ones.
"""

import ctypes
from typing import TypeVar

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.kv.page import Page

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_PAGE_TAG = bytes((prefill_pb2.PrefillMessage.PAGE_FIELD_NUMBER << 3 | _LENGTH,))
_PAYLOAD_TAG = bytes((prefill_pb2.KvPage.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH,))
_CHECKSUM_TAG = bytes((prefill_pb2.KvPage.CHECKSUM_FIELD_NUMBER << 3 | _FIXED64,))
_CHECKSUM_BYTES = 9  # with its tag
_MOST_VARINT_BYTES = 10

_make_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_make_bytes.restype, _make_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)

_Message = TypeVar("_Message", prefill_pb2.PrefillMessage, prefill_pb2.KvPage)


class PageMessage:
    """A PrefillMessage with a page in it, whose payload is written where it goes out from.

    Args:
        header: without checksum and payload.

    Attributes:
        payload: to be written, then `finish`; not to be touched any more after that.
    """

    def __init__(self, header: prefill_pb2.KvPage, num_bytes: int) -> None:
        fields = header.SerializeToString()
        payload_head = _PAYLOAD_TAG + _varint(num_bytes) if num_bytes else b""
        size = len(fields) + _CHECKSUM_BYTES + len(payload_head) + num_bytes
        head = b"".join((_PAGE_TAG, _varint(size), fields, _CHECKSUM_TAG))
        self._message, memory = _new_bytes(len(head) + 8 + len(payload_head) + num_bytes)
        self._checksum = memory[len(head) : len(head) + 8]
        self.payload = memory[len(memory) - num_bytes :]
        memory[: len(head)] = head
        memory[len(head) + 8 : len(memory) - num_bytes] = payload_head

    def finish(self, checksum: int) -> bytes:
        """The message. Nothing may be written to it from now on."""
        self._checksum[:] = checksum.to_bytes(8, "little")
        return self._message


def decode_message(data: bytes) -> Page | prefill_pb2.PrefillMessage:
    """The page in a message, its payload a view of `data`; or whatever else the message holds.

    Raises InvalidKvPage for what is no message.
    """
    if data[:1] != _PAGE_TAG:
        message = _parse(prefill_pb2.PrefillMessage, data)
        return Page(message.page, memoryview(message.page.payload)) if message.HasField("page") else message
    num_bytes, start = _read_varint(data, 1)
    if start + num_bytes != len(data):
        raise InvalidKvPage("a page's length is not its message's")
    payload, fields = memoryview(b""), []
    view, at = memoryview(data), start
    while at < len(data):
        field_start = at
        tag, at = _read_varint(data, at)
        at, content = _skip(data, at, tag & 7)
        if tag == _PAYLOAD_TAG[0]:
            payload = view[content:at]
        else:
            fields.append(view[field_start:at])
    return Page(_parse(prefill_pb2.KvPage, b"".join(fields)), payload)


def encode(message: prefill_pb2.PrefillMessage | bytes) -> bytes:
    """For the server, which is given pages that are encoded already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _parse(kind: type[_Message], data: bytes) -> _Message:
    try:
        return kind.FromString(data)
    except Exception as error:  # protobuf's DecodeError, whose place has moved between versions
        raise InvalidKvPage(f"no {kind.__name__}: {error}") from error


def _new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Bytes that nobody has seen yet, and their memory, to be filled before anybody does.

    CPython's interface allows that of what PyBytes_FromStringAndSize has just made without contents. Written
    any other way, a payload would be copied once more.
    """
    made: bytes = _make_bytes(None, size)
    return made, memoryview((ctypes.c_ubyte * size).from_address(_address_of(made))).cast("B")


def _varint(number: int) -> bytes:
    low, rest = [], number
    while rest > 0x7F:
        low.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*low, rest))


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    number = 0
    for count, byte in enumerate(data[at : at + _MOST_VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return number, at + count + 1
    raise InvalidKvPage("a number in a page's header has no end")


def _skip(data: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """Where a field's content ends, and where it begins."""
    content = at
    if wire_type == _VARINT:
        _, at = _read_varint(data, at)
    elif wire_type == _LENGTH:
        num_bytes, content = _read_varint(data, at)
        at = content + num_bytes
    elif wire_type in (_FIXED64, _FIXED32):
        at += 8 if wire_type == _FIXED64 else 4
    else:
        raise InvalidKvPage(f"a page's header has a field of unknown wire type {wire_type}")
    if at > len(data):
        raise InvalidKvPage("a page is cut off")
    return at, content
