"""Which workers a request goes to: a decode worker, and prefill workers in order.

Invariants: only workers that are up, take work and serve the same model as the rest are ever named; a
request counts as load from its pick to its end, so a burst spreads.
Must not know: replies, HTTP, what the requests ask for.

Parts: `routing/pool.py` (who is there), `routing/picker.py` (who is preferred),
`routing/circuit_breaker.py` and `routing/outcome.py` (who has failed).
"""

import asyncio
import itertools
import random as random_module
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from grpc import aio

from baton.v1 import decode_pb2_grpc
from gateway.errors import Unavailable
from gateway.routing.discovery import Resolve, resolve
from gateway.routing.holds import Holds
from gateway.routing.names import WorkerNames
from gateway.routing.outcome import RouteOutcome
from gateway.routing.picker import Picker, Prompt
from gateway.routing.policy import Affinity
from gateway.routing.pool import WorkerPool
from gateway.signals import Pulse
from gateway.worker_watch import WorkerWatch, decode_watch, prefill_watch
from observability.metrics import WorkerState
from services.rpc.channel import DEFAULT_PINGS, Pings

_MOST_PREFILL_TARGETS = 8  # in one request; a decode worker that fails with all of them is not helped by more


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that this gateway's workers serve."""

    name: str
    fingerprint: str
    max_model_len: int  # tokens, prompt and reply together; the smallest of the workers'
    created: int  # unix seconds, when this gateway first saw it


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """A decode worker to call. `lost` beats when it is found to be gone."""

    address: str
    stub: "decode_pb2_grpc.DecodeAsyncStub"
    lost: Pulse


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes; prefill workers by preference, the first choice first, then spares.

    Whoever takes a route tells its outcome how the call ended, or that it was dropped.
    """

    decode: DecodeTarget
    prefill_targets: tuple[str, ...]
    outcome: RouteOutcome
    has_spare: bool  # another decode worker could be asked


class Router:
    """Watches every worker and picks from affinity and live load.

    Args:
        decode_workers: `host:port` or `dns:///name:port` each.
        interceptors: for calls to decode workers.
        affinity: None picks by load alone.
        discovery_s: from one lookup of a DNS name to the next.
        on_pick: told role and outcome of each pick.
        random: draws jitter.
        pings: when a worker that says nothing counts as gone.
    """

    def __init__(
        self,
        decode_workers: Sequence[str],
        prefill_workers: Sequence[str] = (),
        interceptors: Sequence[aio.ClientInterceptor] = (),
        *,
        affinity: Affinity | None = Affinity(),  # noqa: B008  # frozen
        discovery_s: float = 5.0,
        resolve: Resolve = resolve,
        on_pick: Callable[[str, str], None] = lambda _role, _outcome: None,
        clock: Callable[[], float] = time.monotonic,
        random: Random = random_module.SystemRandom(),  # noqa: B008  # stateless
        pings: Pings = DEFAULT_PINGS,
    ) -> None:
        self._picker = Picker(affinity, on_pick)
        self._model: ServedModel | None = None
        self._changes = Pulse()
        self._picks = itertools.count(1)

        def pool(
            names: Sequence[str], make_watch: Callable[[str, Callable[[], None]], WorkerWatch]
        ) -> WorkerPool:
            return WorkerPool(
                WorkerNames.parse(names),
                make_watch,
                resolve=resolve,
                discovery_s=discovery_s,
                on_change=self._changed,
            )

        self._decode = pool(
            decode_workers,
            lambda address, on_change: decode_watch(
                address, interceptors, clock=clock, random=random, on_change=on_change, pings=pings
            ),
        )
        self._prefill = pool(
            prefill_workers,
            lambda address, on_change: prefill_watch(
                address, clock=clock, random=random, on_change=on_change, pings=pings
            ),
        )

    async def start(self) -> None:
        """Begins to watch; workers may come later, in any order."""
        for pool in self._pools.values():
            await pool.start()

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    @property
    def model(self) -> ServedModel | None:
        """What is or was served last; None until the first decode worker has introduced itself."""
        return self._model

    @property
    def is_ready(self) -> bool:
        """Whether a request would find a decode worker now, and somebody to run its prompt."""
        has_prefill = bool(self._usable(self._prefill))
        return any(has_prefill or watch.runs_prompts for watch in self._usable(self._decode))

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By role: how many workers are configured one by one, how many more DNS has, how many take work.

        Beside workers, `unresolved`: how many names stand for nobody yet.
        """
        return {
            role: {
                "configured": pool.num_listed,
                "discovered": pool.num_discovered,
                "unresolved": pool.num_unresolved,
                "up": len(self._usable(pool)),
            }
            for role, pool in self._pools.items()
        }

    @property
    def num_under_way(self) -> int:
        """Routes whose outcome is not known yet, at any worker."""
        return sum(watch.holds.num for pool in self._pools.values() for watch in pool.workers)

    @property
    def worker_states(self) -> list[WorkerState]:
        """Every worker that may get requests, for the metrics: read in any thread, and changes nothing."""
        return [
            WorkerState(role, watch.address, self._state_of(watch), watch.breaker.state.value)
            for role, pool in self._pools.items()
            for watch in pool.workers
        ]

    def route(
        self,
        prompt_token_ids: Sequence[int],
        *,
        num_generated: int = 0,
        salt: str = "",
        cause: str = "",
        exclude: Collection[str] = (),
    ) -> Route:
        """Picks, and counts the pick as load. Raises Unavailable.

        Args:
            num_generated: tokens that a continuation brings; they need room, and are no part of the key:
                a reply goes on where its prompt is.
            salt: the prefix cache's; only requests with the same one share cached prefixes.
            cause: the reply; its failures count once against a worker.
            exclude: addresses of decode workers that were tried already.
        """
        prompt = Prompt(prompt_token_ids, salt, len(prompt_token_ids) + num_generated)
        prefill = self._usable(self._prefill)
        usable = self._usable(self._decode)
        decode = [watch for watch in usable if watch.address not in exclude]
        if not decode:
            raise Unavailable("no decode worker is available now", code="decode_unavailable")
        decode = [watch for watch in decode if prefill or watch.runs_prompts]
        if not decode:
            raise Unavailable("no prefill worker is available now", code="prefill_unavailable")
        first = self._picker.ranked("decode", decode, prompt, block_size=_smallest_block(usable))[0]
        prefill = self._picker.ranked("prefill", prefill, prompt, block_size=_smallest_block(prefill))
        prefill = prefill[:_MOST_PREFILL_TARGETS]
        for watch in (first, *prefill[:1]):
            watch.last_picked = next(self._picks)
        outcome = RouteOutcome(
            first.breaker.begin(cause),
            {
                watch.address: watch.breaker.observe(cause) if rank else watch.breaker.begin(cause)
                for rank, watch in enumerate(prefill)
            },
            decode_hold=first.holds.take(),
            prefill_hold=(prefill[0].holds if prefill else Holds()).take(),
            on_draining=partial(first.note_draining, first.instance),
        )
        target = DecodeTarget(first.address, first.stub, first.lost)
        return Route(target, tuple(watch.address for watch in prefill), outcome, has_spare=len(decode) > 1)

    def heard_at(self, address: str) -> float | None:
        """When the worker last gave a sign of life; None if it counts as gone."""
        for pool in self._pools.values():
            watch = pool.find(address)
            if watch is not None and watch.is_up:
                return watch.heard_at
        return None

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when a worker comes, goes or begins to drain, after `timeout_s` at the latest.

        Call it directly after what it waits for was found missing: nothing is missed in between.
        """
        changed = self._changes.next()
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    @property
    def _pools(self) -> dict[str, WorkerPool]:
        return {"decode": self._decode, "prefill": self._prefill}

    def _usable(self, pool: WorkerPool) -> list[WorkerWatch]:
        return [watch for watch in pool.workers if watch.takes_work and self._serves_the_model(watch)]

    def _serves_the_model(self, watch: WorkerWatch) -> bool:
        return self._model is not None and watch.fingerprint == self._model.fingerprint

    def _state_of(self, watch: WorkerWatch) -> str:
        """One of four words, for the metrics."""
        if not watch.is_up:
            return "down"
        if not watch.takes_work:
            return "draining"
        return "up" if self._serves_the_model(watch) else "other_model"

    def _changed(self) -> None:
        self._choose_model()
        self._changes.beat()

    def _choose_model(self) -> None:
        """The model stays as long as any decode worker serves it; then that of the first one left."""
        workers = self._decode.workers
        up = [watch for watch in workers if watch.takes_work] or [watch for watch in workers if watch.is_up]
        known = self._model.fingerprint if self._model is not None else None
        same = [watch for watch in up if watch.fingerprint == known] or up[:1]
        infos = [watch.info for watch in same if watch.info is not None]
        if not infos:
            return
        identity = infos[0].identity
        same_as_before = self._model is not None and identity.fingerprint == known
        self._model = ServedModel(
            name=identity.model,
            fingerprint=identity.fingerprint,
            max_model_len=min(info.max_model_len for info in infos),
            created=self._model.created if self._model is not None and same_as_before else int(time.time()),
        )


def _smallest_block(watches: Sequence[WorkerWatch]) -> int:
    return min((watch.block_size for watch in watches), default=1)
