"""The two ends of a handover, without the wire between them: all that this benchmark asks of a sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.errors import BenchFailed
from services.engine.interface import Engine
from services.engine.interface import Sequence as EngineSequence
from services.engine.kv_cache import KvLayout
from services.engine.page_range import PageRange
from services.engine.request import (
    EngineRequest,
    FirstTokenSampled,
    SampledToken,
    SequenceFinished,
    SubmitMode,
    TextGenerated,
)


@dataclass(frozen=True, slots=True)
class Page:
    """One page, copied out.

    Attributes:
        kv: (layers, 2, tokens, kv_heads, head_size)
    """

    where: PageRange
    kv: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill leads to."""

    first_token: SampledToken
    pages: list[Page]


async def run_here(engine: Engine, request: EngineRequest) -> list[int]:
    """The whole reply, with nothing handed over."""
    sequence = engine.submit(request, SubmitMode.LOCAL)
    try:
        return await _read(sequence)
    finally:
        sequence.release()


async def prefill(engine: Engine, layout: KvLayout, request: EngineRequest, page_tokens: int) -> Prefilled:
    """Computes a prompt's cache, and copies it out in pages of at most `page_tokens`."""
    sequence = engine.submit(request, SubmitMode.PREFILL_ONLY)
    try:
        async for event in sequence.events():
            if isinstance(event, FirstTokenSampled):
                pages = _export(sequence, layout.num_layers, request.num_context_tokens, page_tokens)
                return Prefilled(event.token, list(pages))
    finally:
        sequence.release()
    raise BenchFailed("a prefill ended without a first token")


async def go_on(
    engine: Engine, request: EngineRequest, first_token: SampledToken, pages: Sequence[Page]
) -> list[int]:
    """The reply from a cache that is handed over, its first token included."""
    sequence = engine.submit(request, SubmitMode.HANDOFF)
    try:
        await sequence.reserved()
        if sequence.num_held_tokens:
            raise BenchFailed("the engine's prefix cache would stand in for the pages")
        sequence.accept_first_token(first_token)
        for page in pages:
            payload = page.kv.reshape(-1).view(torch.uint8).numpy().data
            sequence.kv.import_page(page.where, payload)
        sequence.join()
        return await _read(sequence)
    finally:
        sequence.release()


def _export(sequence: EngineSequence, num_layers: int, num_tokens: int, page_tokens: int) -> Iterator[Page]:
    for start in range(0, num_tokens, page_tokens):
        where = PageRange(0, num_layers, start, min(start + page_tokens, num_tokens))
        yield Page(where, sequence.kv.export_page(where))


async def _read(sequence: EngineSequence) -> list[int]:
    token_ids: list[int] = []
    async for event in sequence.events():
        if isinstance(event, TextGenerated | SequenceFinished):
            token_ids += [token.token_id for token in event.tokens]
    return token_ids
