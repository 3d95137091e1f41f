"""Top-k, top-p and min-p, and the draw from the tokens they leave, for one row of logits.

Invariant: pure functions of their arguments. A row goes through the same operations on arrays of the
same shape on one thread whoever is in the batch, so that company cannot change a bit of the result.
Knows nothing of batches, seeds or penalties.

The filters are those of Hugging Face's `generate` in its order: temperature, top-k, top-p on what
top-k left, min-p. Each keeps all logits from some threshold on. So ties stay or go together and the
kept set does not hang on how a sort breaks them.

Nothing is sorted. Top-p is a test of the drawn token: it stays if the tokens better than it weigh less
than top_p; if not, it and all that are no better go, and the next draw is from the rest. The rest
holds the whole nucleus, so a token that passes is distributed as the nucleus is. (The rejection
sampling of FlashInfer, https://flashinfer.ai/2025/03/10/sampling.html; here one row, exact.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from services.engine.request import SamplingParams

Floats = npt.NDArray[np.floating]
TokenIds = npt.NDArray[np.int64]

NUM_GROUPS = 512  # a table's columns: sums and maxima down the columns are the cheap ones
_SMALLEST_TEMPERATURE = 1e-37  # its inverse is still a number in fp32
_LOG2_E = math.log2(math.e)
_LOWEST_LOGIT = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Room for one row, laid out as a table (R, G): token r * G + g in row r, column g.

    Attributes:
        logits: (R, G), padded with -inf beyond the vocabulary.
        row: (V,), the same without the padding.
        maxima: (G,), of the columns of `logits` when `look` was last called.
        weights, better: (R, G), whatever was computed last.
        mask: (R, G).
    """

    logits: Floats
    row: Floats
    maxima: Floats
    weights: Floats
    better: Floats
    mask: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, vocab_size: int) -> "Workspace":
        num_groups = min(vocab_size, NUM_GROUPS)
        logits = np.empty((-(-vocab_size // num_groups), num_groups), np.float32)
        logits.reshape(-1)[vocab_size:] = -np.inf
        return cls(
            logits=logits,
            row=logits.reshape(-1)[:vocab_size],
            maxima=np.empty_like(logits[0]),
            weights=np.empty_like(logits),
            better=np.empty_like(logits),
            mask=np.empty(logits.shape, np.bool_),
        )

    def load(self, logits: Floats) -> None:
        """Takes in a row of logits (V,), as a copy that may be changed in place."""
        self.row[:] = logits

    def look(self) -> float:
        """The largest logit, NaN if there is one. To be called again once the logits have changed."""
        np.maximum.reduce(self.logits, axis=0, out=self.maxima)
        return float(np.maximum.reduce(self.maxima))


def largest(work: Workspace, k: int) -> TokenIds:
    """Tokens of the k largest logits, ties with the last included, -inf not; ascending. After `look`.

    The k-th largest of the columns' maxima is no larger than the k-th largest logit, and few lie above.
    """
    bound = _LOWEST_LOGIT
    if k < len(work.row):
        bound = max(bound, _kth_largest(work.maxima if k <= len(work.maxima) else work.row, k))
    np.greater_equal(work.logits, bound, out=work.mask)
    (token_ids,) = work.mask.reshape(-1).nonzero()
    if len(token_ids) <= k:
        return token_ids
    values = work.row.take(token_ids)
    return token_ids[values >= _kth_largest(values, k)]


def _kth_largest(values: Floats, k: int) -> float:
    ordered = values.copy()
    ordered.partition(len(values) - k)
    return ordered.item(len(values) - k)


def weigh(logits: Floats, best: float, temperature: float, *, out: Floats) -> None:
    """Softmax without its denominator, of any shape: the largest logit, `best`, weighs 1."""
    np.subtract(logits, best, out=out)
    np.multiply(out, _LOG2_E / max(temperature, _SMALLEST_TEMPERATURE), out=out)
    np.exp2(out, out=out)  # numpy's takes two thirds of its exp's time


def draw_token(
    work: Workspace, best: float, sampling: SamplingParams, uniforms: Callable[[int], float]
) -> int:
    """A token of the row in `work`; never one of weight zero.

    Few candidates are weighed in fp64. The whole vocabulary is in fp32 with fp64 sums: a relative error
    of 1e-6 in a token's probability, a thousandth of what could be seen in a million draws.

    Args:
        best: the largest logit, as `look` has given it; finite.
        sampling: its temperature is above 0.
        uniforms: from 0, 1, ... to independent numbers in [0, 1); a further one for each rejected draw.
    """
    if not 0 < sampling.top_k < len(work.row):
        return _draw(work, best, sampling, uniforms)
    token_ids = largest(work, sampling.top_k)
    logits = work.row.take(token_ids).astype(np.float64)
    return token_ids.item(_draw_few(logits, best, sampling, uniforms))


def _draw(work: Workspace, best: float, sampling: SamplingParams, uniforms: Callable[[int], float]) -> int:
    logits, weights, better, mask = work.logits, work.weights, work.better, work.mask
    weigh(logits, best, sampling.temperature, out=weights)
    groups = np.add.reduce(weights, axis=0)
    nucleus = sampling.top_p * np.add.reduce(groups, dtype=np.float64)
    if sampling.min_p > 0:  # a ratio to the best one, which no filter before it has changed
        np.multiply(weights, np.greater_equal(weights, sampling.min_p, out=mask), out=weights)
        groups = np.add.reduce(weights, axis=0)
    for attempt in count():  # ends: every rejected draw takes at least its token out
        place = _pick(weights, groups, uniforms(attempt))
        if sampling.top_p >= 1:
            break
        np.multiply(weights, np.greater(logits, logits.item(place), out=mask), out=better)
        groups = np.add.reduce(better, axis=0)
        if np.add.reduce(groups, dtype=np.float64) < nucleus:
            break
        weights, better = better, weights
    return place


def _draw_few(logits: Floats, best: float, sampling: SamplingParams, uniforms: Callable[[int], float]) -> int:
    """The same from few logits (N,) in fp64: a place among them. A table would cost more than it saves."""
    weights = np.empty_like(logits)
    weigh(logits, best, sampling.temperature, out=weights)
    nucleus = sampling.top_p * np.add.reduce(weights)
    if sampling.min_p > 0:
        weights *= weights >= sampling.min_p
    for attempt in count():
        ends = weights.cumsum()
        place = _first_above(ends, uniforms(attempt) * ends.item(-1))
        if sampling.top_p >= 1:
            break
        weights *= logits > logits.item(place)
        if np.add.reduce(weights) < nucleus:
            break
    return place


def _pick(weights: Floats, groups: Floats, uniform: float) -> int:
    """Inverse transform over a table (R, G), column by column; `groups` are the columns' sums."""
    ends = groups.cumsum(dtype=np.float64)
    target = uniform * ends.item(-1)
    column = _first_above(ends, target)
    before = ends.item(column - 1) if column else 0.0
    row = _first_above(weights[:, column].cumsum(dtype=np.float64), target - before)
    return row * len(groups) + column


def _first_above(ends: npt.NDArray[np.float64], target: float) -> int:
    """The first place whose cumulative weight exceeds the target: never one that weighs nothing.

    A target that rounding brought to the last end, or beyond it, counts as just below.
    """
    below_all = math.nextafter(ends.item(-1), 0.0)
    return int(ends.searchsorted(min(target, below_all), side="right"))
