"""Ours against transformers: one piece of code times whoever takes part, with the same prompts.

Every timed run has prompts of its own, so nobody's prefix cache can answer for a prefill.
"""

from collections.abc import Sequence

from bench.engine.contestant import Contestant, Timed
from bench.engine.rounds import Comparison
from bench.engine.settings import PEER_BATCH, Settings
from bench.engine.workload import Prompt, make_prompts
from bench.errors import BenchFailed


class Comparer:
    """Times contestants by turns."""

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        self._settings = settings
        self._vocab_size = vocab_size

    async def warm_up(self, contestants: Sequence[Contestant]) -> None:
        """Caches get their size, kernels their first call: untimed."""
        for contestant in contestants:
            for length in self._settings.prefills:
                await contestant.single(self._prompt(length, "warm-up"), 1)
            await contestant.batch(self._prompts("warm-up"), 2)

    async def compare(self, contestants: Sequence[Contestant], turn: int) -> dict[str, Comparison]:
        """One round; the contestants take turns within it, and another one begins each time."""
        order = [*contestants[turn % len(contestants) :], *contestants[: turn % len(contestants)]]
        num_tokens, length = self._settings.peer_tokens, self._settings.peer_prompt
        shorts: dict[str, Timed] = {}
        singles: dict[str, Timed] = {}
        prefills: dict[str, dict[int, float]] = {contestant.name: {} for contestant in order}
        for contestant in order:
            shorts[contestant.name] = await contestant.single(self._prompt(length, f"{turn} short"), 1)
            singles[contestant.name] = await contestant.single(
                self._prompt(length, f"{turn} long"), num_tokens
            )
        for prefill in self._settings.prefills:
            for contestant in order:
                timed = await contestant.single(self._prompt(prefill, f"{turn} prefill"), 1)
                prefills[contestant.name][prefill] = timed.seconds
        comparisons = {}
        for contestant in order:
            short = await contestant.batch(self._prompts(f"{turn} short"), 1)
            long = await contestant.batch(self._prompts(f"{turn} long"), num_tokens)
            name = contestant.name
            comparisons[name] = Comparison(
                name=name,
                step_s=_between(shorts[name], singles[name], name) / (num_tokens - 1),
                decode_tokens_per_s=PEER_BATCH * (num_tokens - 1) / _between(short, long, name),
                run_tokens_per_s=PEER_BATCH * num_tokens / long.seconds,
                prefill_s=prefills[name],
                single_replies=singles[name].replies,
                batch_replies=long.replies,
            )
        return comparisons

    def _prompt(self, length: int, seed: str) -> Prompt:
        return make_prompts(1, length, self._vocab_size, f"single {seed}")[0]

    def _prompts(self, seed: str) -> list[Prompt]:
        return make_prompts(PEER_BATCH, self._settings.peer_prompt, self._vocab_size, f"batch {seed}")


def _between(short: Timed, long: Timed, name: str) -> float:
    """Seconds that the tokens after the first took."""
    seconds = long.seconds - short.seconds
    if seconds <= 0:
        raise BenchFailed(
            f"{name}: {long.seconds:.3f} s for whole replies, {short.seconds:.3f} s for their first tokens; "
            "the machine is too busy, or the replies are too short"
        )
    return seconds
