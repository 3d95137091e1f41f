"""The run as a picture: rates by way, and what is left of a transfer by prompt length."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from bench.axes import clean, whisker
from bench.statistics import spread
from bench.transfer.measure import WAYS, Bulk, Overlap

_BARE, _OURS = "#8da0cb", "#d95f02"


def save_plot(bulk: Bulk, overlaps: Mapping[int, Overlap], file: Path) -> None:
    """Writes a picture; the file's ending says which format."""
    figure = Figure(figsize=(11, 4.5), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    left, right = figure.subplots(1, 2)
    for place, way in enumerate(WAYS):
        rate = spread(bulk.rates[way]).scaled(1e-9)
        left.bar(place, rate.median, 0.7, color=_BARE if way.startswith("raw") else _OURS)
        whisker(left, place, rate)
    left.set_xticks(range(len(WAYS)), [way.replace("_", "\n") for way in WAYS])
    left.set_title(f"{bulk.num_bytes / 1e6:.0f} MB of KV cache, GB/s (median, range)", fontsize=10)
    for place, overlap in enumerate(overlaps.values()):
        share = spread(overlap.shares())
        right.bar(place, share.median, 0.7, color=_OURS)
        whisker(right, place, share)
    right.set_xticks(range(len(overlaps)), [f"{length:,}" for length in overlaps])
    right.set_xlabel("prompt tokens")
    right.set_title("share of the transfer left when the first token is known", fontsize=10)
    for axes in (left, right):
        axes.tick_params(axis="x", length=0)
        clean(axes)
    figure.suptitle("baton bench transfer", fontsize=12, fontweight="bold")
    figure.savefig(file)
