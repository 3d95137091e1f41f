"""Prompts that arrive: one at a time, the way that is asked for, timed at the client."""

import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grpc import aio

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from bench.engine.workload import Prompt
from bench.errors import BenchFailed
from bench.threshold.rounds import Way
from bench.threshold.workers import DECODE, PREFILL
from cli.run_folder import Entry
from services.rpc.channel import create_channel

_DEADLINE_S = 300.0
_reply_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from the sending of a request to its first and its second token."""

    first_s: float
    second_s: float


class Asker:
    """Asks decode. Every failure is a BenchFailed that names the way."""

    def __init__(self, stub: "decode_pb2_grpc.DecodeAsyncStub", prefill_address: str) -> None:
        self._stub = stub
        self._targets = {Way.HANDED_OVER: [prefill_address], Way.LOCAL: []}

    async def max_model_len(self) -> int:
        """Most tokens of prompt and reply together."""
        info = await self._stub.GetInfo(common_pb2.GetInfoRequest(), timeout=_DEADLINE_S)
        return info.max_model_len

    async def ask(self, way: Way, prompt: Prompt, num_tokens: int) -> Times | None:
        """One prompt, to the end of its reply. The same prompt finds nothing of itself in any prefix cache.

        None if its first two tokens did not arrive one by one: text that is no whole character is held back,
        and its time is not that of a token.
        """
        number = next(_reply_numbers)
        request = decode_pb2.GenerateRequest(
            reply_id=f"bench-threshold-{number:08}",
            epoch=1,
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(top_p=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True),
            prefill_targets=self._targets[way],
            cache_salt=f"threshold {number}",
        )
        arrivals: list[tuple[float, int]] = []
        finished: decode_pb2.Finished | None = None
        began = time.perf_counter()
        call = self._stub.Generate(request, timeout=_DEADLINE_S)
        try:
            async for message in call:
                if message.WhichOneof("message") == "finished":
                    finished = message.finished
                else:
                    arrivals.append((time.perf_counter() - began, len(message.delta.tokens)))
        except aio.AioRpcError as error:
            raise BenchFailed(f"{way}: Generate: {error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        if finished is None:
            raise BenchFailed(f"{way}: a reply ended without its end")
        self._check(way, finished)
        if [tokens for _, tokens in arrivals[:2]] != [1, 1]:
            return None
        return Times(arrivals[0][0], arrivals[1][0])

    def _check(self, way: Way, finished: decode_pb2.Finished) -> None:
        """Whether the prompt went the way whose time is to be taken."""
        computed_by = self._targets[way][0] if self._targets[way] else "local"
        timings = finished.timings
        if timings.prefill_target != computed_by or timings.prefill_attempts != 1:
            raise BenchFailed(
                f"{way}: a prompt was computed by {timings.prefill_target!r} in attempt "
                f"{timings.prefill_attempts}, not by {computed_by!r} in the first"
            )
        if finished.num_cached_tokens:
            raise BenchFailed(f"{way}: a prefix cache knew a prompt that should be new")


@asynccontextmanager
async def connected(entries: Mapping[str, Entry]) -> AsyncIterator[Asker]:
    """An asker with a channel of its own."""
    async with create_channel(entries[DECODE].address) as channel:
        yield Asker(decode_pb2_grpc.DecodeStub(channel), entries[PREFILL].address)
