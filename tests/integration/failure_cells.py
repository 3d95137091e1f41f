"""What the cells of the failure matrix are made of: requests, the states to fail in, the failures.

Each state is observed from outside before the failure comes: in load reports, in the bytes that have
crossed the link, or in the text that the client has.
"""

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
from grpc import aio

from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from services.engine.sim_model import words
from tests.integration.cluster import generate_request
from tests.integration.failure_rig import (
    KV_BYTES_PER_TOKEN,
    NUM_PREFILL_SLOTS,
    PING_TIMEOUT_S,
    PREFILL_CHUNK,
    PREFILL_MS_PER_TOKEN,
    Rig,
    Worker,
)
from tests.integration.reply_readers import ReadReply
from tests.tcp_proxy import TcpProxy
from tests.waiting import eventually

NUM_PROMPT_TOKENS = 64  # 1 s of prefill, eight chunks, 11.8 MB
NUM_SLOW_PROMPT_TOKENS = 20  # 0.3 s, three chunks, 3.7 MB
SLOW_BYTES_PER_S = 1_000_000
_STEADY_BYTES_PER_S = 2_500_000  # of a link on which pages can be watched
_SOME_BYTES = 100_000
_BLOCKER_PROMPT, _BLOCKER_TOKENS = 600, 1200  # 9 s of prefill, 6 s of decode
_SEED = 7


class State(StrEnum):
    """Where the reply is when something fails."""

    QUEUED = "queued"
    PREFILLING = "mid-prefill"
    TRANSFERRING = "mid-transfer"
    ANSWERED = "first-token"


class Failure(StrEnum):
    """What happens; the last three to the link from decode to prefill."""

    KILL = "kill"
    STOP = "stop"
    STATUS = "error-status"
    RESET = "reset"
    BLACK_HOLE = "black-hole"
    SLOW = "slow"


SILENT = (Failure.STOP, Failure.BLACK_HOLE)  # nobody is told

# A worker may refuse a request that waits, and break off one that it has begun.
STATUSES = {
    State.QUEUED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    State.PREFILLING: grpc.StatusCode.INTERNAL,
    State.TRANSFERRING: grpc.StatusCode.UNAVAILABLE,
    State.ANSWERED: grpc.StatusCode.DATA_LOSS,
}


def decode_request(
    name: str, targets: list[str], num_prompt_tokens: int = NUM_PROMPT_TOKENS
) -> decode_pb2.GenerateRequest:
    """40 seeded words after a prompt that no other name has."""
    numbers = random.Random(name)
    request = generate_request(f"reply-{secrets.token_hex(12)}", 0, seed=_SEED, prefill_targets=targets)
    request.prompt_token_ids.extend(numbers.choices(range(200), k=num_prompt_tokens))
    return request


def chat_body(name: str) -> dict[str, Any]:
    """40 seeded words after a prompt that no other name has, and as many tokens as all of them."""
    content = " ".join(["Say", *random.Random(name).choices(words(), k=NUM_PROMPT_TOKENS - 20)])
    sampling = {"seed": _SEED, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": content}], **sampling}


class Blockers:
    """Calls that take every slot of some workers, until these are let go."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._calls: list[aio.UnaryStreamCall[Any, Any]] = []

    async def fill(self, worker: Worker) -> None:
        """Returns once the worker is busy with them."""
        name = f"blocker-{secrets.token_hex(4)}"
        if worker is self._rig.prefill:
            info = await worker.prefill.GetInfo(common_pb2.GetInfoRequest())
            for n in range(NUM_PREFILL_SLOTS):
                request = decode_request(name, [])
                asked = prefill_pb2.PrefillRequest(
                    identity=info.identity,
                    sampling=request.sampling,
                    payload_format=prefill_pb2.PAYLOAD_FORMAT_EXACT,
                )
                asked.prompt_token_ids.extend([n] * _BLOCKER_PROMPT)
                self._calls.append(worker.prefill.Prefill(asked))
            await eventually(lambda: load_sums_to([worker], running=NUM_PREFILL_SLOTS))
        else:
            request = decode_request(name, [self._rig.spare.address])
            request.sampling.max_tokens, request.sampling.ignore_eos = _BLOCKER_TOKENS, True
            self._calls.append(worker.decode.Generate(request))
            await eventually(lambda: load_sums_to([worker], running=1))

    def let_go(self) -> None:
        for call in self._calls:
            call.cancel()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A reply to start, and the link that its pages cross."""

    start: Callable[[], ReadReply]
    link: TcpProxy
    num_prompt_tokens: int = NUM_PROMPT_TOKENS


def short_deadline_s(failure: Failure, state: State) -> float:
    """Of a reply that shall not live to see how such a failure is got over.

    It passes before pings can have found out who is silent since the reply was in that state, and before
    3.7 MB have crossed a slow link.
    """
    if failure is Failure.SLOW:
        return 2.2
    num_computed = {State.TRANSFERRING: PREFILL_CHUNK, State.ANSWERED: NUM_PROMPT_TOKENS}.get(state, 0)
    return num_computed * PREFILL_MS_PER_TOKEN / 1000 + PING_TIMEOUT_S - 0.4


async def reach(
    state: State,
    attempts: Sequence[Attempt],
    *,
    prefill: Worker,
    queue_at: Sequence[Worker],
    blockers: Blockers,
) -> list[ReadReply]:
    """Starts replies and brings all of them into one state; fails if one is past it already.

    Args:
        queue_at: whose slots are taken if they are to queue.
    """
    if state is State.QUEUED:
        for worker in queue_at:
            await blockers.fill(worker)
    crossed = [attempt.link.to_client.num_bytes for attempt in attempts]
    for attempt in attempts:
        if state in (State.TRANSFERRING, State.ANSWERED):
            attempt.link.limit(_STEADY_BYTES_PER_S)
    replies = [attempt.start() for attempt in attempts]
    match state:
        case State.QUEUED:
            await eventually(lambda: load_sums_to(queue_at, waiting=len(replies)))
        case State.PREFILLING:
            await eventually(lambda: load_sums_to([prefill], running=len(replies)))
        case State.TRANSFERRING:
            for attempt, before in zip(attempts, crossed, strict=True):
                await attempt.link.to_client.wait_for(before + _SOME_BYTES)
        case State.ANSWERED:
            for reply in replies:
                await asyncio.wait_for(reply.seen_text.wait(), 10.0)
    for attempt, before, reply in zip(attempts, crossed, replies, strict=True):
        all_bytes = attempt.num_prompt_tokens * KV_BYTES_PER_TOKEN
        assert attempt.link.to_client.num_bytes - before < all_bytes, "all pages have crossed"
        assert bool(reply.text) == (state is State.ANSWERED)
    return replies


async def waiting_at(workers: Sequence[Worker]) -> Worker:
    """The worker with whom the reply queues, or waits for its pages."""
    loads = await asyncio.gather(*(worker.load() for worker in workers))
    (found,) = [worker for worker, load in zip(workers, loads, strict=True) if load.waiting == 1]
    return found


async def load_sums_to(workers: Sequence[Worker], **counts: int) -> bool:
    loads = await asyncio.gather(*(worker.load() for worker in workers))
    return all(sum(getattr(load, name) for load in loads) == count for name, count in counts.items())
