"""Packs a model's linear layers for the CPU, in the precision that was asked for."""

import time
from collections import Counter
from collections.abc import Callable

import structlog
import torch
from torch import nn

from services.engine.linear import Bf16Linear, Fp16Linear, PackedLinear
from services.engine.precision import Precision

log = structlog.get_logger()

_PROBE_ROWS = (1, 8)  # a single stream, and a small batch
_PROBE_REPEATS = 3

LAYERS: dict[Precision, Callable[[nn.Linear], nn.Module]] = {
    Precision.FP32: PackedLinear,
    Precision.BF16: Bf16Linear,
    Precision.FP16: Fp16Linear,
}


@torch.inference_mode()
def pack_linears(model: nn.Module, precision: Precision) -> Precision | None:
    """Packs every fp32 `nn.Linear` of a CPU model in place; returns the precision, None if none could be.

    Tied weights stay alive through the embedding that shares them.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.dtype is torch.float32
        and child.weight.device.type == "cpu"
    ]
    if precision is Precision.FAST:
        precision = _fastest([linear for _, _, linear in found])
    for parent, name, linear in found:
        setattr(parent, name, LAYERS[precision](linear))
    return precision


def _fastest(linears: list[nn.Linear]) -> Precision:
    """The precision with the least time for all layers, one of each shape timed."""
    shapes = Counter(tuple(linear.weight.shape) for linear in linears)
    examples = {tuple(linear.weight.shape): linear for linear in linears}
    seconds = dict.fromkeys(LAYERS, 0.0)
    for shape, count in shapes.items():
        inputs = [torch.randn(rows, shape[1]) for rows in _PROBE_ROWS]
        for precision, pack in LAYERS.items():
            layer = pack(examples[shape])
            seconds[precision] += count * sum(_time(layer, x) for x in inputs)
    log.info("precision probed", **{f"{name}_ms": round(s * 1000, 1) for name, s in seconds.items()})
    return min(seconds, key=lambda precision: seconds[precision])


def _time(layer: nn.Module, x: torch.Tensor) -> float:
    layer(x)  # the first call of a shape also sets kernels up
    best = float("inf")
    for _ in range(_PROBE_REPEATS):
        started = time.perf_counter()
        layer(x)
        best = min(best, time.perf_counter() - started)
    return best
