"""How far a run along a reply is from the run that gave it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.errors import BenchFailed


@dataclass(frozen=True, slots=True)
class Comparison:
    """One reply, with one format, against the reply without a handover.

    Attributes:
        num_before_difference: tokens that a greedy reply has in common with it at its beginning. Read off the
            best tokens along that reply: up to the first other one, a free reply has seen the same.
        is_equal: whether that is all of it.
        divergences: Kullback-Leibler, nats, of the next token's distribution from that of the reply without a
            handover, at each position but the first, whose logits are the prefill's.
    """

    num_before_difference: int
    is_equal: bool
    divergences: list[float]


def compare(
    reply: Sequence[int], expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> Comparison:
    """Two runs along one reply.

    Args:
        expected, found: logits of each of its tokens but the first, (vocabulary,).
    """
    if not len(reply) - 1 == len(expected) == len(found):
        raise BenchFailed(f"{len(expected)} and {len(found)} logits for a reply of {len(reply)} tokens")
    best = [int(logits.argmax()) for logits in found]
    equal = [ours == token for ours, token in zip(best, reply[1:], strict=True)]
    num_before = 1 + (equal.index(False) if False in equal else len(equal))
    divergences = [_divergence(exact, ours) for exact, ours in zip(expected, found, strict=True)]
    return Comparison(num_before, num_before == len(reply), divergences)


def _divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Of the second from the first, nats."""
    exact_log, other_log = (logits.double().log_softmax(-1) for logits in (exact, other))
    return max(0.0, float((exact_log.exp() * (exact_log - other_log)).sum()))  # below 0 by rounding only
