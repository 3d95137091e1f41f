"""`baton demo`: the main job with everything real, and a check that it holds.

A question to the model, a reply streamed from the first token on, the socket closed in the middle, the
rest picked up by event ID on a new connection. Then the reply is read once more from its first event,
and the two halves must be exactly that. Raises CommandError if anything does not hold.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from cli import stack
from cli.errors import CommandError
from cli.plan import StackOptions
from cli.raw_stream import RawStream
from cli.run_folder import RunFolder
from cli.trace import trace
from cli.up import running_url, up
from client.sse import ServerSentEvent

_QUESTION = "How does a relay race work, and why must the runners not drop the baton?"
CUT_AFTER_PIECES = 24  # of text: early in the reply, well after the first token


@dataclass(slots=True)
class Half:
    """What came over one connection."""

    events: list[ServerSentEvent] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text_of(event) for event in self.events)

    @property
    def last_event_id(self) -> str:
        return self.events[-1].id if self.events else ""


def demo(run: RunFolder, port: int) -> None:
    """Runs on the stack here, started if there is none, and leaves it up.

    Raises:
        CommandError: something failed, or the halves do not join.
    """
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not stack.running(run):
        up(run, StackOptions(port=port), None, restart=False, timeout_s=120)
    url = running_url(run)
    show(console, url)
    console.print(f"\nThe stack stays up. Chat page: [bold]{url}/[/]   stop it: [bold]make down[/]")
    console.print(f"(or {Path(sys.executable).with_name('baton')} status | chat | down)", markup=False)


def show(console: Console, url: str) -> None:
    """The demo proper, against any gateway. Raises CommandError if something does not hold."""
    console.print(f"\n[bold]Question:[/] {_QUESTION}")
    console.print("[dim]first connection: POST /v1/chat/completions[/]")
    first = ask_and_drop(console, url)
    reply_id = first.last_event_id.rpartition(":")[0]
    console.print(f"\n[bold red]-- socket closed after event {first.last_event_id} --[/]")
    path = f"/v1/streams/{reply_id}"
    console.print(f"[dim]second connection: GET {path}, Last-Event-ID: {first.last_event_id}[/]")
    second = read_to_end(console, url, path, first.last_event_id)
    console.print("\n")
    failures = []
    for claim, holds in checks(url, path, first, second):
        console.print("  ok " if holds else "  NOT", style="green" if holds else "bold red", end=" ")
        console.print(claim, markup=False)
        if not holds:
            failures.append(claim)
    console.print()
    trace(url, reply_id, api_key=_api_key())
    if failures:
        raise CommandError(f"the demo found that this does not hold: {'; '.join(failures)}")


def _open(url: str, method: str, path: str, **more: Any) -> RawStream:
    return RawStream(url, method, path, api_key=_api_key(), **more)


def _api_key() -> str:
    return os.environ.get("BATON_API_KEY", "")


def ask_and_drop(console: Console, url: str) -> Half:
    """Asks, and closes the socket in mid-reply. Raises CommandError if the reply is over before that."""
    half, num_pieces = Half(), 0
    request = {
        "messages": [{"role": "user", "content": _QUESTION}],
        "stream": True,
        "temperature": 0.7,
        "seed": 7,
        "min_tokens": 4 * CUT_AFTER_PIECES,
        "max_tokens": 112,
    }
    with _open(url, "POST", "/v1/chat/completions", body=request) as stream:
        for event in stream.events():
            half.events.append(event)
            text = text_of(event)
            console.print(text, end="", style="cyan", markup=False)
            num_pieces += bool(text)
            if num_pieces == CUT_AFTER_PIECES:
                stream.drop()
                return half
    raise CommandError(f"the reply ended after {num_pieces} pieces of text: {half.events[-1:]}")


def read_to_end(console: Console, url: str, path: str, last_event_id: str) -> Half:
    """Resumes on a new connection. Raises CommandError if that one breaks off."""
    half = Half()
    with _open(url, "GET", path, last_event_id=last_event_id) as stream:
        for event in stream.events():
            half.events.append(event)
            console.print(text_of(event), end="", style="magenta", markup=False)
        if not stream.ended:
            raise CommandError(f"the resumed stream broke off after event {half.last_event_id}")
    return half


def checks(url: str, path: str, first: Half, second: Half) -> Iterator[tuple[str, bool]]:
    """What the demo claims, each with whether it holds."""
    whole = Half()
    with _open(url, "GET", path) as stream:
        whole.events.extend(stream.events())
    joined = first.events + second.events
    yield (
        f"{len(first.events)} events, cut, {len(second.events)} events: the two halves are the reply, "
        f"event by event, as a replay from the first event shows it ({len(whole.events)})",
        joined == whole.events and bool(second.events),
    )
    yield (
        f"no character missing or twice: {len(first.text)} + {len(second.text)} = {len(whole.text)}",
        first.text + second.text == whole.text and bool(second.text),
    )
    sequence = [int(event.id.rpartition(":")[2].partition(".")[0]) for event in joined]
    yield (
        f"event IDs rise strictly, {sequence[0]} to {sequence[-1]}, and [DONE] comes once, at the end",
        all(a < b for a, b in itertools.pairwise(sequence))
        and [event.data for event in joined].count("[DONE]") == 1
        and joined[-1].data == "[DONE]",
    )


def text_of(event: ServerSentEvent) -> str:
    """Reply text of an OpenAI chat chunk. Raises CommandError if it is an error."""
    if event.data == "[DONE]":
        return ""
    chunk: dict[str, Any] = json.loads(event.data)
    if error := chunk.get("error"):
        raise CommandError(f"the reply failed: {error.get('message')}")
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
