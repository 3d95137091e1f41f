"""One arrangement as the load generator sees it: stubs, and what to ask through them."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc import aio

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from bench.engine.workload import Prompt
from bench.errors import BenchFailed
from bench.interference.arrangements import Arrangement
from bench.interference.rounds import PromptTimes
from cli.run_folder import Entry
from services.rpc.channel import create_channel

_MOST_WAIT_S = 30.0
_LOOK_EVERY_S = 0.05
_reply_numbers = itertools.count()


class Target:
    """Asks one arrangement. Every failure is a BenchFailed that names it."""

    def __init__(
        self,
        arrangement: Arrangement,
        decode: Entry,
        prefill: Entry | None,
        stub: "decode_pb2_grpc.DecodeAsyncStub",
        prefill_stub: "prefill_pb2_grpc.PrefillAsyncStub | None",
    ) -> None:
        self.arrangement = arrangement
        self.decode_pid = decode.record.pid
        self._prefill_targets = [] if prefill is None else [prefill.address]
        self._stub = stub
        self._prefill_stub = prefill_stub

    def generate(
        self, prompt: Prompt, num_tokens: int
    ) -> "aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateMessage]":
        """Exactly `num_tokens`, greedily. Whoever calls it cancels it in the end."""
        return self._stub.Generate(
            decode_pb2.GenerateRequest(
                reply_id=f"bench-interference-{next(_reply_numbers):08}",
                epoch=1,
                prompt_token_ids=prompt,
                sampling=_greedy(num_tokens),
                prefill_targets=self._prefill_targets,
            )
        )

    async def ask_now(self, prompt: Prompt, num_tokens: int) -> PromptTimes:
        """One prompt, at once."""
        now = time.perf_counter()
        return await self.ask(prompt, num_tokens, now, now)

    async def ask(self, prompt: Prompt, num_tokens: int, due: float, window_began: float) -> PromptTimes:
        """One prompt, at its time, to the end of its reply."""
        await asyncio.sleep(due - time.perf_counter())
        if not self.arrangement.hands_over:
            return await self._compute_only(prompt, due, window_began)
        call = self.generate(prompt, num_tokens)
        arrivals: list[float] = []
        finished: decode_pb2.Finished | None = None
        try:
            async for message in call:
                if message.WhichOneof("message") == "finished":
                    finished = message.finished
                else:
                    arrivals.append(time.perf_counter() - due)
        except aio.AioRpcError as error:
            raise self._failed("Generate", error) from error
        finally:
            call.cancel()
        if finished is None or not arrivals:
            raise BenchFailed(f"{self.arrangement.name}: a reply ended without text or without its end")
        self._check(finished)
        has_handoff = finished.HasField("handoff")
        return PromptTimes(
            due_s=due - window_began,
            first_s=arrivals[0],
            second_s=arrivals[1] if len(arrivals) > 1 else None,
            prefill_ms=finished.timings.prefill_ms,
            transfer_ms=finished.handoff.kv_transfer_ms if has_handoff else None,
            num_bytes=finished.handoff.num_bytes if has_handoff else None,
        )

    async def _compute_only(self, prompt: Prompt, due: float, window_began: float) -> PromptTimes:
        """The prompt's prefill with no page sent: the worker is told that all of it is there already."""
        assert self._prefill_stub is not None
        call = self._prefill_stub.Prefill(
            prefill_pb2.PrefillRequest(
                transfer_id=f"bench-{next(_reply_numbers):08}",
                reply_id="bench-interference-nothing-handed-over",
                identity=(await self._stub.GetInfo(common_pb2.GetInfoRequest())).identity,
                prompt_token_ids=prompt,
                sampling=_greedy(1),
                num_held_tokens=len(prompt),
                payload_format=prefill_pb2.PAYLOAD_FORMAT_EXACT,
            )
        )
        first_s = prefill_ms = None
        try:
            async for message in call:
                if message.WhichOneof("message") == "first_token":
                    first_s = time.perf_counter() - due
                    prefill_ms = message.first_token.timings.prefill_ms
        except aio.AioRpcError as error:
            raise self._failed("Prefill", error) from error
        finally:
            call.cancel()
        if first_s is None:
            raise BenchFailed(f"{self.arrangement.name}: a prefill ended without a token")
        return PromptTimes(due_s=due - window_began, first_s=first_s, prefill_ms=prefill_ms)

    def _check(self, finished: decode_pb2.Finished) -> None:
        """Whether the prompt went the way whose time is to be taken."""
        computed_by = self._prefill_targets[0] if self._prefill_targets else "local"
        timings = finished.timings
        if timings.prefill_target != computed_by or timings.prefill_attempts != 1:
            raise BenchFailed(
                f"{self.arrangement.name}: a prompt was computed by {timings.prefill_target!r} in attempt "
                f"{timings.prefill_attempts}, not by {computed_by!r} in the first"
            )
        if finished.num_cached_tokens:
            raise BenchFailed(f"{self.arrangement.name}: a prefix cache knew a prompt that should be new")

    async def settle(self) -> None:
        """Waits until the workers hold nothing. Raises BenchFailed if they go on."""
        stubs: list[decode_pb2_grpc.DecodeAsyncStub | prefill_pb2_grpc.PrefillAsyncStub] = [self._stub]
        if self._prefill_stub is not None:
            stubs.append(self._prefill_stub)
        give_up = time.monotonic() + _MOST_WAIT_S
        while any([await _is_busy(stub) for stub in stubs]):
            if time.monotonic() > give_up:
                raise BenchFailed(f"{self.arrangement.name}: workers hold blocks with nobody left to read")
            await asyncio.sleep(_LOOK_EVERY_S)

    def _failed(self, method: str, error: aio.AioRpcError) -> BenchFailed:
        return BenchFailed(f"{self.arrangement.name}: {method}: {error.code().name}: {error.details()}")


@asynccontextmanager
async def connected(arrangement: Arrangement, entries: dict[str, Entry]) -> AsyncIterator[Target]:
    """A target with channels of its own."""
    decode, prefill = entries[arrangement.decode], None
    async with create_channel(decode.address) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        if arrangement.prefill is None:
            yield Target(arrangement, decode, prefill, stub, None)
            return
        prefill = entries[arrangement.prefill]
        async with create_channel(prefill.address) as prefill_channel:
            yield Target(arrangement, decode, prefill, stub, prefill_pb2_grpc.PrefillStub(prefill_channel))


async def _is_busy(
    stub: "decode_pb2_grpc.DecodeAsyncStub | prefill_pb2_grpc.PrefillAsyncStub",
) -> bool:
    call = stub.WatchLoad(common_pb2.WatchLoadRequest())
    try:
        async for load in call:
            return bool(load.running or load.waiting or load.blocks_used)
        return True
    finally:
        call.cancel()


def _greedy(num_tokens: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(top_p=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
