"""The run as a picture: second tokens by prompt length, both ways, and what the streams notice."""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from bench.axes import clean
from bench.statistics import Spread
from bench.threshold.figures import Figures
from bench.threshold.rounds import Company, Way

_COLORS = {Way.HANDED_OVER: "#8da0cb", Way.LOCAL: "#d95f02"}
_LABELS = {Way.HANDED_OVER: "handed over", Way.LOCAL: "local"}
_TITLES = {
    Company.ALONE: "second token, ms, nothing else running",
    Company.BESIDE: "second token, ms, beside steady streams",
}


def save_plot(figures: Figures, file: Path) -> None:
    """Writes a picture; the file's ending says which format."""
    figure = Figure(figsize=(14, 4.5), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    *times, stalls = figure.subplots(1, len(Company) + 1)
    for axes, company in zip(times, Company, strict=True):

        def second_ms(length: int, way: Way, company: Company = company) -> Spread:
            return figures.second_s(length, company, way).scaled(1000)

        _plot(axes, figures, second_ms)
        axes.set_title(_TITLES[company], fontsize=10)
    _plot(stalls, figures, figures.stall)
    stalls.axhline(figures.settings.stall_bound, color="#333333", linewidth=1, linestyle="--")
    stalls.set_title("longest gap of the streams, idle p99s (dashed: bound)", fontsize=10)
    figure.suptitle(
        f"baton bench threshold: {figures.decision.threshold_tokens} tokens "
        f"(median of {figures.settings.rounds} rounds, range)",
        fontsize=12,
        fontweight="bold",
    )
    figure.savefig(file)


def _plot(axes: Axes, figures: Figures, value: Callable[[int, Way], Spread]) -> None:
    lengths = figures.settings.lengths
    for way in Way:
        found = [value(length, way) for length in lengths]
        medians = [each.median for each in found]
        errors = [[each.median - each.low for each in found], [each.high - each.median for each in found]]
        axes.errorbar(
            lengths, medians, yerr=errors, color=_COLORS[way], label=_LABELS[way], capsize=3, marker="o"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("prompt tokens")
    axes.legend(frameon=False, fontsize=8)
    clean(axes)
