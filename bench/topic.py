"""One table of a benchmark's report, with what its figures mean under it."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Topic:
    """One table, and under it what its figures mean."""

    title: str
    definition: str
    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self.title, style="bold")
        yield self.table
        yield Padding(Text(self.definition, style="dim"), (0, 1))


def make_topic(title: str, definition: str, *columns: str) -> Topic:
    """An empty table; the first column holds labels, the others figures."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return Topic(title, definition, table)
