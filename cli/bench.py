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

    _check_model(model)
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


@app.command()
def interference(
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face model folder.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured, by turns.")] = 3,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Seconds of a window, at least.", show_default="60")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a prompt that arrives.", show_default="1500")
    ] = None,
    every: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds between prompts.", show_default="8")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, max=24, help="Steady streams.")] = 4,
    precision: Annotated[Precision, typer.Option(help="Of the workers.")] = Precision.FP32,
    floor: Annotated[
        bool, typer.Option("--floor", help="Also the split with nothing handed over: what the machine costs.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A self-check of under a minute; its figures mean nothing.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for interference.json (every gap) and interference.png.")
    ] = None,
) -> None:
    """Token gaps of steady streams while long prompts arrive: split against colocated, on equal cores.

    Takes about eight minutes a round.
    """
    from bench.errors import BenchFailed
    from bench.interference.run import run
    from bench.interference.settings import Settings
    from cli.model import ensure_default_model

    _check_model(model)
    if quick and (duration or prompt_tokens or every):
        raise CommandError(
            "--quick has times and prompts of its own: leave out --duration, --prompt-tokens, --every"
        )
    _check_output(output)
    try:
        settings = Settings(
            model=model.resolve() if model else ensure_default_model(),
            rounds=rounds,
            duration_s=duration or 60.0,
            prompt_tokens=prompt_tokens or 1500,
            every_s=every or 8.0,
            streams=streams,
            precision=precision,
            floor=floor,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    try:
        run(settings.quick() if quick else settings, output)
    except BenchFailed as error:
        raise CommandError(f"no figures: {error}") from error


@app.command()
def transfer(
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face model folder.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed, by turns.")] = 15,
    megabytes: Annotated[
        int | None, typer.Option(min=1, help="Of KV cache (MiB).", show_default="256")
    ] = None,
    page_bytes: Annotated[
        int | None, typer.Option(min=1024, max=4 * 1024 * 1024, help="Of a page.", show_default="2097152")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompt lengths, in tokens.", show_default="256,1024,4096,8000")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A self-check of half a minute; its figures mean nothing.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for transfer.json (every round) and transfer.png.")
    ] = None,
) -> None:
    """KV cache from process to process: GB/s by gRPC and shared memory, and what prompts wait for.

    Takes about five minutes.
    """
    import observability.logs
    from bench.errors import BenchFailed
    from bench.transfer.run import run
    from bench.transfer.settings import PAGE_BYTES, Settings
    from cli.model import ensure_default_model

    _check_model(model)
    if quick and (prompts or megabytes):
        raise CommandError("--quick has sizes of its own: leave out --prompts and --megabytes")
    _check_output(output)
    try:
        settings = Settings(
            model=model.resolve() if model else ensure_default_model(),
            rounds=rounds,
            num_bytes=(megabytes or 256) * 1024 * 1024,
            page_bytes=page_bytes or PAGE_BYTES,
            prompts=_numbers("--prompts", prompts or "256,1024,4096,8000"),
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    observability.logs.configure("bench")
    try:
        run(settings.quick() if quick else settings, output)
    except BenchFailed as error:
        raise CommandError(f"no figures: {error}") from error


@app.command()
def threshold(
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face model folder.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured, by turns.")] = 5,
    lengths: Annotated[
        str | None, typer.Option(help="Prompt lengths, in tokens.", show_default="2,4,8,...,512")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, max=24, help="Steady streams.")] = 4,
    stall_bound: Annotated[
        float, typer.Option(min=1, help="Longest gap that running streams may get, in idle p99s of theirs.")
    ] = 2.0,
    threads: Annotated[int, typer.Option(min=1, help="torch threads of each worker.")] = 1,
    precision: Annotated[Precision, typer.Option(help="Of the workers.")] = Precision.FP32,
    quick: Annotated[
        bool, typer.Option("--quick", help="A self-check of under a minute; its figures mean nothing.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for threshold.json (every prompt) and threshold.png.")
    ] = None,
) -> None:
    """Up to which length decode should compute prompts itself: BATON_LOCAL_PREFILL_MAX_TOKENS, measured.

    Takes about two minutes a round.
    """
    from bench.errors import BenchFailed
    from bench.threshold.run import run
    from bench.threshold.settings import LENGTHS, Settings
    from cli.model import ensure_default_model

    _check_model(model)
    if quick and lengths:
        raise CommandError("--quick has lengths of its own: leave out --lengths")
    _check_output(output)
    try:
        settings = Settings(
            model=model.resolve() if model else ensure_default_model(),
            rounds=rounds,
            lengths=_numbers("--lengths", lengths) if lengths else LENGTHS,
            streams=streams,
            stall_bound=stall_bound,
            threads=threads,
            precision=precision,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    try:
        run(settings.quick() if quick else settings, output)
    except BenchFailed as error:
        raise CommandError(f"no figures: {error}") from error


@app.command()
def payload(
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face model folder.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many, of different prose.", show_default="24")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each prompt.", show_default="400")
    ] = None,
    reply_tokens: Annotated[int | None, typer.Option(min=2, help="Of each reply.", show_default="64")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A self-check of half a minute; its figures mean nothing.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every comparison here.")] = None,
) -> None:
    """What replies lose when the KV cache is handed over in float16 or int8.

    Takes about ten minutes.
    """
    import observability.logs
    from bench.errors import BenchFailed
    from bench.payload.run import run
    from bench.payload.settings import Settings
    from cli.model import ensure_default_model
    from services.engine.errors import UnsupportedModel

    _check_model(model)
    if quick and (prompts or prompt_tokens or reply_tokens):
        raise CommandError(
            "--quick has sizes of its own: leave out --prompts, --prompt-tokens and --reply-tokens"
        )
    _check_files(json_file, None)
    settings = Settings(
        model=model.resolve() if model else ensure_default_model(),
        prompts=prompts or 24,
        prompt_tokens=prompt_tokens or 400,
        reply_tokens=reply_tokens or 64,
    )
    observability.logs.configure("bench")
    try:
        run(settings.quick() if quick else settings, json_file)
    except UnsupportedModel as error:
        raise CommandError(f"{settings.model} cannot be served: {error}") from error
    except BenchFailed as error:
        raise CommandError(f"no figures: {error}") from error


def _check_model(model: Path | None) -> None:
    if model is not None and not (model / "config.json").is_file():
        raise CommandError(f"--model: {model} is not a model folder (no config.json)")


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
    _check_matplotlib("--plot")


def _check_output(output: Path | None) -> None:
    """Before the measurement, not after it."""
    if output is None:
        return
    if not output.absolute().parent.is_dir() or (output.exists() and not output.is_dir()):
        raise CommandError(f"--output: {output} is no folder, nor can it become one")
    _check_matplotlib("--output")


def _check_matplotlib(option: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"{option} needs matplotlib: pip install 'baton-serve[bench]'")
