"""Which precision multiplies a model's linear layers fastest here, for few rows and for many."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog
import torch
from torch import nn

from services.engine.precision import Precision

log = structlog.get_logger()

_ROWS = (1, 4, 16, 128)  # a stream, small and large batches, a chunk of a prompt
_REPEATS = 3
_WORTH_TWO_COPIES = 0.9  # of the time that one precision for all would take
_MOST_OUTPUTS = 4096  # of a layer that is timed; a vocabulary's layer is a longer one of the same kind
_CACHES_BYTES = 64 * 2**20  # read between two timings: in a step, weights come from memory


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """`few` for at most `limit` rows, `many` for more; a limit of None is `few` for all."""

    few: Precision
    many: Precision
    limit: int | None = None


@torch.inference_mode()
def probe(
    shapes: Iterable[tuple[int, int]], layers: dict[Precision, Callable[[nn.Linear], nn.Module]]
) -> PrecisionPlan:
    """Times every precision on layers of the given (out, in) sizes."""
    counts = Counter((min(out, _MOST_OUTPUTS), inner) for out, inner in shapes)
    costs = {precision: [0.0] * len(_ROWS) for precision in layers}
    scratch = torch.zeros(_CACHES_BYTES // 4)
    for (out, inner), count in counts.items():
        linear = nn.Linear(inner, out)
        inputs = [torch.randn(1, rows, inner) for rows in _ROWS]
        for precision, pack in layers.items():
            layer = pack(linear)
            for i, x in enumerate(inputs):
                costs[precision][i] += count * _time(layer, x, scratch)
    log.info(
        "precisions timed",
        rows=_ROWS,
        **{f"{name}_ms": [round(s * 1000, 1) for s in cost] for name, cost in costs.items()},
    )
    return choose(costs, _ROWS)


def choose(costs: dict[Precision, list[float]], rows: tuple[int, ...]) -> PrecisionPlan:
    """The cheapest plan. Costs count relative to the best at each number of rows, so that all weigh alike."""
    best = [min(cost[i] for cost in costs.values()) for i in range(len(rows))]
    relative = {name: [c / b for c, b in zip(cost, best, strict=True)] for name, cost in costs.items()}
    single = min(costs, key=lambda name: sum(relative[name]))
    plans = {
        PrecisionPlan(few, many, rows[cut - 1]): sum(relative[few][:cut] + relative[many][cut:])
        for cut in range(1, len(rows))
        for few in costs
        for many in costs
    }
    split = min(plans, key=lambda plan: plans[plan])
    if split.few is split.many or plans[split] > _WORTH_TWO_COPIES * sum(relative[single]):
        return PrecisionPlan(single, single)
    return split


def _time(layer: nn.Module, x: torch.Tensor, scratch: torch.Tensor) -> float:
    layer(x)  # the first call of a shape also sets kernels up
    best = float("inf")
    for _ in range(_REPEATS):
        scratch.add_(1)
        started = time.perf_counter()
        layer(x)
        best = min(best, time.perf_counter() - started)
    return best
