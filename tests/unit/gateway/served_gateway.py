"""A gateway's HTTP surface on a loopback port, over the in-memory log, with replies that a test writes.

Everything above the workers is real: the server, the routes, the hub, the log. `ScriptedGenerations`
stands where workers would be called: the test says what is emitted, and when.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.app import create_app
from gateway.auth import ApiKeys
from gateway.context import Gateway
from gateway.errors import GatewayError
from gateway.event_log import EventLog, ReplyMeta
from gateway.event_log_memory import MemoryEventLog
from gateway.events import EventKind
from gateway.owned_reply import OwnedReply
from gateway.replies import ReplyHub
from gateway.router import ServedModel
from gateway.sampling import ReplySpec
from gateway.server import GatewayServer, make_server
from gateway.settings import GatewaySettings
from observability.telemetry import build
from tests.waiting import eventually

MODEL = ServedModel(name="scripted", fingerprint="f0", max_model_len=100, created=1_700_000_000)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Script = Callable[[OwnedReply], Awaitable[None]]


def begin(reply: OwnedReply, num_choices: int = 1) -> None:
    created = {"created": reply.meta.created, "model": reply.meta.model}
    reply.emit(EventKind.CREATED, {**created, "num_prompt_tokens": 2, "num_choices": num_choices})
    reply.emit(EventKind.IN_PROGRESS, {})
    for choice in range(num_choices):
        reply.emit(EventKind.ITEM_START, {"choice": choice})
        reply.emit(EventKind.PART_START, {"choice": choice})


def say(reply: OwnedReply, text: str, choice: int = 0) -> None:
    reply.emit(EventKind.DELTA, {"choice": choice, "text": text, "token_ids": [1], "at_ms": 1.0})


def finish(reply: OwnedReply, reason: str = "stop", num_tokens: int = 2) -> None:
    for kind in (EventKind.TEXT_DONE, EventKind.PART_DONE, EventKind.ITEM_DONE):
        reply.emit(kind, {"choice": 0})
    ending = {
        "choice": 0,
        "reason": reason,
        "token_ids": [],
        "num_generated_tokens": num_tokens,
        "at_ms": 2.0,
    }
    reply.emit(EventKind.FINISH, ending)
    usage = {"prompt_tokens": 2, "completion_tokens": num_tokens, "total_tokens": 2 + num_tokens}
    reply.emit(EventKind.USAGE, {**usage, "cached_tokens": 0})
    reply.emit(EventKind.DONE, {"timings": {"ttft": 1.0}, "at_ms": 2.0})


def fail(reply: OwnedReply, error: GatewayError) -> None:
    reply.emit(EventKind.ERROR, error.payload(3.0))


def saying(*texts: str) -> Script:
    """A reply that says these and ends."""

    async def script(reply: OwnedReply) -> None:
        for text in texts:
            say(reply, text)
            await reply.flushed()
        finish(reply, num_tokens=len(texts))

    return script


async def until_stopped(reply: OwnedReply) -> None:
    """A reply that says nothing until it is cancelled."""
    await reply.stop.wait()
    finish(reply, "cancelled", 0)


@dataclass
class ScriptedGenerations:
    """Emits what `script` says. `refusal` is raised instead; `admits` holds requests back while unset."""

    hub: ReplyHub
    script: Script = field(default_factory=lambda: saying("Hello", " world"))
    refusal: GatewayError | None = None
    admits: asyncio.Event = field(default_factory=asyncio.Event)
    specs: list[ReplySpec] = field(default_factory=list)
    replies: list[OwnedReply] = field(default_factory=list)
    num_waiting: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, spec: ReplySpec, *, arrived: float) -> OwnedReply:
        if self.refusal is not None:
            raise self.refusal
        self.num_waiting += 1
        try:
            await self.admits.wait()
        finally:
            self.num_waiting -= 1
        meta = ReplyMeta(
            reply_id=uuid.uuid4().hex,
            owner_hash=spec.owner_hash,
            model=spec.model,
            fingerprint=spec.fingerprint,
            format=spec.format,
            format_options=spec.format_options,
            traceparent=TRACEPARENT,
            on_disconnect=spec.on_disconnect,
            created=1_700_000_001,
        )
        reply = await self.hub.open(meta, arrived=arrived)
        begin(reply, spec.num_choices)
        self.specs.append(spec)
        self.replies.append(reply)
        task = asyncio.create_task(self._run(reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return reply

    async def _run(self, reply: OwnedReply) -> None:
        await self.script(reply)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass
class ScriptedRouter:
    model: ServedModel | None = MODEL
    is_ready: bool = True

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return {"decode": {"configured": 1, "discovered": 0, "unresolved": 0, "up": int(self.is_ready)}}


class WordTokenizer:
    """A token for each word."""

    vocab_size = 1000

    async def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        return tuple(range(sum(len(message["content"].split()) for message in messages)))


@dataclass
class Served:
    """A running gateway and a client of it."""

    gateway: Gateway
    generations: ScriptedGenerations
    router: ScriptedRouter
    spans: InMemorySpanExporter
    server: GatewayServer
    http: httpx.AsyncClient

    @property
    def port(self) -> int:
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def reply(self) -> OwnedReply:
        """The one that was started last."""
        return self.generations.replies[-1]

    @property
    def is_followed(self) -> bool:
        """Whether any stream is open."""
        return bool(self.gateway.open_streams)

    async def chat(self, **fields: Any) -> httpx.Response:
        """A buffered or streamed completion, read to its end."""
        return await self.http.post("/v1/chat/completions", json={**QUESTION, **fields})

    async def streamed(self, **fields: Any) -> httpx.Response:
        """A streamed completion that must begin well."""
        response = await self.chat(stream=True, **fields)
        assert response.status_code == 200
        return response

    async def get(self, path: str, **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.get(path, headers=given)


def is_openai_error(response: httpx.Response) -> bool:
    """Whether a body has the shape that OpenAI's clients expect of a refusal."""
    error = response.json()["error"]
    return set(error) == {"message", "type", "param", "code"} and bool(error["message"] and error["type"])


QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello"}]}


@asynccontextmanager
async def served(
    folder: Path, *, keys: tuple[str, ...] = (), log: EventLog | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serves until the block ends. `settings` are fields of GatewaySettings."""
    (folder / "tokenizer.json").write_text("{}")
    parsed = GatewaySettings(model=folder, decode_workers=("127.0.0.1:1",), **settings)
    spans = InMemorySpanExporter()
    telemetry = build("gateway", "test", span_exporter=spans)
    hub = ReplyHub(
        log or MemoryEventLog("g1"),
        gateway_id="g1",
        lease_s=parsed.lease_s,
        resume_grace_s=parsed.resume_grace_s,
    )
    generations, router = ScriptedGenerations(hub), ScriptedRouter()
    generations.admits.set()
    gateway = Gateway(
        parsed,
        hub,
        router,  # type: ignore[arg-type]
        generations,  # type: ignore[arg-type]
        WordTokenizer(),  # type: ignore[arg-type]
        ApiKeys(keys),
        telemetry,
    )
    await hub.start()
    server = make_server(
        create_app(gateway),
        "127.0.0.1:0",
        drain_s=1.0,
        stalled_client_s=parsed.slow_client_s,
        on_drain=lambda: None,
    )
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    try:
        async with httpx.AsyncClient(timeout=20) as http:
            world = Served(gateway, generations, router, spans, server, http)
            http.base_url = httpx.URL(f"http://127.0.0.1:{world.port}")
            yield world
    finally:
        server.should_exit = True
        await serving
        await generations.close()
        await hub.close()
        telemetry.shutdown()
