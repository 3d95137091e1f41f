"""`baton bench threshold`: start, measure, print, write. The last line of stdout is the RESULT line."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from bench.interference.arrangements import passed_on
from bench.machine import Machine, this_machine
from bench.threshold.figures import Figures
from bench.threshold.measure import measure
from bench.threshold.report import result, result_line, sentences, topics
from bench.threshold.settings import Settings
from bench.threshold.workers import make_plan, own_cores, usable_cores
from bench.workers import running, watched

_LEAST_WIDTH = 150  # columns, where stdout is a file


def run(settings: Settings, output: Path | None) -> None:
    """Raises BenchFailed, and StartFailed when a worker does not start or dies."""
    machine = this_machine()
    cores = usable_cores()
    plan = make_plan(settings, cores)
    theirs = passed_on(os.environ, plan)
    if rest := cores[2 * settings.threads :]:
        os.sched_setaffinity(0, set(rest))  # for this process
    vocab_size = Tokenizer.from_file(str(settings.model / "tokenizer.json")).get_vocab_size()
    with running(plan, os.environ, _progress) as entries:
        rounds = asyncio.run(watched(entries, measure(settings, entries, vocab_size, _progress)))
    figures = Figures(settings, rounds)
    console = Console(width=None if sys.stdout.isatty() else _LEAST_WIDTH, highlight=False)
    console.print(
        f"{settings.model.name}, {settings.precision}: {machine.cpu}, torch {machine.torch}; "
        f"{_whereabouts(settings, cores, machine)}; the client asks decode directly"
    )
    if theirs:
        console.print(
            "from the environment: " + ", ".join(f"{name}={value}" for name, value in theirs.items())
        )
    for topic in topics(figures):
        console.print()
        console.print(topic)
    console.print()
    for sentence in sentences(figures):
        console.print(sentence)
    if output is not None:
        _write(output, figures, machine, theirs)
    print(result_line(figures), flush=True)


def _whereabouts(settings: Settings, cores: Sequence[int], machine: Machine) -> str:
    if not own_cores(settings, cores, 0):
        return f"both workers and the client share {machine.num_cores} cores, for want of one each"
    shared = "shares them" if len(cores) == 2 * settings.threads else "runs on the others"
    return f"{settings.threads} of {machine.num_cores} cores for each worker; the client {shared}"


def _write(output: Path, figures: Figures, machine: Machine, theirs: dict[str, str]) -> None:
    from bench.threshold.plot import save_plot

    output.mkdir(exist_ok=True)
    document = {
        "command": "baton bench threshold",
        "machine": asdict(machine),
        "settings": asdict(figures.settings) | {"environment": theirs},
        "rounds": [asdict(each) for each in figures.rounds],
        "result": result(figures),
    }
    (output / "threshold.json").write_text(json.dumps(document, default=str) + "\n")
    save_plot(figures, output / "threshold.png")


def _progress(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)
