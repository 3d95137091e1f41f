"""Damage to the messages of a transfer: a typed error, or the KV cache that was sent, never another."""

import asyncio
import random
from collections.abc import Callable

import pytest
import torch

from baton.v1 import prefill_pb2
from services.engine.request import SubmitMode
from services.kv.background import Background
from services.prefill import kv_sender
from tests.unit.engine.tiny_models import make_request
from tests.unit.services.kv.test_page import encode_page
from tests.unit.services.recorded_transfer import PROMPT, TRANSFER, Messages, Pair

Damage = Callable[[Messages, random.Random], Messages]


def drop(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages))
    return messages[:at] + messages[at + 1 :]


def duplicate(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages))
    return [*messages[: at + 1], messages[at], *messages[at + 1 :]]


def reorder(messages: Messages, rng: random.Random) -> Messages:
    pages, last = messages[:-1], messages[-1]
    return [*rng.sample(pages, len(pages)), last]


def reorder_all(messages: Messages, rng: random.Random) -> Messages:
    return rng.sample(messages, len(messages))


def truncate(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages))
    cut = messages[at][: rng.randrange(len(messages[at]))]
    return [*messages[:at], cut, *messages[at + 1 :]]


def flip(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages))
    damaged = bytearray(messages[at])
    damaged[rng.randrange(min(len(damaged), rng.choice([120, 10_000])))] ^= 1 << rng.randrange(8)
    return [*messages[:at], bytes(damaged), *messages[at + 1 :]]


def swap_tails(messages: Messages, rng: random.Random) -> Messages:
    """Two pages with each other's second halves."""
    one, other = rng.sample(range(len(messages) - 1), 2)
    first, second = messages[one], messages[other]
    damaged = list(messages)
    damaged[one] = first[: len(first) // 2] + second[len(second) // 2 :]
    damaged[other] = second[: len(second) // 2] + first[len(first) // 2 :]
    return damaged


def cut_off(messages: Messages, rng: random.Random) -> Messages:
    return messages[: rng.randrange(len(messages))]


@pytest.mark.parametrize("is_shared", [False, True], ids=["inline", "shared"])
@pytest.mark.parametrize(
    "damage",
    [drop, duplicate, reorder, reorder_all, truncate, flip, swap_tails, cut_off],
    ids=lambda d: d.__name__,
)
async def test_a_damaged_transfer_is_an_error_or_whole(
    pair: Pair,
    damage: Damage,
    is_shared: bool,  # noqa: FBT001
) -> None:
    honest, release = await pair.record(is_shared=is_shared)
    assert await pair.receive(honest, is_shared=is_shared)
    outcomes = set()
    for seed in range(40):
        outcomes.add(await pair.receive(damage(list(honest), random.Random(seed)), is_shared=is_shared))
    release()
    # Pages may come in any order; a flipped bit may be one that says nothing, and tails may be equal.
    if damage is reorder:
        assert outcomes == {True}
    elif damage in (reorder_all, flip, swap_tails):
        assert False in outcomes
    else:
        assert outcomes == {False}


async def test_blocks_that_are_used_anew_before_they_are_read_are_noticed(pair: Pair) -> None:
    """The owner has let go too early: what is read is somebody else's."""
    honest, release = await pair.record(is_shared=True)
    for layer in pair.source.cache.layers:
        layer.keys.add_(1.0)
    assert not await pair.receive(honest, is_shared=True)
    release()


async def test_a_page_in_shared_memory_that_was_not_asked_for_is_an_error(pair: Pair) -> None:
    honest, release = await pair.record(is_shared=True)
    assert not await pair.receive(honest, is_shared=False)
    release()


@pytest.mark.parametrize("is_shared", [False, True], ids=["inline", "shared"])
async def test_a_page_of_nan_is_an_error_however_it_comes(
    pair: Pair,
    is_shared: bool,  # noqa: FBT001
) -> None:
    sequence = pair.source.submit(make_request(PROMPT, 4), SubmitMode.PREFILL_ONLY)
    async for _ in sequence.events():
        pass
    for layer in pair.source.cache.layers:
        layer.keys.fill_(torch.nan)
    sequence.release()
    honest, release = await pair.record(is_shared=is_shared)  # finds them in the prefix cache
    assert not await pair.receive(honest, is_shared=is_shared)
    release()


@pytest.mark.parametrize(
    "ranges",
    [
        {"token_start": 2**32 - 1, "token_end": 0, "layer_end": 1},
        {"layer_start": 2**32 - 1, "layer_end": 0, "token_end": 1},
        {"layer_end": 2**32 - 1, "token_end": 2**32 - 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_shared", [False, True], ids=["inline", "shared"])
async def test_ranges_that_are_none_are_not_counted(
    pair: Pair,
    ranges: dict[str, int],
    is_shared: bool,  # noqa: FBT001
) -> None:
    """`receive` looks at what is counted: no load report holds a negative number, or so large a one."""
    header = prefill_pb2.KvPage(transfer_id=TRANSFER, dtype="float32", blocks=[0], **ranges)
    assert not await pair.receive([encode_page(header, memoryview(b""))], is_shared=is_shared)


async def test_a_call_that_does_not_end_after_its_result_is_left(pair: Pair) -> None:
    """Prefill may not have heard that its pages have been read, and then waits for the call to end."""
    honest, release = await pair.record(is_shared=True)
    async with asyncio.timeout(5):
        assert await pair.receive(honest, is_shared=True, ends=False)
    release()


class _LateLook(Background):
    """Runs its job just when somebody asks whether there is one left."""

    def start(self, job: Callable[[], None]) -> None:
        self._late = job

    @property
    def num_unfinished(self) -> int:
        if (job := vars(self).pop("_late", None)) is not None:
            job()
        return 0


async def test_a_page_that_is_sealed_while_the_sender_looks_is_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "Background", _LateLook)
    honest, release = await pair.record(is_shared=False)
    assert await pair.receive(honest, is_shared=False)
    release()
