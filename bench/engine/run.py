"""`baton bench engine`: measure, print, write. The last line of stdout is the RESULT line."""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engine.figures import Figures
from bench.engine.floor import count_weights
from bench.engine.measure import measure
from bench.engine.report import result_line, topics
from bench.engine.settings import Settings
from bench.machine import Machine, this_machine

_LEAST_WIDTH = 150  # columns, where stdout is a file


def run(settings: Settings, json_file: Path | None, plot_file: Path | None) -> None:
    """Raises BenchFailed, and UnsupportedModel for a model that cannot be served."""
    machine = this_machine()
    measured = asyncio.run(measure(settings, _progress))
    figures = Figures(settings, measured, count_weights(settings.model))
    console = Console(width=None if sys.stdout.isatty() else _LEAST_WIDTH, highlight=False)
    console.print(
        f"{settings.model.name}: {machine.cpu}, {settings.threads} of {machine.num_cores} cores; torch "
        f"{machine.torch}, transformers {machine.transformers}; fast mode: {settings.precision}"
    )
    for topic in topics(figures):
        console.print()
        console.print(topic)
    if json_file is not None:
        json_file.write_text(json.dumps(_document(figures, machine), indent=1, default=str) + "\n")
    if plot_file is not None:
        from bench.engine.plot import save_plot

        save_plot(figures, plot_file)
    print(result_line(figures), flush=True)


def _document(figures: Figures, machine: Machine) -> dict[str, object]:
    return {
        "command": "baton bench engine",
        "machine": asdict(machine),
        "settings": asdict(figures.settings),
        "rounds": [_without_replies(asdict(each)) for each in figures.rounds],
        "equal_replies": [asdict(agreement) for agreement in figures.agreements()],
        "result": figures.result(),
    }


def _without_replies(each: dict[str, Any]) -> dict[str, Any]:
    """Token IDs were compared; the counts are in `equal_replies`."""
    for comparison in each["comparisons"].values():
        del comparison["single_replies"], comparison["batch_replies"]
    return each


def _progress(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)
