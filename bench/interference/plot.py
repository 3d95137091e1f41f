"""The run as a picture: every gap of the steady streams when it happened, and the ratios."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from bench.axes import clean, whisker
from bench.interference.arrangements import arrangements
from bench.interference.figures import Figures
from bench.interference.result import ITL
from bench.interference.rounds import Window

_IDLE, _LOADED = "#8da0cb", "#d95f02"


def save_plot(figures: Figures, file: Path) -> None:
    """Writes a picture; the file's ending says which format."""
    s = figures.settings
    shown = [each for each in arrangements(s) if each.name in figures.names]
    figure = Figure(
        figsize=(13, 2.1 * len(shown) + 1.2), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    )
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(2.4, 1))[0]
    rows = left.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, arrangement in zip(rows, shown, strict=True):
        turn = figures.rounds[0].turns[arrangement.name]
        _plot_gaps(axes, turn.idle, _IDLE, "idle")
        _plot_gaps(axes, turn.loaded, _LOADED, "loaded")
        for prompt in turn.loaded.prompts:
            axes.axvline(prompt.due_s, color="#bbbbbb", linewidth=0.8, zorder=0)
        axes.set_yscale("log")
        axes.set_title(arrangement.title, fontsize=10, loc="left")
        axes.set_ylabel("ITL, ms")
        clean(axes)
    rows[0].legend(frameon=False, fontsize=9, ncols=2, loc="upper right", markerscale=4)
    rows[-1].set_xlabel("s into the window, first round; grey: a prompt arrives")
    for axes, what in zip(right.subplots(2, 1), ("p99", "max"), strict=True):
        _plot_ratios(axes, figures, what)
    figure.suptitle(
        f"baton bench interference: {s.model.name}, {s.streams} streams, "
        f"a prompt of {s.prompt_tokens:,} tokens every {s.every_s:g} s, rounds: {s.rounds}",
        fontsize=12,
        fontweight="bold",
    )
    figure.savefig(file)


def _plot_gaps(axes: Axes, window: Window, colour: str, label: str) -> None:
    gaps = [gap for gap in window.gaps if gap.is_itl]
    ends = [gap.began_s + gap.seconds for gap in gaps]
    axes.plot(ends, [gap.seconds * 1000 for gap in gaps], ".", color=colour, markersize=2, label=label)


def _plot_ratios(axes: Axes, figures: Figures, what: str) -> None:
    for place, name in enumerate(figures.names):
        ratio = figures.ratio(name, ITL[what])
        axes.bar(place, ratio.median, 0.7, color=_LOADED)
        whisker(axes, place, ratio)
    axes.axhline(1, color=_IDLE, linewidth=1)
    axes.set_xticks(
        range(len(figures.names)), [name.replace("_", "\n", 1) for name in figures.names], fontsize=8
    )
    axes.tick_params(axis="x", length=0)
    axes.set_title(f"{what} ITL, loaded / idle (median, range)", fontsize=10)
    clean(axes)
