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
_REPEATS = 5
_WORTH_TWO_COPIES = 1.15  # times as slow as two precisions, at some number of rows, is one for all
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
        packed = {precision: pack(linear) for precision, pack in layers.items()}
        for i, rows in enumerate(_ROWS):
            x = torch.randn(1, rows, inner)
            for precision, seconds in _time(packed, x, scratch).items():
                costs[precision][i] += count * seconds
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
    slowdowns = [
        relative[single][i] / relative[split.few if n <= (split.limit or 0) else split.many][i]
        for i, n in enumerate(rows)
    ]
    if split.few is split.many or max(slowdowns) < _WORTH_TWO_COPIES:
        return PrecisionPlan(single, single)
    return split


def _time(
    packed: dict[Precision, nn.Module], x: torch.Tensor, scratch: torch.Tensor
) -> dict[Precision, float]:
    """Seconds, the least of several; the precisions take turns, so that a busy moment meets them all."""
    best = dict.fromkeys(packed, float("inf"))
    for layer in packed.values():
        layer(x)  # the first call of a shape also sets kernels up
    for _ in range(_REPEATS):
        for precision, layer in packed.items():
            scratch.add_(1)
            started = time.perf_counter()
            layer(x)
            best[precision] = min(best[precision], time.perf_counter() - started)
    return best
