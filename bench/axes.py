"""What the benchmarks' pictures have in common: ranges on bars, and bare axes."""

from matplotlib.axes import Axes

from bench.statistics import Spread


def whisker(axes: Axes, place: float, value: Spread) -> None:
    """The range, and the median as a number above it."""
    errors = [[value.median - value.low], [value.high - value.median]]
    axes.errorbar(place, value.median, yerr=errors, color="#333333", capsize=3, linewidth=1)
    axes.annotate(
        _number(value.median),
        (place, value.high),
        (0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )


def _number(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def clean(axes: Axes) -> None:
    """No frame, faint lines for the eye."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.grid(visible=True, color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.margins(y=0.12)
