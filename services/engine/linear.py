"""Linear layers with weights packed for the CPU once, at load.

Packed layers are faster than `F.linear` and, unlike it, give each row bitwise the same result in any
batch size (measured for 1 to 1,024 rows), which is what lets a reply not depend on its company.
"""

import torch
from torch import nn


class PackedLinear(nn.Module):
    """`nn.Linear` without its own copy of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._weight = packed  # an opaque tensor: no parameter, no buffer
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]


def pack_linears(model: nn.Module) -> int:
    """Packs every fp32 `nn.Linear` of a CPU model in place; returns how many.

    Tied weights stay alive through the embedding that shares them. 0 where torch lacks oneDNN.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.dtype is torch.float32
        and child.weight.device.type == "cpu"
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
