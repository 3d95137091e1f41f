"""`baton bench transfer`: start, measure, print, write. The last line of stdout is the RESULT line."""

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from bench.machine import this_machine
from bench.transfer import raw
from bench.transfer.measure import (
    FLOAT16,
    GRPC,
    INT8,
    SHARED,
    TCP,
    Bulk,
    Overlap,
    measure_bulk,
    measure_overlap,
)
from bench.transfer.puller import connected, identity_of, write_model
from bench.transfer.report import result_line, topics
from bench.transfer.settings import Settings
from bench.workers import running, watched
from cli import ports
from cli.plan import Launch, Plan
from services.engine.request import ModelIdentity
from services.kv import page
from services.kv.payload import PayloadFormat
from services.settings import KvTransport

_LEAST_WIDTH = 150  # columns, where stdout is a file
_MIB = 1024 * 1024
_WAYS = {
    GRPC: (KvTransport.GRPC, PayloadFormat.EXACT),
    FLOAT16: (KvTransport.GRPC, PayloadFormat.FLOAT16),
    INT8: (KvTransport.GRPC, PayloadFormat.INT8),
    TCP: (KvTransport.TCP, PayloadFormat.EXACT),
    SHARED: (KvTransport.AUTO, PayloadFormat.EXACT),
}


def run(settings: Settings, output: Path | None) -> None:
    """Raises BenchFailed, and StartFailed when a worker does not start or dies."""
    real_address, simulated_address, raw_address = (f"{ports.HOST}:{port}" for port in ports.pick(3))
    with (
        TemporaryDirectory(prefix="baton-bench-") as folder,
        running(_plan(settings.model, "hf", real_address, settings), os.environ, _progress) as real,
    ):
        identity = asyncio.run(watched(real, identity_of(real_address)))
        write_model(Path(folder), identity)
        plan = _plan(Path(folder), "sim", simulated_address, settings)
        with running(plan, os.environ, _progress) as simulated, raw.serving(raw_address):
            measuring = _measure(settings, identity, real_address, simulated_address, raw_address)
            bulk, overlaps = asyncio.run(watched([*real, *simulated], measuring))
    console = Console(width=None if sys.stdout.isatty() else _LEAST_WIDTH, highlight=False)
    machine = this_machine()
    console.print(
        f"{settings.model.name}: {machine.cpu}, {machine.num_cores} cores, torch {machine.torch}; both ends "
        f"and the bare stream share them; pages of at most {settings.page_bytes / _MIB:g} MiB"
    )
    for topic in topics(bulk, overlaps):
        console.print()
        console.print(topic)
    line = result_line(settings, bulk, overlaps)
    if output is not None:
        _write(output, settings, bulk, overlaps, line)
    print(line, flush=True)


async def _measure(
    settings: Settings, identity: ModelIdentity, real_address: str, simulated_address: str, raw_address: str
) -> tuple[Bulk, dict[int, Overlap]]:
    num_tokens = max(2, settings.num_bytes // (page.bytes_per_token_layer(identity) * identity.num_layers))
    most_tokens = max(num_tokens, *settings.prompts)
    async with AsyncExitStack() as exits:
        pullers = {}
        for way, (transport, form) in _WAYS.items():
            pullers[way] = await exits.enter_async_context(
                connected(simulated_address, settings.page_bytes, most_tokens)
            )
            await pullers[way].use(transport, form)
        real = await exits.enter_async_context(connected(real_address, settings.page_bytes, most_tokens))
        bulk = await measure_bulk(settings, num_tokens, pullers, raw_address, _progress)
        return bulk, await measure_overlap(settings, real, pullers[GRPC], _progress)


def _plan(model: Path, engine: str, address: str, settings: Settings) -> Plan:
    variables = {
        "BATON_MODEL": str(model),
        "BATON_ENGINE": engine,
        "BATON_DEVICE": "cpu",
        "BATON_PRECISION": settings.precision.value,
        "BATON_LISTEN": address,
        "BATON_MAX_PAGE_BYTES": str(settings.page_bytes),
        "BATON_KV_MEMORY_MB": "2048",
        "BATON_DRAIN_S": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if engine == "sim":
        variables |= {
            "BATON_SIM_TOKEN_MS": "0",
            "BATON_SIM_JITTER_MS": "0",
            "BATON_SIM_PREFILL_MS_PER_TOKEN": "0",
        }
    command = (sys.executable, "-m", "services.prefill")
    return Plan((Launch("prefill-0", address, command, variables),), notices=())


def _write(output: Path, settings: Settings, bulk: Bulk, overlaps: dict[int, Overlap], line: str) -> None:
    from bench.transfer.plot import save_plot

    output.mkdir(exist_ok=True)
    document = {
        "command": "baton bench transfer",
        "machine": asdict(this_machine()),
        "settings": asdict(settings),
        "bulk": asdict(bulk),
        "overlap": {length: asdict(overlap) for length, overlap in overlaps.items()},
        "result": json.loads(line.removeprefix("RESULT ")),
    }
    (output / "transfer.json").write_text(json.dumps(document, default=str) + "\n")
    save_plot(bulk, overlaps, output / "transfer.png")


def _progress(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)
