"""The RESULT line: medians over rounds, to four digits; null where there is nothing to tell. `quick` where
nothing was measured.
"""

import json
from collections.abc import Callable, Mapping

from bench.interference.arrangements import COLOCATED, SPLIT
from bench.interference.figures import Figures, Itl
from bench.interference.rounds import PromptTimes
from bench.statistics import Spread

Value = float | int | bool | list[float] | None

ITL: Mapping[str, Callable[[Itl], float]] = {
    "p50": lambda itl: itl.p50,
    "p99": lambda itl: itl.p99,
    "max": lambda itl: itl.max,
}


def num_stalls(itl: Itl) -> float:
    return itl.num_stalls


def tokens_per_s(itl: Itl) -> float:
    return itl.tokens_per_s


def first_s(prompt: PromptTimes) -> float:
    return prompt.first_s


def result(figures: Figures) -> dict[str, Value]:
    """Ratios first; then, for each arrangement, what they were made of."""
    ratios = {
        f"{name}_{what}_itl_ratio": figures.ratio(name, ITL[what])
        for what in ("p99", "max")
        for name in figures.names
    }
    found: dict[str, Value] = {"quick": True} if figures.settings.is_quick else {}
    found |= {name: _median(ratio) for name, ratio in ratios.items()}
    found["split_short_prompt_ttft_ratio"] = _median(figures.short_first_ratio(SPLIT.name, COLOCATED.name))
    found |= {f"{name}_range": [_short(ratio.low), _short(ratio.high)] for name, ratio in ratios.items()}
    for name in figures.names:
        for side, of in (("idle", figures.idle), ("loaded", figures.loaded)):
            for what, value in ITL.items():
                found[f"{name}_{side}_{what}_ms"] = _median(of(name, value).scaled(1000))
            found[f"{name}_{side}_stalls"] = _median(of(name, num_stalls))
            found[f"{name}_{side}_tokens_per_s"] = _median(of(name, tokens_per_s))
        found[f"{name}_long_prompt_ttft_ms"] = _median_ms(figures.prompts(name, first_s))
        found[f"{name}_long_prompt_prefill_ms"] = _median(figures.prompts(name, lambda p: p.prefill_ms))
    for arrangement in (SPLIT, COLOCATED):
        ttft = figures.short_first_s(arrangement.name)
        found[f"{arrangement.name}_short_prompt_ttft_ms"] = _median_ms(ttft)
    return found | {"fewest_gaps": figures.fewest_gaps(), "enough_gaps": figures.has_enough_gaps}


def result_line(figures: Figures) -> str:
    """The last line of stdout."""
    return "RESULT " + json.dumps(result(figures))


def _median(value: Spread | None) -> float | None:
    return None if value is None else _short(value.median)


def _median_ms(seconds: Spread | None) -> float | None:
    return None if seconds is None else _short(seconds.median * 1000)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
