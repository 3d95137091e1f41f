"""Payloads narrower than the cache: float16 or int8 on the wire, the cache's dtype at both ends.

A page has any shape that ends with the head size; on the wire it is in C-order and little-endian:

    EXACT    the elements in the cache's dtype
    FLOAT16  the elements in float16
    INT8     a float32 scale for each row, (...,), then the elements as int8, (..., head_size)

A row is the keys (or values) of one token in one layer and KV head; an element is its int8 times its row's
scale. The scales stand first, so that they are aligned if the payload is, however many elements there are.

What comes back of a float32 x differs from it by at most
    FLOAT16  2^-11 |x|, but 2^-25 where |x| is below 2^-14
    INT8     m / 254 and float32's rounding of that, m the largest |x| of the row; a row below 2^-100 is zeros
A bfloat16 or float16 cache rounds once more.

NaN and infinities stay what they are, or become scales that `widen` refuses: either way the receiver sees
them. Knows nothing of headers and transfers.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import torch

from services.engine.errors import InvalidKvPage

_SCALE = torch.float32  # float16 would save 2 bytes of 68 (at a head size of 64), and end at 8.3 million
_MOST = 127  # -128 is never sent, so that both signs reach as far
_LEAST_ROW = 2.0**-100  # its scale is a normal number still, and so is 127 / row
_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


class PayloadFormat(StrEnum):
    """What the elements of a page are on the wire."""

    EXACT = "exact"
    FLOAT16 = "float16"
    INT8 = "int8"


def effective(wanted: PayloadFormat, head_size: int, dtype: torch.dtype) -> PayloadFormat:
    """`wanted` if it is smaller than the cache's own dtype; else EXACT, which loses nothing.

    So float16 and bfloat16 caches are never sent as FLOAT16, nor very small heads of them as INT8.
    """
    row = (head_size,)
    is_smaller = num_bytes(wanted, row, dtype) < num_bytes(PayloadFormat.EXACT, row, dtype)
    return wanted if is_smaller else PayloadFormat.EXACT


def num_bytes(form: PayloadFormat, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Size of the payload of a page.

    Args:
        shape: (..., head_size)
        dtype: of the cache.
    """
    num_elements = math.prod(shape)
    match form:
        case PayloadFormat.EXACT:
            return num_elements * dtype.itemsize
        case PayloadFormat.FLOAT16:
            return num_elements * torch.float16.itemsize
        case PayloadFormat.INT8:
            return num_elements + math.prod(shape[:-1]) * _SCALE.itemsize


def narrow(page: torch.Tensor, form: PayloadFormat, out: memoryview) -> None:
    """Writes the payload of a page.

    Args:
        page: (..., head_size) on the host, float32, float16 or bfloat16.
        out: writable, `num_bytes` long; holds nothing of use if this raises.

    Raises InvalidKvPage if FLOAT16 cannot hold what the page does; ValueError if `out` has another size.
    """
    if out.nbytes != (needed := num_bytes(form, page.shape, page.dtype)):
        raise ValueError(f"a page of {needed} bytes does not go into {out.nbytes}")
    match form:
        case PayloadFormat.EXACT:
            torch.frombuffer(out, dtype=page.dtype).view(page.shape).copy_(page)
        case PayloadFormat.FLOAT16:
            _check_range(page)
            torch.frombuffer(out, dtype=torch.float16).view(page.shape).copy_(page)
        case PayloadFormat.INT8:
            _narrow_int8(page, out)


def widen(payload: memoryview, form: PayloadFormat, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The page in the cache's dtype, in C-order; EXACT in the payload's memory, which may be read-only.

    Whoever calls looks for NaN and numbers too large (`kv_rows.check_numbers`): any format can bring them.

    Args:
        shape: (..., head_size), as the page's header has it.

    Raises InvalidKvPage: a payload of another size, scales that are no scales.
    """
    if min(shape) < 1:
        raise InvalidKvPage(f"a page of shape {tuple(shape)} holds nothing")
    if payload.nbytes != (expected := num_bytes(form, shape, dtype)):
        raise InvalidKvPage(f"{form} payload has {payload.nbytes} bytes, its ranges need {expected}")
    match form:
        case PayloadFormat.EXACT:
            return torch.frombuffer(payload, dtype=dtype).view(*shape)
        case PayloadFormat.FLOAT16:
            return torch.frombuffer(payload, dtype=torch.float16).view(*shape).to(dtype)
        case PayloadFormat.INT8:
            return _widen_int8(payload, shape).to(dtype)


def _check_range(page: torch.Tensor) -> None:
    # Refused, not clamped: a key cut down to 65504 can turn attention round, and nobody would ever know. The
    # sender can still send this one page as EXACT. What is not finite goes on, for the receiver to refuse.
    if page.dtype == torch.float16:
        return
    largest = max(-float(page.amin()), float(page.amax()))
    if _LARGEST_FLOAT16 < largest < math.inf:
        raise InvalidKvPage(f"the page holds {largest:g}; float16 ends at {_LARGEST_FLOAT16:g}")


def _narrow_int8(page: torch.Tensor, out: memoryview) -> None:
    scales, elements = _int8_parts(out, page.shape)
    exact = page.float()
    # (...,), NaN if one of the row is. Without a copy of the page's absolute values: room costs most here.
    largest = torch.maximum(exact.amax(-1), exact.amin(-1).neg_())
    is_zero = largest < _LEAST_ROW
    factors = (_MOST / largest).masked_fill_(is_zero, 0)
    # What stands beside a scale that is no number is never used, whatever a cast makes of NaN.
    scaled = torch.mul(exact, factors.unsqueeze(-1), out=None if exact is page else exact)
    elements.copy_(scaled.round_())
    scales.copy_(largest.div_(_MOST).masked_fill_(is_zero, 0))


def _widen_int8(payload: memoryview, shape: Sequence[int]) -> torch.Tensor:
    """(..., head_size) in float32."""
    scales, elements = _int8_parts(payload, shape)
    least, most = float(scales.amin()), float(scales.amax())
    if not (least >= 0 and most < math.inf):  # so written, NaN fails too
        raise InvalidKvPage(f"the page's scales reach from {least:g} to {most:g}")
    return elements.float().mul_(scales.unsqueeze(-1))


def _int8_parts(payload: memoryview, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (...,) and elements (..., head_size), in the payload's memory."""
    num_scales = math.prod(shape[:-1])
    scales = torch.frombuffer(payload, dtype=_SCALE, count=num_scales).view(*shape[:-1])
    elements = torch.frombuffer(payload, dtype=torch.int8, offset=num_scales * _SCALE.itemsize)
    return scales, elements.view(*shape)
