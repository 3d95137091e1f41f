"""`baton bench interference`: start, measure, print, write. The last line of stdout is the RESULT line."""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from bench.errors import BenchFailed
from bench.interference.arrangements import make_plan, passed_on
from bench.interference.figures import STALL, Figures
from bench.interference.measure import measure
from bench.interference.report import sentences, topics
from bench.interference.result import result, result_line
from bench.interference.settings import NUM_CORES, Settings
from bench.machine import Machine, this_machine
from bench.workers import running, watched

_LEAST_WIDTH = 150  # columns, where stdout is a file


def run(settings: Settings, output: Path | None) -> None:
    """Raises BenchFailed, and StartFailed when a worker does not start or dies."""
    machine = this_machine()
    cores = _cores()
    plan = make_plan(settings, cores)
    theirs = passed_on(os.environ, plan)
    vocab_size = Tokenizer.from_file(str(settings.model / "tokenizer.json")).get_vocab_size()
    with running(plan, os.environ, _progress) as entries:
        rounds = asyncio.run(watched(entries, measure(settings, entries, vocab_size, _progress)))
    figures = Figures(settings, rounds)
    console = Console(width=None if sys.stdout.isatty() else _LEAST_WIDTH, highlight=False)
    console.print(
        f"{settings.model.name}, {settings.precision}: {machine.cpu}, torch {machine.torch}; every "
        f"arrangement on {NUM_CORES} of {machine.num_cores} cores ({cores[0]} and {cores[1]}); the load "
        f"generator, a gRPC client of decode, {_whereabouts(cores)}"
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


def _cores() -> list[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise BenchFailed("this system cannot hold a process to a core, and equal cores are the point")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < NUM_CORES:
        raise BenchFailed(f"{NUM_CORES} cores are needed, and this process may use {len(cores)}")
    if len(cores) > NUM_CORES:
        os.sched_setaffinity(0, set(cores[NUM_CORES:]))  # the rest is for this process
    return cores


def _whereabouts(cores: list[int]) -> str:
    return "shares them" if len(cores) == NUM_CORES else "runs on the others"


def _write(output: Path, figures: Figures, machine: Machine, theirs: dict[str, str]) -> None:
    from bench.interference.plot import save_plot

    output.mkdir(exist_ok=True)
    document = {
        "command": "baton bench interference",
        "machine": asdict(machine),
        "settings": asdict(figures.settings) | {"environment": theirs},
        "stall": STALL,
        "rounds": [asdict(each) for each in figures.rounds],
        "result": result(figures),
    }
    (output / "interference.json").write_text(json.dumps(document, default=str) + "\n")
    save_plot(figures, output / "interference.png")


def _progress(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)
