"""One window: steady streams for a while, undisturbed or with prompts that arrive on schedule.

Both kinds begin with fresh streams, so that their contexts grow through the same lengths: a longer context
makes a slower step, and would otherwise count for or against the load.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from bench.engine.workload import make_prompts
from bench.errors import BenchFailed
from bench.interference.rounds import Gap, PromptTimes, Window
from bench.interference.settings import Settings
from bench.interference.steady import MOST_STALL_S, SteadyStream, steady_streams
from bench.interference.target import Target
from bench.interference.thread_times import between, snapshot
from bench.loop_lag import summarize, watched_loop

_LAG_EVERY_S = 0.02  # wakes the generator no more often than the tokens do


class WindowRunner:
    """Runs windows against one target after the other.

    Args:
        vocab_size: prompts are drawn from it.
    """

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        self._settings = settings
        self._vocab_size = vocab_size

    async def run(self, target: Target, turn: int, *, loaded: bool) -> Window:
        """The streams' prompts are the turn's, the same idle and loaded, whoever is asked.

        Raises BenchFailed if something fails, or if there are too few gaps even after a while more."""
        try:
            async with asyncio.TaskGroup() as group, self._streams(group, target, turn) as streams:
                seed = f"arriving {turn} {target.arrangement.name}"
                return await self._watch(group, target, streams, seed if loaded else None)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _streams(
        self, group: asyncio.TaskGroup, target: Target, turn: int
    ) -> AbstractAsyncContextManager[list[SteadyStream]]:
        s = self._settings
        prompts = make_prompts(s.streams, s.steady_prompt_tokens, self._vocab_size, f"steady {turn}")
        return steady_streams(group, target, prompts, s.steady_tokens)

    async def _watch(
        self, group: asyncio.TaskGroup, target: Target, streams: Sequence[SteadyStream], seed: str | None
    ) -> Window:
        threads, cpu = snapshot(target.decode_pid), time.process_time()
        began = time.perf_counter()
        async with watched_loop(_LAG_EVERY_S) as late:
            asked = await self._let_pass(group, target, streams, seed, began)
            ended = time.perf_counter()
            cpu = time.process_time() - cpu
            threads_after = snapshot(target.decode_pid)
            async with asyncio.timeout(MOST_STALL_S):
                await asyncio.gather(*(stream.passed(ended) for stream in streams))
        prompts = [await task for task in asked]
        return Window(
            seconds=ended - began,
            gaps=tuple(_gaps_within(streams, began, ended)),
            prompts=tuple(prompts),
            num_restarts=sum(began <= at < ended for stream in streams for at in stream.restarts),
            generator_cpu=cpu / (ended - began),
            generator_lag=summarize(late),
            threads=between(target.decode_pid, threads, threads_after),
        )

    async def _let_pass(
        self,
        group: asyncio.TaskGroup,
        target: Target,
        streams: Sequence[SteadyStream],
        seed: str | None,
        began: float,
    ) -> list["asyncio.Task[PromptTimes]"]:
        """Whole periods, until the time is over and there are enough gaps; a prompt at the begin of each."""
        s = self._settings
        asked: list[asyncio.Task[PromptTimes]] = []
        for period in range(s.most_periods):
            due = began + period * s.every_s
            if seed is not None:
                prompt = make_prompts(1, s.prompt_tokens, self._vocab_size, f"{seed} {period}")[0]
                asked.append(group.create_task(target.ask(prompt, s.reply_tokens, due, began)))
            end = due + s.every_s
            await asyncio.sleep(end - time.perf_counter())
            num_gaps = sum(gap.is_itl for gap in _gaps_within(streams, began, end))
            if end - began >= s.duration_s and (num_gaps >= s.needed_gaps or not s.needs_gaps):
                return asked
        raise BenchFailed(
            f"{target.arrangement.name}: {num_gaps} gaps in {end - began:.0f} s; a p99 that a handful of "
            f"stalls does not decide needs {s.needed_gaps}: raise --duration"
        )


def _gaps_within(streams: Sequence[SteadyStream], began: float, ended: float) -> Iterator[Gap]:
    """Those that began in the window, its begin as their zero."""
    for stream in streams:
        for gap in stream.gaps:
            if began <= gap.began_s < ended:
                yield replace(gap, began_s=gap.began_s - began)
