"""The command `baton`: what each word on the command line means.

Only parses and reports; every command lives in a module of its own and is imported when it is called,
so that `baton status` does not wait for what `baton up` needs. A command that cannot do what was asked
raises CommandError: one line on stderr, the log's last lines where there are any, exit status 1.
"""

import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from cli.bench import app as bench_app
from cli.errors import CommandError, StartFailed
from cli.run_folder import RunFolder
from cli.terminal import say

app = typer.Typer(
    name="baton",
    help="Disaggregated LLM serving: prefill and decode over gRPC, resumable streams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {version('baton-serve')}")
        raise typer.Exit


class Engine(StrEnum):
    """Which engine the workers run."""

    HF = "hf"
    SIM = "sim"


@app.callback()
def baton(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Disaggregated LLM serving: prefill and decode over gRPC, resumable streams."""


@app.command()
def up(
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers.", show_default="1")] = None,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    gateways: Annotated[int, typer.Option(min=1, help="Gateways, on adjacent ports.")] = 1,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="No prefill workers: decode runs prompts itself.")
    ] = False,
    engine: Annotated[
        Engine, typer.Option(envvar="BATON_ENGINE", help="hf: a real model; sim: timings only.")
    ] = Engine.HF,
    model: Annotated[
        Path | None,
        typer.Option(
            envvar="BATON_MODEL", help="Hugging Face model folder.", show_default="the engine's own"
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first gateway.")] = 8000,
    restart: Annotated[bool, typer.Option("--restart", help="Restart processes that die.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until everything must be ready.")] = 120,
    sim_prefill_ms_per_token: Annotated[
        float,
        typer.Option(
            envvar="BATON_SIM_PREFILL_MS_PER_TOKEN", min=0, help="Simulated prefill, ms per prompt token."
        ),
    ] = 0.0,
    sim_token_ms: Annotated[
        float, typer.Option(envvar="BATON_SIM_TOKEN_MS", min=0, help="Simulated time between tokens.")
    ] = 33.0,
    sim_jitter_ms: Annotated[
        float, typer.Option(envvar="BATON_SIM_JITTER_MS", min=0, help="Most that it varies, either way.")
    ] = 8.0,
    sim_seed: Annotated[int, typer.Option(envvar="BATON_SIM_SEED", help="Of the jitter.")] = 42,
) -> None:
    """Start the local stack in the background; return when every process is ready."""
    from cli.plan import StackOptions
    from cli.up import up as start_stack

    if colocated and prefill:
        raise CommandError(f"--colocated has no prefill workers: leave out --prefill {prefill}")
    options = StackOptions(
        prefill=1 if prefill is None else prefill,
        decode=decode,
        gateways=gateways,
        colocated=colocated,
        engine=engine.value,
        port=port,
        sim_prefill_ms_per_token=sim_prefill_ms_per_token,
        sim_token_ms=sim_token_ms,
        sim_jitter_ms=sim_jitter_ms,
        sim_seed=sim_seed,
    )
    start_stack(_here(), options, model, restart=restart, timeout_s=timeout)


@app.command()
def down() -> None:
    """Stop the processes that `baton up` started here, also after a crash."""
    from cli.down import down as stop_stack

    stop_stack(_here())


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array on stdout.")] = False,
) -> None:
    """Show each process: is it ready, what runs, how many KV blocks are held."""
    from cli.status import print_json, print_table, read_status

    rows = read_status(_here())
    if as_json:
        print_json(rows)
    else:
        print_table(rows)


@app.command()
def chat(
    url: Annotated[str | None, typer.Option(help="A gateway.", show_default="the stack here")] = None,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", help="Key for the gateway.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
) -> None:
    """Talk to the model in the terminal; a cut connection is resumed."""
    from cli.chat import chat as talk
    from cli.up import running_url

    talk(url or running_url(_here()), api_key, max_tokens, sys.stdin)


@app.command()
def demo(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port, if a stack must be started.")] = 8000,
) -> None:
    """Ask the real model, drop the connection midway, resume it, and check that the halves join."""
    from cli.demo import demo as show

    show(_here(), port)


@app.command()
def trace(
    reply_id: Annotated[str, typer.Argument(metavar="REPLY", help="A reply's ID.")],
    url: Annotated[str | None, typer.Option(help="A gateway.", show_default="the stack here")] = None,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", help="Key for the gateway.")] = "",
) -> None:
    """Show where the time to a reply's first token went."""
    from cli.trace import trace as show_trace
    from cli.up import running_url

    show_trace(url or running_url(_here()), reply_id, api_key=api_key)


def _here() -> RunFolder:
    return RunFolder(Path.cwd())


def main() -> None:
    """Entry point of the `baton` script."""
    try:
        app()
    except CommandError as error:
        say(f"baton: {error}")
        if isinstance(error, StartFailed) and error.log_tail:
            say("\n".join(f"  | {line}" for line in error.log_tail.splitlines()))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
