"""A payload is as close to its page as its format promises, and what is no payload is refused."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.engine.errors import InvalidKvPage
from services.engine.kv_rows import check_numbers
from services.kv.payload import PayloadFormat, effective, narrow, num_bytes, widen

EXACT, FLOAT16, INT8 = PayloadFormat
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (4, 3, 2, 5)  # an odd head size

shapes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))


def payload_of(page: torch.Tensor, form: PayloadFormat) -> memoryview:
    """Read-only, at an odd address, as in a received message."""
    size = num_bytes(form, page.shape, page.dtype)
    memory = memoryview(bytearray(size + 1))[1:]
    narrow(page, form, memory)
    return memory.toreadonly()


def there_and_back(page: torch.Tensor, form: PayloadFormat) -> torch.Tensor:
    return widen(payload_of(page, form), form, page.shape, page.dtype)


def refuse(page: torch.Tensor) -> None:
    """What the receiver does, after `widen` too."""
    with pytest.raises(InvalidKvPage):
        check_numbers(page.flatten(2))


@st.composite
def pages(draw: st.DrawFn, least_exponent: int, most_exponent: int) -> torch.Tensor:
    """Float32 pages whose numbers' sizes differ by powers of two, with zeros among them."""
    shape = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(least_exponent, most_exponent + 1, shape, generator=generator)
    page = torch.rand(shape, generator=generator).add_(1).mul_(2.0**exponents)
    return page * torch.randint(-1, 2, shape, generator=generator)


@given(pages(-14, 14))
def test_float16_keeps_eleven_bits(page: torch.Tensor) -> None:
    widened = there_and_back(page, FLOAT16)
    assert bool(((widened - page).abs() <= 2.0**-11 * page.abs()).all())


@given(pages(-30, -15))
def test_float16_keeps_small_numbers_to_a_fixed_step(page: torch.Tensor) -> None:
    assert float((there_and_back(page, FLOAT16) - page).abs().max()) <= 2.0**-25


@given(pages(-60, 60))
def test_int8_is_within_half_a_step_of_its_row(page: torch.Tensor) -> None:
    error = (there_and_back(page, INT8).double() - page.double()).abs()
    most = page.double().abs().amax(-1, keepdim=True) * (1 / 254 + 2.0**-21)
    assert bool((error <= most).all())


@given(pages(-6, 6), st.sampled_from((torch.bfloat16, torch.float16)))
def test_int8_of_a_narrow_cache_rounds_once_more(page: torch.Tensor, dtype: torch.dtype) -> None:
    held = page.to(dtype)
    largest = held.double().abs().amax(-1, keepdim=True)
    error = (there_and_back(held, INT8).double() - held.double()).abs()
    assert bool((error <= largest * (1 / 254 + torch.finfo(dtype).eps)).all())


@given(shapes, st.sampled_from(DTYPES))
def test_exact_is_exact_in_c_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    page = torch.randn(shape).to(dtype)
    payload = payload_of(page, EXACT)
    assert payload == memoryview(page.contiguous().view(torch.uint8).numpy().tobytes())
    assert torch.equal(widen(payload, EXACT, shape, dtype), page)


@pytest.mark.parametrize("form", PayloadFormat)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_widened_page_has_the_shape_it_was_asked_in(form: PayloadFormat, dtype: torch.dtype) -> None:
    page = torch.randn(SHAPE).to(dtype)
    widened = widen(payload_of(page, form), form, (2, 2, 3, 2, 5), dtype)
    assert widened.shape == (2, 2, 3, 2, 5)
    assert widened.dtype == dtype
    assert widened.is_contiguous()
    assert torch.allclose(widened.view(SHAPE).float(), page.float(), atol=0.02)


def test_a_page_may_lie_scattered() -> None:
    page = torch.randn(3, 4, 2, 5).transpose(0, 1)
    for form in PayloadFormat:
        assert payload_of(page, form) == payload_of(page.contiguous(), form)


def test_the_layout_of_int8_is_scales_then_elements() -> None:
    page = torch.tensor([[[[127.0, -63.4, 0.2]]], [[[0.0, 0.0, 0.0]]]])
    assert bytes(payload_of(page, INT8)) == struct.pack("<2f6b", 1.0, 0.0, 127, -63, 0, 0, 0, 0)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 2.0**-101])
def test_what_is_next_to_nothing_becomes_zeros_in_int8(size: float) -> None:
    widened = there_and_back(torch.full(SHAPE, size), INT8)
    assert torch.equal(widened, torch.zeros(SHAPE))


def test_one_row_says_nothing_of_another() -> None:
    page = torch.randn(SHAPE)
    page[1, 2, 0] = 1e6
    kept = torch.ones(SHAPE[:-1], dtype=torch.bool)
    kept[1, 2, 0] = False
    other = page.clone()
    other[1, 2, 0] = 0
    assert torch.equal(there_and_back(page, INT8)[kept], there_and_back(other, INT8)[kept])


@pytest.mark.parametrize("size", [65505.0, -65520.0, 1e30, -3e38])
def test_numbers_beyond_float16_are_refused_by_the_sender(size: float) -> None:
    page = torch.zeros(SHAPE)
    page[2, 1, 0, 3] = size
    with pytest.raises(InvalidKvPage, match="float16 ends at 65504"):
        payload_of(page, FLOAT16)
    held = there_and_back(page, INT8)
    assert math.isclose(float(held[2, 1, 0, 3]), size, rel_tol=1e-6)


def test_the_largest_of_float16_passes() -> None:
    page = torch.full(SHAPE, -65504.0)
    assert torch.equal(there_and_back(page, FLOAT16), page)
    for form in (FLOAT16, INT8):
        assert torch.equal(there_and_back(page.half(), form), page.half())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_still_seen_by_the_receiver(bad: float, dtype: torch.dtype) -> None:
    page = torch.randn(SHAPE).to(dtype)
    page[3, 2, 1, 4] = bad
    page[0, 0, 0, 0] = 7
    for form in (EXACT, FLOAT16):
        refuse(there_and_back(page, form))
    payload = payload_of(page, INT8)
    with pytest.raises(InvalidKvPage, match="scales reach"):
        widen(payload, INT8, SHAPE, dtype)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    payload = bytearray(payload_of(torch.ones(SHAPE), INT8))
    struct.pack_into("<f", payload, 4 * 11, scale)
    with pytest.raises(InvalidKvPage, match="scales reach"):
        widen(memoryview(payload), INT8, SHAPE, torch.float32)


@pytest.mark.parametrize("scale", [1e29, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scales_lead_to_numbers_that_are_refused(scale: float, dtype: torch.dtype) -> None:
    payload = bytearray(payload_of(torch.ones(SHAPE), INT8))
    struct.pack_into("<f", payload, 4 * 11, scale)
    refuse(widen(memoryview(payload), INT8, SHAPE, dtype))


@pytest.mark.parametrize("form", PayloadFormat)
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_another_size_is_refused_and_named(form: PayloadFormat, change: int) -> None:
    right = num_bytes(form, SHAPE, torch.float32)
    with pytest.raises(InvalidKvPage, match=f"{form} payload has {right + change} bytes, .* need {right}"):
        widen(memoryview(bytes(right + change)), form, SHAPE, torch.float32)
    with pytest.raises(ValueError, match=f"a page of {right} bytes"):
        narrow(torch.ones(SHAPE), form, memoryview(bytearray(right + change)))


@pytest.mark.parametrize("shape", [(4, 0, 2, 5), (4, -3, -2, 5), (0, 3, 2, 5)])
def test_a_page_of_nothing_is_refused(shape: tuple[int, ...]) -> None:
    for form in PayloadFormat:
        size = max(0, num_bytes(form, shape, torch.float32))
        with pytest.raises(InvalidKvPage, match="holds nothing"):
            widen(memoryview(bytes(size)), form, shape, torch.float32)


def test_sizes() -> None:
    assert [num_bytes(form, (60, 45, 3, 64), torch.float32) for form in PayloadFormat] == [
        2_073_600,
        1_036_800,
        518_400 + 4 * 8100,
    ]


@pytest.mark.parametrize(
    ("wanted", "head_size", "dtype", "expected"),
    [
        (EXACT, 64, torch.float32, EXACT),
        (FLOAT16, 64, torch.float32, FLOAT16),
        (FLOAT16, 64, torch.float16, EXACT),
        (FLOAT16, 64, torch.bfloat16, EXACT),
        (INT8, 64, torch.float32, INT8),
        (INT8, 64, torch.bfloat16, INT8),
        (INT8, 5, torch.bfloat16, INT8),
        (INT8, 4, torch.bfloat16, EXACT),
        (INT8, 2, torch.float32, INT8),
        (INT8, 1, torch.float32, EXACT),
    ],
)
def test_only_what_is_smaller_is_worth_it(
    wanted: PayloadFormat, head_size: int, dtype: torch.dtype, expected: PayloadFormat
) -> None:
    assert effective(wanted, head_size, dtype) is expected
