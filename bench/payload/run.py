"""`baton bench payload`: measure, print, write. The last line of stdout is the RESULT line."""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.machine import this_machine
from bench.payload.measure import measure
from bench.payload.report import result, topic
from bench.payload.settings import Settings

_LEAST_WIDTH = 150  # columns, where stdout is a file


def run(settings: Settings, json_file: Path | None) -> None:
    """Raises BenchFailed, and UnsupportedModel for a model that cannot be served."""
    machine = this_machine()
    found = asyncio.run(measure(settings, _progress))
    figures = result(settings, found)
    console = Console(width=None if sys.stdout.isatty() else _LEAST_WIDTH, highlight=False)
    console.print(
        f"{settings.model.name}: {machine.cpu}, 1 of {machine.num_cores} cores; torch {machine.torch}"
    )
    console.print()
    console.print(topic(settings, found))
    if json_file is not None:
        document = {
            "command": "baton bench payload",
            "machine": asdict(machine),
            "settings": asdict(settings),
            "formats": {form: asdict(measured) for form, measured in found.items()},
            "result": figures,
        }
        json_file.write_text(json.dumps(document, default=str) + "\n")
    print("RESULT " + json.dumps(figures), flush=True)


def _progress(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)
