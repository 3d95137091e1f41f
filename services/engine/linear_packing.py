"""Packs linear layers for the CPU, in the precision that was asked for or that is the fastest."""

from collections.abc import Callable, Iterable

import structlog
import torch
from torch import nn

from services.engine.linear import Bf16Linear, ByRows, Fp16Linear, PackedLinear
from services.engine.precision import Precision
from services.engine.precision_probe import PrecisionPlan, probe

log = structlog.get_logger()

LAYERS: dict[Precision, Callable[[nn.Linear], nn.Module]] = {
    Precision.FP32: PackedLinear,
    Precision.BF16: Bf16Linear,
    Precision.FP16: Fp16Linear,
}


class Packer:
    """Packs layers one by one.

    Args:
        shapes: (out, in) of the layers to come; `fast` times them.
    """

    def __init__(self, precision: Precision, shapes: Iterable[tuple[int, int]]) -> None:
        is_fast = precision is Precision.FAST
        self._plan = probe(shapes, LAYERS) if is_fast else PrecisionPlan(precision, precision)
        log.info("linear layers", few=self._plan.few, many=self._plan.many, limit=self._plan.limit)

    @property
    def min_rows(self) -> int:
        """Rows that a step is padded to.

        With fewer than 4 rows mkldnn takes kernels that sum in another order, and that are slower.
        """
        return 1 if self._plan.few is Precision.FP16 else 4

    def pack(self, linear: nn.Linear) -> nn.Module:
        """A module that stands for the layer, without its weight."""
        plan = self._plan
        if plan.limit is None:
            return LAYERS[plan.few](linear)
        return ByRows(LAYERS[plan.few](linear), LAYERS[plan.many](linear), plan.limit)


def linears_to_pack(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear and _can_pack(module)]


@torch.inference_mode()
def pack_linears(model: nn.Module, packer: Packer) -> None:
    """Packs every `nn.Linear` of a model in place, where it can be.

    Tied weights stay alive through the embedding that shares them.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _can_pack(child)
    ]
    for parent, name, linear in found:
        setattr(parent, name, packer.pack(linear))


def _can_pack(linear: nn.Linear) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and linear.weight.dtype is torch.float32 and linear.weight.device.type == "cpu"
