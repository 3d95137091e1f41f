"""Lengths to which gathered keys and values are padded, such that padding changes no bit of a sum.

torch's fused attention takes keys and values in runs of 512. Within a run the product of weights and
values is a matrix product whose library cuts the sum where it likes, by the run's length: on one CPU all
lengths up to 192 and from 368 agree, those between do not. Which agree is therefore measured at start.
"""

import torch
from torch.nn import functional as F

RUN = 512  # positions that the kernel takes at once
STEP = 16  # below it the last vector of a row is cut in ways of its own


class KvLengths:
    """Whether a padded length is one of those that agree with each other."""

    def __init__(self, tails: frozenset[int]) -> None:
        self._tails = tails | {RUN}

    def agrees(self, length: int) -> bool:
        return (length % RUN or RUN) in self._tails


ALL_LENGTHS = KvLengths(frozenset(range(STEP, RUN, STEP)))  # where exactness is not sought


@torch.inference_mode()
def find_lengths(head_size: int) -> KvLengths:
    """Lengths of the last run that give the same bits as a whole run with the rest masked."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, head_size, generator=generator) for n in (4, 2 * RUN, 2 * RUN))

    def attend(start: int, length: int, allowed: int) -> torch.Tensor:
        mask = torch.full((1, 1, 1, start + length), float("-inf"))
        mask[..., : start + allowed] = 0
        keys, values = k[:, :, : start + length], v[:, :, : start + length]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    return KvLengths(
        frozenset(
            length
            for length in range(STEP, RUN, STEP)
            if all(
                torch.equal(attend(start, length, allowed), attend(start, RUN, allowed))
                for start in (0, RUN)
                for allowed in (length, length - 7)
            )
        )
    )
