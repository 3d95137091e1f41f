"""Our engine under test: the whole of it, with its thread, its queue and its events.

Every run is checked: the replies are as long as asked for, and the steps add up to the tokens that had
to be computed, no more (a preemption would compute some twice) and no less.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.engine.contestant import Timed, check_replies
from bench.engine.settings import Settings
from bench.engine.workload import Prompt, greedy, make_requests
from bench.errors import BenchFailed
from services.engine.config import EngineConfig
from services.engine.loop import HfEngine
from services.engine.precision import Precision
from services.engine.request import (
    EngineRequest,
    SequenceFinished,
    SubmitMode,
    TextGenerated,
)
from services.engine.sequence import EngineSequence
from services.engine.step_times import StepTimes

_MOST_WAIT_S = 10.0  # for the engine's thread to note its last step


@dataclass(frozen=True, slots=True)
class Run:
    """One set of requests, from the first submit to the last event."""

    seconds: float
    replies: tuple[tuple[int, ...], ...]
    steps: tuple[StepTimes, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    token_ids: tuple[int, ...]
    num_cached_tokens: int


class OurEngine(HfEngine):
    """The engine in one mode, `exact` or `fast`; a contestant."""

    def __init__(self, name: str, settings: Settings, precision: Precision) -> None:
        self.name = name
        self._steps: list[StepTimes] = []
        longest = settings.max_model_len
        super().__init__(
            EngineConfig(
                model=settings.model,
                model_name=name,
                kv_memory_bytes=settings.kv_memory_bytes,
                max_model_len=longest,
                max_num_seqs=2 * settings.largest_batch,  # the pool then keeps one sweep's prompts cached
                threads=settings.threads,
                precision=precision,
            ),
            on_step=self._steps.append,
        )
        if self.max_model_len < longest:
            raise BenchFailed(f"model or KV memory hold {self.max_model_len} tokens; {longest} are needed")

    async def single(self, prompt: Prompt, num_tokens: int) -> Timed:
        """See `Contestant.single`."""
        return await self.batch([prompt], num_tokens)

    async def batch(self, prompts: Sequence[Prompt], num_tokens: int) -> Timed:
        """See `Contestant.batch`."""
        run = await self.run(make_requests(prompts, [greedy(num_tokens)] * len(prompts)))
        return Timed(run.seconds, run.replies)

    async def run(self, requests: Sequence[EngineRequest]) -> Run:
        """Runs requests together, each of which must reach its `max_tokens`."""
        self._steps.clear()
        began = time.perf_counter()
        sequences = [self.submit(request, SubmitMode.LOCAL) for request in requests]
        try:
            replies = await asyncio.gather(*map(_read, sequences))
        finally:
            for sequence in sequences:
                sequence.release()
        seconds = time.perf_counter() - began
        for request, reply in zip(requests, replies, strict=True):
            check_replies(self.name, [reply.token_ids], 1, request.sampling.max_tokens)
        await self._settle(sum(map(_num_computed, requests, replies)))
        return Run(seconds, tuple(reply.token_ids for reply in replies), tuple(self._steps))

    async def _settle(self, num_tokens: int) -> None:
        """Waits for the times of the last step: its events may come before them."""
        give_up = time.monotonic() + _MOST_WAIT_S
        while (found := sum(step.num_tokens for step in self._steps)) < num_tokens:
            if time.monotonic() > give_up:
                break
            await asyncio.sleep(0.001)
        if found != num_tokens:
            raise BenchFailed(
                f"{self.name} computed {found} tokens where {num_tokens} were needed "
                "(more: sequences were preempted, the KV memory is too small for this batch)"
            )


async def _read(sequence: EngineSequence) -> _Reply:
    token_ids: list[int] = []
    num_cached = 0
    async for event in sequence.events():
        if isinstance(event, TextGenerated | SequenceFinished):
            token_ids += [token.token_id for token in event.tokens]
        if isinstance(event, SequenceFinished):
            num_cached = event.num_cached_tokens
    return _Reply(tuple(token_ids), num_cached)


def _num_computed(request: EngineRequest, reply: _Reply) -> int:
    """The prompt but for what was cached, and every new token but the last, which is never an input."""
    return len(request.prompt_token_ids) - reply.num_cached_tokens + len(reply.token_ids) - 1
