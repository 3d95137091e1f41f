"""`baton bench ...`: measurements of parts of the system, on this machine.

A benchmark that could not measure what it says raises CommandError; it never prints a figure instead.
"""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from cli.errors import CommandError
from services.engine.precision import Precision

app = typer.Typer(help="Measure a part of the system.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Keeps `engine` a word of its own while it is the only benchmark."""


@app.command()
def engine(
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face model folder.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="torch threads, ours and theirs.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured, by turns.")] = 3,
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes of the sweep.", show_default="1,4,16")
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Prompt tokens of the sweep.", show_default="128,512")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the fast mode.")] = Precision.FAST,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke test of three minutes; its figures say little.")
    ] = False,
    without_transformers: Annotated[
        bool, typer.Option("--without-transformers", help="Ours alone; no ratios.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every round here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw a picture (.png, .svg).")] = None,
) -> None:
    """Step time, tokens/s and overhead of the engine, against memory bandwidth and transformers.

    Takes five to ten minutes, by the number of batches and contexts.
    """
    import observability.logs
    from bench.engine.run import run
    from bench.engine.settings import Settings
    from bench.errors import BenchFailed
    from cli.model import ensure_default_model
    from services.engine.errors import UnsupportedModel

    if model is not None and not (model / "config.json").is_file():
        raise CommandError(f"--model: {model} is not a model folder (no config.json)")
    if quick and (batches or contexts):
        raise CommandError("--quick has batches and contexts of its own: leave out --batches and --contexts")
    _check_files(json_file, plot_file)
    settings = Settings(
        batches=_numbers("--batches", batches or "1,4,16"),
        contexts=_numbers("--contexts", contexts or "128,512"),
        model=model or ensure_default_model(),
        threads=threads,
        rounds=rounds,
        precision=precision,
        peers=not without_transformers,
    )
    observability.logs.configure("bench")
    try:
        run(settings.quick() if quick else settings, json_file, plot_file)
    except UnsupportedModel as error:
        raise CommandError(f"{settings.model} cannot be served: {error}") from error
    except BenchFailed as error:
        raise CommandError(f"no figures: {error}") from error


def _numbers(option: str, listed: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(number) for number in listed.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise CommandError(f"{option}: numbers from 1 on, like 1,16, not {listed!r}")
    return numbers


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Before the measurement, not after it."""
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{option}: there is no folder {file.parent}")
    if plot_file is None:
        return
    if plot_file.suffix not in (".png", ".svg", ".pdf"):
        raise CommandError(f"--plot: {plot_file} should end in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'baton-serve[bench]'")
