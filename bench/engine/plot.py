"""The run as a picture: where a step's time goes, and tokens per second beside transformers."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from bench.axes import clean, whisker
from bench.engine.figures import PEER, Figures, decode_tokens_per_s, step_s
from bench.engine.measure import EXACT, FAST
from bench.engine.settings import PEER_BATCH
from bench.engine.step_split import StepSplit
from bench.statistics import spread

_PARTS = (  # attribute of StepSplit, label, colour
    ("forward_s", "forward", "#4c78a8"),
    ("sampling_s", "sampling", "#f58518"),
    ("detokenizing_s", "detokenizing", "#54a24b"),
    ("scheduling_s", "scheduling", "#b279a2"),
)
_COLOURS = {EXACT: "#8da0cb", FAST: "#1f9e89", PEER: "#b0b0b0"}
_LABELS = {EXACT: "Baton, exact (fp32)", FAST: "Baton, fast", PEER: "transformers (fp32)"}


def save_plot(figures: Figures, file: Path) -> None:
    """Writes a picture; the file's ending says which format."""
    figure = Figure(figsize=(13, 5.6), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    steps, single, batch = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    _plot_steps(steps, figures)
    _plot_rates(single, figures, "One stream", 1)
    _plot_rates(batch, figures, "16 streams", 16)
    s = figures.settings
    figure.suptitle(
        f"baton bench engine: {s.model.name}, threads: {s.threads}, rounds: {s.rounds} "
        "(bars: median, whiskers: smallest to largest)",
        fontsize=12,
        fontweight="bold",
    )
    figure.savefig(file)


def _plot_steps(axes: Axes, figures: Figures) -> None:
    """Stacked bars: a pair of modes for each batch and context, the last with every sampling feature on."""
    place = 0.0
    places = []
    for label, splits in _groups(figures):
        axes.annotate(
            label,
            (place + 0.5, 0),
            (0, -20),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            annotation_clip=False,
        )
        for mode in (EXACT, FAST):
            _stack(axes, place, splits[mode])
            places.append(place)
            place += 1
        place += 0.7
    axes.set_xticks(places, [EXACT, FAST] * (len(places) // 2), fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(" \n \n ", fontsize=8)  # room for the groups' labels
    axes.set_ylabel("ms")
    axes.set_title("One decode step, by part", fontsize=11, pad=26)
    axes.legend(
        handles=[Patch(color=colour, label=label) for _, label, colour in _PARTS],
        ncols=len(_PARTS),
        loc="lower center",
        bbox_to_anchor=(0.5, 0.99),
        frameon=False,
        fontsize=9,
    )
    clean(axes)


def _groups(figures: Figures) -> Iterator[tuple[str, dict[str, list[StepSplit]]]]:
    for context in figures.settings.contexts:
        for batch in figures.settings.batches:
            yield (
                f"batch {batch}\ncontext {context}",
                {
                    mode: [point.split for point in figures.sweep_points(mode, batch, context)]
                    for mode in (EXACT, FAST)
                },
            )
    yield (
        f"batch {PEER_BATCH}\ncontext {figures.settings.contexts[0]}\nall sampling",
        {mode: [point.split for point in figures.features(mode)] for mode in (EXACT, FAST)},
    )


def _stack(axes: Axes, place: float, splits: list[StepSplit]) -> None:
    bottom = 0.0
    for part, _, colour in _PARTS:
        height = spread(getattr(split, part) for split in splits).median * 1000
        axes.bar(place, height, 0.85, bottom=bottom, color=colour)
        bottom += height
    whisker(axes, place, spread(split.step_s for split in splits).scaled(1000))


def _plot_rates(axes: Axes, figures: Figures, title: str, batch: int) -> None:
    """Decode tokens per second of everybody who took part."""
    names = [PEER, EXACT, FAST] if figures.settings.peers else [EXACT, FAST]
    for place, name in enumerate(names):
        if batch == 1:
            rate = figures.compared(name, lambda comparison: 1 / step_s(comparison))
        else:
            rate = figures.compared(name, decode_tokens_per_s)
        axes.bar(place, rate.median, 0.7, color=_COLOURS[name])
        whisker(axes, place, rate)
    axes.set_xticks(range(len(names)), [_LABELS[name].replace(" (", "\n(") for name in names], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("decode tokens/s")
    axes.set_title(f"{title}, prompts of {figures.settings.peer_prompt} tokens", fontsize=11, pad=26)
    clean(axes)
