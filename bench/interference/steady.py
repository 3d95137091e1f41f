"""The steady streams: each reads one long reply after another and notes when its tokens arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from grpc import aio

from bench.engine.workload import Prompt
from bench.errors import BenchFailed
from bench.interference.rounds import Gap
from bench.interference.target import Target

MOST_STALL_S = 120.0
_WARM_TOKENS = 8  # of each stream, before anything is measured


class SteadyStream:
    """One stream; `run` reads until it is cancelled.

    A reply that ends is followed by another, and what lies between the two is not counted as a gap. Replies
    are long enough for that not to happen within a window: a stream that begins is a prompt that arrives.
    """

    def __init__(self, number: int, target: Target, prompt: Prompt, num_tokens: int) -> None:
        self._number = number
        self._target = target
        self._prompt = prompt
        self._num_tokens = num_tokens
        self._arrived = asyncio.Event()
        self.gaps: list[Gap] = []  # `began_s` on this process's own clock
        self.num_tokens = 0
        self.last_arrival = 0.0
        self.restarts: list[float] = []

    async def run(self) -> None:
        """Raises BenchFailed when a reply does not reach its length."""
        while True:
            await self._read_reply()
            self.restarts.append(time.perf_counter())

    async def reached(self, num_tokens: int) -> None:
        """Waits until so many tokens have arrived."""
        while self.num_tokens < num_tokens:
            await self._next_arrival()

    async def passed(self, moment: float) -> None:
        """Waits until a token has arrived after the moment: the gap that it fell into has ended."""
        while self.last_arrival <= moment:
            await self._next_arrival()

    async def _next_arrival(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    async def _read_reply(self) -> None:
        call = self._target.generate(self._prompt, self._num_tokens)
        last: float | None = None
        try:
            async for message in call:
                if message.WhichOneof("message") != "delta":
                    continue
                now = time.perf_counter()
                num_tokens = len(message.delta.tokens)
                if last is not None:
                    self.gaps.append(Gap(self._number, last, now - last, num_tokens))
                last = self.last_arrival = now
                self.num_tokens += num_tokens
                self._arrived.set()
        except aio.AioRpcError as error:
            raise BenchFailed(
                f"{self._target.arrangement.name}: a stream broke: {error.code().name}: {error.details()}"
            ) from error
        finally:
            call.cancel()


@asynccontextmanager
async def steady_streams(
    group: asyncio.TaskGroup, target: Target, prompts: Sequence[Prompt], num_tokens: int
) -> AsyncIterator[list[SteadyStream]]:
    """One stream for each prompt, all of them under way; a failure of one ends the group.

    Raises BenchFailed if a token takes too long.
    """
    streams = [SteadyStream(n, target, prompt, num_tokens) for n, prompt in enumerate(prompts)]
    tasks = [group.create_task(stream.run()) for stream in streams]
    try:
        async with asyncio.timeout(MOST_STALL_S):
            await asyncio.gather(*(stream.reached(_WARM_TOKENS) for stream in streams))
        yield streams
    except TimeoutError as error:
        raise BenchFailed(f"{target.arrangement.name}: no token within {MOST_STALL_S:.0f} s") from error
    finally:
        for task in tasks:
            task.cancel()
