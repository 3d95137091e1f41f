"""Packed linear layers: as close to the plain ones as each precision promises."""

import pytest
import torch
from torch import nn

from services.engine.linear import ByRows
from services.engine.linear_packing import LAYERS, Packer, pack_linears
from services.engine.precision import Precision
from services.engine.precision_probe import PrecisionPlan, choose

TOLERANCES = {Precision.FP32: 1e-5, Precision.FP16: 1e-3, Precision.BF16: 2e-2}


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("precision", LAYERS)
@pytest.mark.parametrize("options", [{}, {"bias": False}])
@torch.inference_mode()
def test_each_precision_keeps_its_promise(precision: Precision, options: dict[str, bool]) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(96, 200, **options)
    packed = LAYERS[precision](linear)
    for rows in (1, 3, 17):
        x = torch.randn(1, rows, 96)
        assert packed(x).shape == (1, rows, 200)
        assert packed(x).dtype is torch.float32
        assert relative_error(packed(x), linear(x)) < TOLERANCES[precision]


@pytest.mark.parametrize("shape", [(1536, 576), (576, 1536), (200, 96)])
@torch.inference_mode()
def test_in_fp32_a_row_is_bitwise_the_same_in_any_company(shape: tuple[int, int]) -> None:
    """From the fewest rows on that a step is padded to. Of the first shape, fewer give other sums."""
    torch.manual_seed(2)
    packer = Packer(Precision.FP32, [shape])
    packed = packer.pack(nn.Linear(*shape))
    x = torch.randn(200, shape[0])
    together = packed(x)
    for count in {packer.min_rows, 5, 7, 16, 31, 100}:
        for start in (0, 3, 200 - count):
            rows = slice(start, start + count)
            assert torch.equal(packed(x[rows]), together[rows]), f"rows {rows} of {shape}"


def test_every_linear_layer_of_a_model_is_packed_and_shared_weights_live_on() -> None:
    model = nn.Sequential(
        nn.Embedding(50, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 50)
    )
    model[2].weight = model[0].weight
    pack_linears(model, Packer(Precision.FP16, []))
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 50)


@torch.inference_mode()
def test_fast_is_as_close_as_the_coarsest_it_may_take() -> None:
    linear = nn.Linear(64, 32)
    packed = Packer(Precision.FAST, [(32, 64)]).pack(linear)
    for rows in (1, 4, 200):
        x = torch.randn(1, rows, 64)
        assert relative_error(packed(x), linear(x)) < TOLERANCES[Precision.BF16]


def test_layers_by_rows_switch_at_their_limit() -> None:
    layer = ByRows(nn.Identity(), nn.Flatten(0), limit=2)
    assert layer(torch.zeros(1, 2, 3)).shape == (1, 2, 3)
    assert layer(torch.zeros(1, 3, 3)).shape == (9,)


def test_two_precisions_are_kept_where_each_is_better_at_its_number_of_rows() -> None:
    rows = (1, 4, 16)
    alike = {
        Precision.FP32: [2.0, 2.0, 2.0],
        Precision.FP16: [1.0, 1.0, 1.02],
        Precision.BF16: [3.0, 3.0, 1.0],
    }
    assert choose(alike, rows) == PrecisionPlan(Precision.FP16, Precision.FP16)
    apart = {
        Precision.FP32: [2.0, 2.0, 4.0],
        Precision.FP16: [1.0, 1.0, 3.0],
        Precision.BF16: [2.0, 2.0, 1.0],
    }
    assert choose(apart, rows) == PrecisionPlan(Precision.FP16, Precision.BF16, limit=4)
