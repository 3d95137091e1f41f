"""In which order a request asks the workers of one role.

- `least-loaded`: whoever has the fewest requests for its size; ties go to the longest rested.
- `prefix-affinity`: whoever ran prompts that began alike, since its prefix cache holds that beginning
  (decode's too: what it holds of a prompt is not sent again). Rendezvous hashing (Thaler and
  Ravishankar, 1998) gives each key an order of workers that every gateway finds by itself, without
  having seen the others' requests. The load is bounded (Mirrokni, Thorup and Zadimoghaddam, 2016,
  arXiv 1608.01350): a worker takes at most `load_bound` times its share of all requests, this one
  included; then the next in order is asked, which thereby comes to hold the beginning too.

Invariants: one worker more or less moves about 1 / n of the keys; a key without competition goes to one
worker; no worker is picked above its bound while another is below; the key holds the tenant, whose
caches nobody else shares. Pure: must not know workers' connections, failures, time.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import ceil

import xxhash


class RoutingPolicy(StrEnum):
    """The setting `BATON_ROUTING`."""

    PREFIX_AFFINITY = "prefix-affinity"
    LEAST_LOADED = "least-loaded"


class PickOutcome(StrEnum):
    """How the first choice came about, for the metrics."""

    AFFINITY = "affinity"  # the first in the key's order
    OVERFLOW = "overflow"  # those before it, or all, were above their bound, or had no room for the prompt
    LEAST_LOADED = "least_loaded"


@dataclass(frozen=True, slots=True)
class Affinity:
    """How prefix-affinity weighs.

    Args:
        num_blocks: how many leading blocks of a prompt make the key. Fewer: long beginnings that many
            share, such as one system prompt, make one hot key. More: a conversation keeps moving for
            longer, since its key is that of the full blocks it has as long as these are fewer.
        load_bound: how much more than its share a worker takes; above 1.
    """

    num_blocks: int = 16
    load_bound: float = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as a policy sees it."""

    address: str
    num_requests: int  # running, waiting, on their way
    capacity: int  # requests per step
    share_of_blocks: float  # in use, 0 to 1
    lacks_room: bool  # for the prompt
    last_picked: int  # higher is later


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates, the first choice first."""

    order: tuple[Candidate, ...]
    outcome: PickOutcome


def prefix_key(token_ids: Sequence[int], salt: str, *, block_size: int, num_blocks: int) -> bytes | None:
    """What requests with the same beginning, of the same tenant, have in common; None below one block."""
    num_tokens = min(len(token_ids) // block_size, num_blocks) * block_size
    if not num_tokens:
        return None
    tenant = blake2b(salt.encode(), digest_size=16).digest()
    return blake2b(tenant + array("I", token_ids[:num_tokens]).tobytes(), digest_size=16).digest()


def by_load(candidates: Sequence[Candidate]) -> Ranking:
    """The least busy first."""
    order = sorted(
        candidates,
        key=lambda c: (c.lacks_room, c.num_requests / c.capacity, c.share_of_blocks, c.last_picked),
    )
    return Ranking(tuple(order), PickOutcome.LEAST_LOADED)


def by_affinity(candidates: Sequence[Candidate], key: bytes, load_bound: float) -> Ranking:
    """Those below their bound in the key's order, then the rest by load."""
    preferred = sorted(candidates, key=lambda c: (_score(key, c.address), c.address), reverse=True)
    num_requests = 1 + sum(candidate.num_requests for candidate in candidates)
    load_per_place = load_bound * num_requests / sum(candidate.capacity for candidate in candidates)
    below: list[Candidate] = []
    above: list[Candidate] = []
    for candidate in preferred:
        has_room = candidate.num_requests < ceil(load_per_place * candidate.capacity)
        (below if has_room and not candidate.lacks_room else above).append(candidate)
    order = (*below, *by_load(above).order)
    is_hit = below[:1] == preferred[:1]
    return Ranking(order, PickOutcome.AFFINITY if is_hit else PickOutcome.OVERFLOW)


def _score(key: bytes, address: str) -> int:
    return xxhash.xxh3_64_intdigest(key + address.encode())
