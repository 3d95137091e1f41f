"""Puts the workers of one role in the order in which one prompt asks them.

Invariant: workers that their breakers shut out come last, and first only when there is nobody else: a
bad choice beats none. Must not know: who is usable at all, what becomes of the choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.routing.policy import Affinity, Ranking, by_affinity, by_load, prefix_key
from gateway.worker_watch import WorkerWatch


@dataclass(frozen=True, slots=True)
class Prompt:
    """What picking a worker depends on."""

    token_ids: Sequence[int]
    salt: str
    num_tokens: int  # to make room for, those of a continuation included


class Picker:
    """Applies the policy.

    Args:
        affinity: None picks by load alone.
        on_pick: told role and outcome of each pick.
    """

    def __init__(self, affinity: Affinity | None, on_pick: Callable[[str, str], None]) -> None:
        self._affinity = affinity
        self._on_pick = on_pick

    def ranked(
        self, role: str, watches: Sequence[WorkerWatch], prompt: Prompt, *, block_size: int
    ) -> list[WorkerWatch]:
        """All of them, the first choice first; each must be up.

        Args:
            block_size: of the affinity key, in tokens; the same whoever is left to choose from.
        """
        if not watches:
            return []
        by_address = {watch.address: watch for watch in watches}
        let_in: list[WorkerWatch] = []
        shut_out: list[WorkerWatch] = []
        for watch in watches:
            (let_in if watch.breaker.lets_in() else shut_out).append(watch)
        best = self._by_policy(let_in, prompt, block_size)
        worst = by_load([watch.candidate(prompt.num_tokens) for watch in shut_out])
        least_bad = sorted(worst.order, key=lambda c: by_address[c.address].breaker.num_openings)
        self._on_pick(role, (best if let_in else worst).outcome.value)
        return [by_address[candidate.address] for candidate in (*best.order, *least_bad)]

    def _by_policy(self, watches: Sequence[WorkerWatch], prompt: Prompt, block_size: int) -> Ranking:
        candidates = [watch.candidate(prompt.num_tokens) for watch in watches]
        if self._affinity is None or not watches:
            return by_load(candidates)
        key = prefix_key(
            prompt.token_ids,
            prompt.salt,
            block_size=block_size,
            num_blocks=self._affinity.num_blocks,
        )
        return by_load(candidates) if key is None else by_affinity(candidates, key, self._affinity.load_bound)
