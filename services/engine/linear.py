"""Linear layers with weights packed for the CPU once, at load; `precision.py` says which to take.

The fp32 one is faster than `F.linear` and, unlike it, gives each row bitwise the same result in any
batch size from 4 rows on, which is what lets a reply not depend on its company (`Packer.min_rows`).
"""

import torch
from torch import nn

# The overloads by name: looking them up costs as much as a small layer.
_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_linear = torch.ops.mkldnn._linear_pointwise.default
_prepack_fp16 = torch.ops.quantized.linear_prepack_fp16.default
_linear_fp16 = torch.ops.quantized.linear_dynamic_fp16.default


class PackedLinear(nn.Module):
    """`nn.Linear` in fp32, without its own copy of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # An opaque tensor: no parameter, no buffer.
        self._weight = _reorder(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return _linear(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]


class Bf16Linear(nn.Module):
    """Weights and activations rounded to bf16, sums in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().bfloat16()
        self._weight = _reorder(weight, None)
        self._bias = None if linear.bias is None else linear.bias.detach().bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), both in x's dtype."""
        y = _linear(x.bfloat16(), self._weight, self._bias, "none", [], "")
        return y.to(x.dtype)  # type: ignore[no-any-return]


class Fp16Linear(nn.Module):
    """Weights rounded to fp16 in memory, multiplied in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._packed = _prepack_fp16(linear.weight.detach(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return _linear_fp16(x, self._packed)  # type: ignore[no-any-return]


class ByRows(nn.Module):
    """One layer for inputs of at most `limit` rows, another for larger ones. Keeps the weights twice."""

    def __init__(self, few: nn.Module, many: nn.Module, limit: int) -> None:
        super().__init__()
        self._few, self._many, self._limit = few.forward, many.forward, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, T, in) -> (1, T, out)."""
        return self._few(x) if x.shape[-2] <= self._limit else self._many(x)  # type: ignore[no-any-return]
