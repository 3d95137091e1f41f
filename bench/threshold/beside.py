"""Prompts that arrive beside steady streams, and what the streams notice of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from bench.engine.workload import Prompt, make_prompts
from bench.errors import BenchFailed
from bench.interference.rounds import Gap
from bench.interference.steady import MOST_STALL_S, SteadyStream, steady_streams
from bench.interference.target import Target
from bench.statistics import percentile
from bench.threshold.asker import Asker, Times
from bench.threshold.rounds import Way
from bench.threshold.settings import Settings


class Beside:
    """Asks while streams run.

    A prompt is sent only after every stream has had its rest since the one before, and then at any moment of
    a step: right after a token's arrival, whoever waits for the next step would always wait for all of one.
    """

    def __init__(self, settings: Settings, streams: Sequence[SteadyStream]) -> None:
        self._settings = settings
        self._streams = streams
        self._calm_since = time.perf_counter()
        self.idle_gaps_s: list[float] = []

    async def ask(self, asker: Asker, way: Way, prompt: Prompt, moment: float) -> tuple[Times, float] | None:
        """One prompt's times, and the streams' longest gap meanwhile in seconds.

        None if tokens of it, or of all streams, arrived by the several. Args: moment: of a step, 0 to 1.
        """
        await self._rest(moment)
        began = time.perf_counter()
        times = await asker.ask(way, prompt, self._settings.reply_tokens)
        ended = time.perf_counter()
        async with asyncio.timeout(MOST_STALL_S):
            await asyncio.gather(*(stream.passed(ended) for stream in self._streams))
        self._calm_since = time.perf_counter()
        if any(stream.restarts for stream in self._streams):
            raise BenchFailed("a steady stream ended while prompts of one length were measured")
        if times is None:
            return None
        until = began + times.second_s
        gaps = [gap.seconds for gap in self._gaps() if gap.began_s < until and _end(gap) > began]
        return (times, max(gaps)) if gaps else None

    async def _rest(self, moment: float) -> None:
        """Adds to the idle gaps."""
        wanted = self._settings.rest_tokens
        async with asyncio.timeout(MOST_STALL_S):
            await asyncio.gather(*(stream.reached(stream.num_tokens + wanted) for stream in self._streams))
        if calm := self._calm_gaps(time.perf_counter()):
            await asyncio.sleep(moment * percentile(calm, 50))
        self.idle_gaps_s += self._calm_gaps(time.perf_counter())

    def _calm_gaps(self, until: float) -> list[float]:
        return [gap.seconds for gap in self._gaps() if gap.began_s >= self._calm_since and _end(gap) <= until]

    def _gaps(self) -> Iterator[Gap]:
        """Of single tokens: held-back text comes late for another reason."""
        return (gap for stream in self._streams for gap in stream.gaps if gap.is_itl)


@asynccontextmanager
async def streams_running(
    settings: Settings, target: Target, vocab_size: int, num_tokens: int, seed: str
) -> AsyncIterator[Beside]:
    """Steady streams of at most `num_tokens` each, ended with the body.

    Raises BenchFailed if one breaks, or stalls for minutes.
    """
    prompts = make_prompts(settings.streams, settings.steady_prompt_tokens, vocab_size, seed)
    try:
        async with (
            asyncio.TaskGroup() as group,
            steady_streams(group, target, prompts, num_tokens) as streams,
        ):
            yield Beside(settings, streams)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _end(gap: Gap) -> float:
    return gap.began_s + gap.seconds
