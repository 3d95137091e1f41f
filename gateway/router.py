"""Which workers a request goes to: the least busy decode worker, and prefill workers in order.

Invariant: only workers that are up, take work and serve the same model as the rest are ever named;
a request that was sent but is not yet in a load report counts already, so a burst spreads.
Must not know: replies, HTTP, what the requests ask for.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from grpc import aio

from baton.v1 import decode_pb2_grpc
from gateway.errors import Unavailable
from gateway.signals import Pulse
from gateway.worker_watch import WorkerWatch, decode_watch, prefill_watch


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
    """Where a request goes; prefill workers by preference, the first choice first, then spares."""

    decode: DecodeTarget
    prefill_targets: tuple[str, ...]


class Router:
    """Watches every worker and picks from live load.

    Args:
        decode_workers: `host:port` each.
        interceptors: for calls to decode workers.
    """

    def __init__(
        self,
        decode_workers: Sequence[str],
        prefill_workers: Sequence[str] = (),
        interceptors: Sequence[aio.ClientInterceptor] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model: ServedModel | None = None
        self._changes = Pulse()
        self._picks = itertools.count(1)
        self._decode = [
            decode_watch(address, interceptors, clock=clock, on_change=self._changed)
            for address in decode_workers
        ]
        self._prefill = [
            prefill_watch(address, clock=clock, on_change=self._changed) for address in prefill_workers
        ]

    async def start(self) -> None:
        """Begins to watch; workers may come later, in any order."""
        for watch in (*self._decode, *self._prefill):
            watch.start()

    async def close(self) -> None:
        await asyncio.gather(*(watch.close() for watch in (*self._decode, *self._prefill)))

    @property
    def model(self) -> ServedModel | None:
        """What is or was served last; None until the first decode worker has introduced itself."""
        return self._model

    @property
    def is_ready(self) -> bool:
        """Whether a request would find a decode worker now, and somebody to run its prompt."""
        return any(self._is_usable(watch) and self._has_prefill_for(watch) for watch in self._decode)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By role: how many workers are configured, and how many of them take work now."""
        return {
            role: {"configured": len(watches), "up": sum(self._is_usable(watch) for watch in watches)}
            for role, watches in (("decode", self._decode), ("prefill", self._prefill))
        }

    def route(self, prompt_token_ids: Sequence[int], *, exclude: Collection[str] = ()) -> Route:
        """Picks, and counts the pick as load. Raises Unavailable.

        Args:
            exclude: addresses of decode workers that were tried already.
        """
        num_tokens = len(prompt_token_ids)
        decode = self._ranked([w for w in self._decode if w.address not in exclude], num_tokens)
        if not decode:
            raise Unavailable("no decode worker is available now", code="decode_unavailable")
        decode = [watch for watch in decode if self._has_prefill_for(watch)]
        if not decode:
            raise Unavailable("no prefill worker is available now", code="prefill_unavailable")
        prefill = self._ranked(self._prefill, num_tokens)
        for watch in (decode[0], *prefill[:1]):
            watch.note_sent()
            watch.last_picked = next(self._picks)
        target = DecodeTarget(decode[0].address, decode[0].stub, decode[0].lost)
        return Route(target, tuple(watch.address for watch in prefill))

    def heard_at(self, address: str) -> float | None:
        """When the worker last gave a sign of life; None if it counts as gone."""
        for watch in (*self._decode, *self._prefill):
            if watch.address == address and watch.is_up:
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

    def _ranked(self, watches: Sequence[WorkerWatch], num_tokens: int) -> list[WorkerWatch]:
        usable = [watch for watch in watches if self._is_usable(watch)]
        return sorted(usable, key=lambda watch: (*watch.busyness(num_tokens), watch.last_picked))

    def _is_usable(self, watch: WorkerWatch) -> bool:
        return watch.takes_work and self._model is not None and watch.fingerprint == self._model.fingerprint

    def _has_prefill_for(self, decode: WorkerWatch) -> bool:
        return decode.runs_prompts or any(self._is_usable(watch) for watch in self._prefill)

    def _changed(self) -> None:
        self._choose_model()
        self._changes.beat()

    def _choose_model(self) -> None:
        """The model stays as long as any decode worker serves it; then that of the first one left."""
        up = [w for w in self._decode if w.takes_work] or [w for w in self._decode if w.is_up]
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
