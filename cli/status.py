"""`baton status`: one row per process of the stack here, each asked at the same time.

Invariant: a row says what its process answered just now; what a process did not say is None, never a
remembered value. A dead process is a row too: it is not ready.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from cli.probes import Answer, probe
from cli.run_folder import Entry, RunFolder


@dataclass(frozen=True, slots=True)
class Row:
    """One process. The fields' names and order are part of the interface."""

    role: str
    n: int
    address: str
    pid: int
    ready: bool
    draining: bool | None
    running: int | None
    waiting: int | None
    blocks_used: int | None  # by live sequences
    blocks_cached: int | None  # by the prefix cache only
    blocks_total: int | None
    detail: str  # why it is not ready
    alive: bool


def read_status(run: RunFolder) -> list[Row]:
    """Asks every recorded process; empty where nothing was started."""
    entries = run.entries()
    if not entries:
        return []
    with ThreadPoolExecutor(max_workers=min(len(entries), 32)) as pool:
        return list(pool.map(_read_row, entries))


def _read_row(entry: Entry) -> Row:
    answer = _ask(entry)
    return Row(
        entry.role,
        entry.number,
        entry.address,
        entry.record.pid,
        answer.ready,
        answer.draining,
        answer.running,
        answer.waiting,
        answer.blocks_used,
        answer.blocks_cached,
        answer.blocks_total,
        "" if answer.ready else answer.detail,
        entry.record.is_alive(),
    )


def _ask(entry: Entry) -> Answer:
    if not entry.record.is_alive():
        return Answer(ready=False, detail=f"died; see {entry.log}")
    if not entry.address:
        return Answer(ready=False, detail="its address is lost; stop it with `baton down`")
    return probe(entry.role, entry.address)


def print_json(rows: Sequence[Row]) -> None:
    """The rows as an array on stdout."""
    json.dump([asdict(row) for row in rows], sys.stdout, indent=2)
    print()


def print_table(rows: Sequence[Row]) -> None:
    """The rows for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not rows:
        console.print("Nothing was started here. `baton up` starts a stack.")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    has_cached = any(row.blocks_cached for row in rows)
    names = ["process", "address", "pid", "state", "running", "waiting", "KV blocks"]
    for name in [*names, "cached"] if has_cached else names:
        left = name in ("process", "address", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.role}-{row.n}",
            row.address,
            str(row.pid) if row.alive else "",
            _state(row),
            _number(row.running),
            _number(row.waiting),
            "" if row.blocks_total is None else f"{row.blocks_used} / {row.blocks_total}",
            *([_number(row.blocks_cached)] if has_cached else []),
        )
    console.print(table)
    for row in rows:
        if row.detail:
            console.print(f"{row.role}-{row.n}: {row.detail}", markup=False, soft_wrap=True)


def _state(row: Row) -> str:
    if row.draining:
        return "[yellow]draining[/]"
    if not row.alive:
        return "[red]dead[/]"
    return "[green]ready[/]" if row.ready else "[red]not ready[/]"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
