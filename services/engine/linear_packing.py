"""Packs linear layers for the CPU, in the precision that was asked for or that is the fastest."""

import time
from collections.abc import Callable

import structlog
import torch
from torch import nn

from services.engine.linear import Bf16Linear, ByRows, Fp16Linear, PackedLinear
from services.engine.precision import Precision

log = structlog.get_logger()

_PROBE_ROWS = (1, 4, 16, 128)  # a stream, small and large batches, a chunk of a prompt
_PROBE_REPEATS = 3
_CACHES_BYTES = 64 * 2**20  # what is read between two timings: in a step, weights come from memory
_WORTH_TWO_COPIES = 0.85  # of the time that one precision for all would take
_PROBED = (Precision.FP32, Precision.BF16, Precision.FP16)

LAYERS: dict[Precision, Callable[[nn.Linear], nn.Module]] = {
    Precision.FP32: PackedLinear,
    Precision.BF16: Bf16Linear,
    Precision.FP16: Fp16Linear,
}


def can_pack(linear: nn.Linear) -> bool:
    weight = linear.weight
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and weight.dtype is torch.float32 and weight.device.type == "cpu"


def min_rows(precision: Precision) -> int:
    """Rows that a step is padded to.

    With fewer than 4 rows mkldnn takes kernels that sum in another order, and that are slower.
    """
    return 4 if precision in (Precision.FP32, Precision.BF16) else 1


class Packer:
    """Packs layers one by one. `fast` times each new shape and goes on with the winner."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self._fastest: dict[torch.Size, Callable[[nn.Linear], nn.Module]] = {}

    def pack(self, linear: nn.Linear) -> nn.Module:
        """A module that stands for the layer, without its weight."""
        if self.precision is not Precision.FAST:
            return LAYERS[self.precision](linear)
        shape = linear.weight.shape
        if shape not in self._fastest:
            self._fastest[shape] = _probe(linear)
        return self._fastest[shape](linear)


@torch.inference_mode()
def pack_linears(model: nn.Module, packer: Packer) -> None:
    """Packs every `nn.Linear` of a model in place, where it can be.

    Tied weights stay alive through the embedding that shares them.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and can_pack(child)
    ]
    for parent, name, linear in found:
        setattr(parent, name, packer.pack(linear))


def _probe(linear: nn.Linear) -> Callable[[nn.Linear], nn.Module]:
    """One precision for all numbers of rows, or one for few rows and another for more, where that pays."""
    layers = {precision: LAYERS[precision](linear) for precision in _PROBED}
    inputs = [torch.randn(1, rows, linear.in_features) for rows in _PROBE_ROWS]
    costs = {name: [_time(layer, x) for x in inputs] for name, layer in layers.items()}
    best = [min(cost[i] for cost in costs.values()) for i in range(len(inputs))]
    # Relative to the best at each number of rows, so that all of them count alike.
    relative = {name: [c / b for c, b in zip(cost, best, strict=True)] for name, cost in costs.items()}
    best_of_all = min(_PROBED, key=lambda name: sum(relative[name]))
    options = [
        (sum(relative[few][:cut]) + sum(relative[many][cut:]), cut, few, many)
        for cut in range(1, len(inputs))
        for few in _PROBED
        for many in _PROBED
    ]
    cost, cut, few, many = min(options)
    shape = "x".join(map(str, linear.weight.shape))
    if few is many or cost > _WORTH_TWO_COPIES * sum(relative[best_of_all]):
        log.info("precision probed", shape=shape, precision=best_of_all)
        return LAYERS[best_of_all]
    limit = _PROBE_ROWS[cut - 1]
    log.info("precision probed", shape=shape, precision=few, above_rows=limit, then=many)
    return lambda linear: ByRows(LAYERS[few](linear), LAYERS[many](linear), limit)


def _time(layer: nn.Module, x: torch.Tensor) -> float:
    layer(x)  # the first call of a shape also sets kernels up
    best = float("inf")
    for _ in range(_PROBE_REPEATS):
        torch.zeros(_CACHES_BYTES, dtype=torch.uint8)
        started = time.perf_counter()
        layer(x)
        best = min(best, time.perf_counter() - started)
    return best
