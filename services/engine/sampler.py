"""From logits to tokens.

Invariant: a sampled token is a pure function of its logits, the sampling parameters, the seed, the
choice index and the position. Company in the batch, retries and preemption change nothing: rows are
computed one after the other by the same operations, each small enough to stay in the core's cache.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np
import torch
import xxhash

from services.engine.request import NoToken, SampledToken, SamplingParams
from services.engine.sampling_filters import Floats, Workspace, draw_token, largest, weigh
from services.engine.sampling_penalties import adjust

_value = itemgetter(1)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Where one row of logits comes from.

    Attributes:
        token_ids: prompt and generated tokens so far; an `array("q")` is read without a copy.
        num_prompt_tokens: how many of them are the prompt.
        end_token_ids: end-of-sequence and stop tokens, barred below `min_tokens`.
    """

    sampling: SamplingParams
    choice_index: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]

    @property
    def position(self) -> int:
        return len(self.token_ids)


def uniform(seed: int, choice_index: int, position: int, attempt: int = 0) -> float:
    """A number in [0, 1) that depends on its arguments alone (a counter-based generator over XXH3)."""
    counter = struct.pack("<QIQ", seed % 2**64, choice_index, position)
    return (xxhash.xxh3_64_intdigest(counter, seed=attempt) >> 11) * 2.0**-53


class Sampler:
    """Samples row after row in room of its own, so one thread at a time may use it."""

    def __init__(self, vocab_size: int) -> None:
        self._work = Workspace.empty(vocab_size)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | NoToken]:
        """One token for each row of logits (B, V), fp32, or why there is none."""
        table: Floats = logits.detach().cpu().numpy()
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return [self._sample_row(values, row) for values, row in zip(table, rows, strict=True)]

    def _sample_row(self, values: Floats, row: SampleRow) -> SampledToken | NoToken:
        work = self._work
        work.load(values)
        num_top = row.sampling.logprobs
        # First, since what follows changes the logits in place.
        model = None if num_top is None else _ModelLogprobs.read(work, num_top)
        adjust(
            work.row,
            row.sampling,
            token_ids=row.token_ids,
            num_prompt_tokens=row.num_prompt_tokens,
            end_token_ids=row.end_token_ids,
        )
        best = work.look()
        if not math.isfinite(best) or (model is not None and not math.isfinite(model.log_total)):
            return NoToken.REQUEST if math.isfinite(values.max()) else NoToken.LOGITS
        if row.sampling.temperature > 0:
            uniforms = partial(uniform, row.sampling.seed, row.choice_index, row.position)
            token_id = draw_token(work, best, row.sampling, uniforms)
        else:
            token_id = int(work.row.argmax())  # the first of the best
        return SampledToken(token_id) if model is None else model.of(token_id, values)


@dataclass(frozen=True, slots=True)
class _ModelLogprobs:
    """Log-probabilities of the model itself: before bias, penalties and temperature, as OpenAI's."""

    log_total: float  # of the softmax's denominator; no number if the logits are none
    top: tuple[tuple[int, float], ...]  # tokens and their log-probabilities, best first

    @classmethod
    def read(cls, work: Workspace, num_top: int) -> "_ModelLogprobs":
        best = work.look()
        weigh(work.logits, best, 1.0, out=work.weights)
        log_total = best + math.log(np.add.reduce(np.add.reduce(work.weights, axis=0), dtype=np.float64))
        if not num_top:
            return cls(log_total, ())
        token_ids = largest(work, num_top)
        pairs = zip(token_ids.tolist(), work.row.take(token_ids).tolist(), strict=True)
        best_first = sorted(pairs, key=_value, reverse=True)  # of equal ones the first token leads
        return cls(log_total, tuple((each, value - log_total) for each, value in best_first[:num_top]))

    def of(self, token_id: int, values: Floats) -> SampledToken:
        """The token beside the best ones. Takes the row of logits as the model gave it."""
        return SampledToken(token_id, values.item(token_id) - self.log_total, self.top)
