"""The measurement, by turns: each round asks every length both ways, alone and beside steady streams."""

import contextlib
import gc
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from bench.engine.workload import Prompt, make_prompts
from bench.errors import BenchFailed
from bench.interference.target import Target
from bench.interference.target import connected as connected_target
from bench.threshold.asker import Asker, connected
from bench.threshold.beside import streams_running
from bench.threshold.rounds import Asked, Company, Round, Way
from bench.threshold.settings import Settings
from bench.threshold.workers import STEADY
from cli.run_folder import Entry

_MOST_DRAWS = 10

T = TypeVar("T")


async def measure(
    settings: Settings, entries: Sequence[Entry], vocab_size: int, progress: Callable[[str], None]
) -> list[Round]:
    """Runs every round. Raises BenchFailed for what cannot be measured."""
    by_name = {entry.name: entry for entry in entries}
    async with contextlib.AsyncExitStack() as exits:
        asker = await exits.enter_async_context(connected(by_name))
        steady = await exits.enter_async_context(connected_target(STEADY, by_name))
        measurement = _Measurement(settings, asker, steady, vocab_size, progress)
        await measurement.warm_up()
        gc.collect()
        gc.freeze()  # a collection here would be taken for a late token
        return [await measurement.round(turn) for turn in range(settings.rounds)]


class _Measurement:
    def __init__(
        self,
        settings: Settings,
        asker: Asker,
        steady: Target,
        vocab_size: int,
        progress: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._asker = asker
        self._steady = steady
        self._vocab_size = vocab_size
        self._progress = progress
        self._steady_tokens = 0

    async def warm_up(self) -> None:
        """Every shape once, both ways: the first handoff maps memory, the first of a length allocates."""
        s = self._settings
        most = await self._asker.max_model_len()
        if max(s.lengths) + s.reply_tokens > most:
            raise BenchFailed(
                f"--lengths: {max(s.lengths):,} tokens and a reply of {s.reply_tokens} are more than the "
                f"workers take ({most:,}): leave out the longest"
            )
        self._steady_tokens = min(s.steady_tokens, most - s.steady_prompt_tokens)
        self._progress("warming up")
        for length in s.lengths:
            await self._ask_alone(length, f"warm-up {length}", tuple(Way))
        await self._steady.settle()

    async def round(self, turn: int) -> Round:
        """Alone and beside streams right after each other; another length and another way first each time."""
        s = self._settings
        measured = Round()
        for length in _begin_with(s.lengths, turn):
            self._progress(f"round {turn + 1} of {s.rounds}: {length:,} tokens")
            for number in range(s.asks):
                seed, ways = f"alone {turn} {length} {number}", _begin_with(tuple(Way), turn + number)
                measured.asked += await self._ask_alone(length, seed, ways)
            await self._steady.settle()
            await self._ask_beside(measured, turn, length)
            await self._steady.settle()
        return measured

    async def _ask_alone(self, length: int, seed: str, ways: Sequence[Way]) -> list[Asked]:
        found = []
        for way in ways:
            ask = partial(self._asker.ask, way, num_tokens=self._settings.reply_tokens)
            times = await self._drawn(length, seed, ask)
            found.append(
                Asked(
                    way=way,
                    company=Company.ALONE,
                    num_tokens=length,
                    first_s=times.first_s,
                    second_s=times.second_s,
                )
            )
        return found

    async def _ask_beside(self, measured: Round, turn: int, length: int) -> None:
        s = self._settings
        seed = f"{turn} {length}"
        source = random.Random(seed)
        streams = streams_running(s, self._steady, self._vocab_size, self._steady_tokens, f"steady {seed}")
        async with streams as beside:
            for number in range(s.asks):
                moment = source.random()  # the same for both ways
                for way in _begin_with(tuple(Way), turn + number):
                    ask = partial(beside.ask, self._asker, way, moment=moment)
                    times, gap_s = await self._drawn(length, f"beside {seed} {number}", ask)
                    measured.asked.append(
                        Asked(
                            way=way,
                            company=Company.BESIDE,
                            num_tokens=length,
                            first_s=times.first_s,
                            second_s=times.second_s,
                            gap_s=gap_s,
                        )
                    )
            measured.idle_gaps_s += beside.idle_gaps_s

    async def _drawn(self, length: int, seed: str, ask: Callable[[Prompt], Awaitable[T | None]]) -> T:
        """Asks prompts in turn, the same ones both ways, until the times of one are those of tokens."""
        for draw in range(_MOST_DRAWS):
            prompt = make_prompts(1, length, self._vocab_size, f"threshold {seed} {draw}")[0]
            if (found := await ask(prompt)) is not None:
                return found
        raise BenchFailed(
            f"{_MOST_DRAWS} replies to prompts of {length:,} tokens began with text that was held back until "
            "it was whole: there is no time of a first and a second token"
        )


def _begin_with(each: Sequence[T], turn: int) -> list[T]:
    first = turn % len(each)
    return [*each[first:], *each[:first]]
