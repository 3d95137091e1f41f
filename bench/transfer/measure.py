"""The measurement, by turns: each round takes every way once."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from bench.transfer import raw
from bench.transfer.puller import Pull, Puller
from bench.transfer.settings import Settings

RAW_ASYNCIO, RAW_THREADED = "raw_asyncio", "raw_threaded"
GRPC, TCP, SHARED = "grpc", "tcp", "shared_memory"
FLOAT16, INT8 = "grpc_float16", "grpc_int8"
WAYS = (RAW_ASYNCIO, RAW_THREADED, GRPC, FLOAT16, INT8, TCP, SHARED)

Progress = Callable[[str], None]


@dataclass(slots=True)
class Bulk:
    """Bytes of KV cache per second, by way; a round's figures stand at the same place in each."""

    num_bytes: int = 0
    num_messages: int = 0
    rates: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})


@dataclass(slots=True)
class Overlap:
    """One prompt length.

    Attributes:
        left_s: first token in hand to last page verified, of each round.
        whole_s: the same transfer with nothing else to do, of each round.
        prefill_s: request sent to first token in hand, of each round.
    """

    num_bytes: int = 0
    left_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)

    def shares(self) -> list[float]:
        """What is left, of the whole; by round."""
        return [left / whole for left, whole in zip(self.left_s, self.whole_s, strict=True)]


async def measure_bulk(
    settings: Settings,
    num_tokens: int,
    pullers: Mapping[str, Puller],
    raw_address: str,
    progress: Progress,
) -> Bulk:
    """Raises BenchFailed for what cannot be measured.

    Args:
        pullers: by way, all from one worker.
    """
    prompt = [number * 7 % 200 for number in range(num_tokens)]
    warm = await _last_of_two(pullers[GRPC], prompt)
    for puller in pullers.values():
        await _last_of_two(puller, prompt)
    bulk = Bulk(warm.num_bytes, warm.num_pages)
    message = warm.num_bytes // warm.num_pages

    async def pull(puller: Puller) -> float:
        return (await puller.pull(prompt, "bulk")).seconds

    ways: Mapping[str, Callable[[], Awaitable[float]]] = {
        RAW_ASYNCIO: lambda: raw.time_asyncio(raw_address, warm.num_pages, message),
        RAW_THREADED: lambda: asyncio.to_thread(raw.time_threaded, raw_address, warm.num_pages, message),
    } | {way: partial(pull, puller) for way, puller in pullers.items()}
    await ways[RAW_ASYNCIO]()  # makes its messages
    await ways[RAW_THREADED]()
    for number in range(settings.rounds):
        progress(f"bulk: round {number + 1} of {settings.rounds}")
        for place in range(len(WAYS)):
            way = WAYS[(place + number) % len(WAYS)]
            bulk.rates[way].append(warm.num_bytes / await ways[way]())
    return bulk


async def measure_overlap(
    settings: Settings, real: Puller, simulated: Puller, progress: Progress
) -> dict[int, Overlap]:
    """By prompt length. Nothing of a prompt is in the worker's prefix cache when it is measured."""
    found = {length: Overlap() for length in settings.prompts}
    for number in range(settings.overlap_rounds):
        for length, overlap in found.items():
            progress(f"overlap: round {number + 1} of {settings.overlap_rounds}, {length:,} tokens")
            prompt = [token * 31 % 997 + 3 for token in range(length)]
            pull = await real.pull(prompt, f"overlap-{number}-{length}")
            whole = [(await simulated.pull(prompt, "whole")).seconds for _ in range(4)]
            overlap.num_bytes = pull.num_bytes
            overlap.left_s.append(pull.after_first_token_s)
            overlap.prefill_s.append(pull.seconds - pull.after_first_token_s)
            overlap.whole_s.append(statistics.median(whole[1:]))  # the first computes the prompt
    return found


async def _last_of_two(puller: Puller, prompt: list[int]) -> Pull:
    """The first computes the prompt; both ends know their memory after the second."""
    await puller.pull(prompt, "bulk")
    return await puller.pull(prompt, "bulk")
