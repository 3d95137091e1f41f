"""The measurement, by turns: each round measures every arrangement once, and each time another begins."""

import contextlib
import gc
from collections.abc import Callable, Sequence

from bench.engine.workload import Prompt, make_prompts
from bench.interference.arrangements import COLOCATED, SPLIT, arrangements
from bench.interference.rounds import Round, Turn
from bench.interference.settings import Settings
from bench.interference.target import Target, connected
from bench.interference.window import WindowRunner
from cli.run_folder import Entry


async def measure(
    settings: Settings, entries: Sequence[Entry], vocab_size: int, progress: Callable[[str], None]
) -> list[Round]:
    """Runs every round. Raises BenchFailed for what cannot be measured."""
    by_name = {entry.name: entry for entry in entries}
    windows = WindowRunner(settings, vocab_size)
    async with contextlib.AsyncExitStack() as exits:
        targets = [
            await exits.enter_async_context(connected(arrangement, by_name))
            for arrangement in arrangements(settings)
        ]
        for target in targets:
            progress(f"warming up {target.arrangement.name}")
            await _short_prompts(settings, target, vocab_size, "warm-up")
            await target.ask_now(*_long_prompt(settings, target, vocab_size))
            await target.settle()
        gc.collect()
        gc.freeze()  # a collection here would be taken for a late token
        rounds = []
        for turn in range(settings.rounds):
            measured = Round()
            for target in _begin_with(targets, turn):
                name = target.arrangement.name
                progress(f"round {turn + 1} of {settings.rounds}: {target.arrangement.title}")
                idle = await windows.run(target, turn, loaded=False)
                await target.settle()
                loaded = await windows.run(target, turn, loaded=True)
                await target.settle()
                measured.turns[name] = Turn(idle, loaded)
            progress(f"round {turn + 1} of {settings.rounds}: short prompts, nothing else running")
            for target in _begin_with([t for t in targets if t.arrangement in (SPLIT, COLOCATED)], turn):
                measured.short_first_s[target.arrangement.name] = await _short_prompts(
                    settings, target, vocab_size, str(turn)
                )
            rounds.append(measured)
        return rounds


def _begin_with(targets: Sequence[Target], turn: int) -> list[Target]:
    first = turn % len(targets)
    return [*targets[first:], *targets[:first]]


async def _short_prompts(settings: Settings, target: Target, vocab_size: int, seed: str) -> list[float]:
    """Seconds to the first text of each, one after another."""
    s = settings
    seed = f"short {seed} {target.arrangement.name}"
    prompts = make_prompts(s.short_prompts, s.short_prompt_tokens, vocab_size, seed)
    return [(await target.ask_now(prompt, s.reply_tokens)).first_s for prompt in prompts]


def _long_prompt(settings: Settings, target: Target, vocab_size: int) -> tuple[Prompt, int]:
    seed = f"warm-up {target.arrangement.name}"
    return make_prompts(1, settings.prompt_tokens, vocab_size, seed)[0], settings.reply_tokens
