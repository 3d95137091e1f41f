"""What became of a call, told to the breakers of the workers that had a part in it, and to their loads.

Invariants: whatever happens, each worker's trial is settled at most once a call, and nobody is blamed for
another: a decode worker not for prefill workers that fail, these not for a decode worker that cannot reach
them, a worker not for being full or draining. Whoever
waits in vain speaks against a decode worker that was silent meanwhile, not against one with a queue.
The call counts as load until it has ended; at the prefill worker until its first message.
Must not know: who else could have been called, what is retried.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from grpc import aio

from baton.v1 import decode_pb2
from gateway.routing.circuit_breaker import Trial
from gateway.routing.holds import Hold
from services.rpc.status import Draining, failed_targets_of, is_fault, reason_of


@dataclass(frozen=True, slots=True)
class Blame:
    """Whom a failed call speaks against. By default nobody."""

    decode: bool = False
    is_draining: bool = False  # decode takes nothing new; its load report will say so, too
    prefill_targets: tuple[str, ...] = ()

    @classmethod
    def of_rpc(cls, error: aio.AioRpcError) -> "Blame":
        return cls(
            decode=is_fault(error),
            is_draining=reason_of(error) == Draining.__name__,
            prefill_targets=failed_targets_of(error),
        )


class RouteOutcome:
    """One route's.

    Args:
        decode: of the decode worker.
        prefill: of each prefill worker that decode may ask, by address.
        decode_hold, prefill_hold: the call as load of the two workers.
        on_draining: called when the decode worker says that it drains.
    """

    def __init__(
        self,
        decode: Trial,
        prefill: Mapping[str, Trial],
        *,
        decode_hold: Hold,
        prefill_hold: Hold,
        on_draining: Callable[[], None],
    ) -> None:
        self._decode = decode
        self._prefill = dict(prefill)
        self._decode_hold = decode_hold
        self._prefill_hold = prefill_hold
        self._on_draining = on_draining
        self._has_reached_prefill = False
        self._is_settled = False

    @property
    def is_probe(self) -> bool:
        """Whether the call is to find out if a decode worker that failed works again."""
        return self._decode.is_probe

    def admitted(self) -> None:
        """The decode worker has the call, and asks the prefill worker."""
        self._decode_hold.arrive()
        self._prefill_hold.arrive()

    def answered(self, timings: decode_pb2.FirstTextTimings) -> None:
        """The first message has come."""
        if self._is_settled:
            return
        self._prefill_hold.release()
        self._decode.heard()
        if trial := self._prefill.get(timings.prefill_target):
            self._has_reached_prefill = True
            trial.answered()
        self._blame_prefill(timings.failed_prefill_targets)
        self._decode.answered()
        for target, trial in self._prefill.items():
            if target != timings.prefill_target:
                trial.dropped()  # not asked, or no longer: a long reply is no probe of it

    def heard(self) -> None:
        """Another message has come."""
        self._decode.heard()

    def finished(self, timings: decode_pb2.FirstTextTimings) -> None:
        """The call has ended well."""
        if self._is_settled:
            return
        self._blame_prefill(timings.failed_prefill_targets)
        self._decode.succeeded()
        if trial := self._prefill.pop(timings.prefill_target, None):
            trial.succeeded()
        self._settle()

    def failed(self, blame: Blame) -> None:
        """The call was refused or broke off."""
        if self._is_settled:
            return
        if blame.decode:
            self._decode.failed()
        self._blame_prefill(blame.prefill_targets)
        if blame.is_draining:
            self._on_draining()
        self._settle()

    def dropped(self) -> None:
        """Nobody waits any more: a deadline, a client that left. Idempotent."""
        if not self._is_settled:
            self._decode.given_up()
        self._settle()

    def _settle(self) -> None:
        self._is_settled = True
        self._decode_hold.release()
        self._prefill_hold.release()
        for trial in (self._decode, *self._prefill.values()):
            trial.dropped()
        self._prefill.clear()

    def _blame_prefill(self, targets: Iterable[str]) -> None:
        """Each once: later messages repeat what the first one said.

        Unless it is decode that has no way to them: several failed, none answered, and some answer others.
        """
        failed = [trial for target in targets if (trial := self._prefill.pop(target, None))]
        has_no_way = len(failed) > 1 and not self._has_reached_prefill
        if has_no_way and any(trial.answers_others for trial in failed):
            self._decode.failed()
            for trial in failed:
                trial.dropped()
        else:
            for trial in failed:
                trial.failed()
