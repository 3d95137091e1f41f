"""From logits to tokens.

Invariant: a sampled token is a pure function of its logits, the sampling parameters, the seed, the
choice index and the position. Company in the batch, retries and preemption change nothing.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from services.engine.request import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Where one row of logits comes from.

    Attributes:
        token_ids: prompt and generated tokens so far.
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

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone (a counter-based generator over XXH3)."""
    counter = struct.pack("<QIQ", seed % 2**64, choice_index, position)
    return (xxhash.xxh3_64_intdigest(counter) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token for each row of logits (B, vocabulary)."""
    adjusted = _adjust(logits, rows)
    token_ids = adjusted.argmax(dim=-1)
    random_rows = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if random_rows:
        chosen = [rows[i] for i in random_rows]
        token_ids[random_rows] = _sample_rows(adjusted[random_rows].double(), chosen)
    return [
        _with_logprobs(int(token_id), logits[i], row)
        for i, (token_id, row) in enumerate(zip(token_ids.tolist(), rows, strict=True))
    ]


def _adjust(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Bias, penalties and barred tokens, on a copy of the rows that have any."""
    changed = [i for i, row in enumerate(rows) if _changes_logits(row)]
    if not changed:
        return logits
    adjusted = logits.clone()
    for i in changed:
        _adjust_row(adjusted[i], rows[i])
    return adjusted


def _changes_logits(row: SampleRow) -> bool:
    s = row.sampling
    return bool(
        s.logit_bias
        or s.repetition_penalty != 1
        or s.presence_penalty
        or s.frequency_penalty
        or row.num_generated < s.min_tokens
    )


def _adjust_row(logits: torch.Tensor, row: SampleRow) -> None:
    s = row.sampling
    if s.repetition_penalty != 1:  # CTRL: divide what is positive, multiply what is not
        seen = torch.tensor(sorted(set(row.token_ids)))
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / s.repetition_penalty, scores * s.repetition_penalty)
    generated = row.token_ids[row.num_prompt_tokens :]
    if generated and (s.presence_penalty or s.frequency_penalty):
        distinct, counts = torch.unique(torch.tensor(generated), return_counts=True)
        logits[distinct] -= s.presence_penalty + s.frequency_penalty * counts
    for token_id, bias in s.logit_bias:
        logits[token_id] += bias
    if row.num_generated < s.min_tokens:
        logits[list(row.end_token_ids)] = float("-inf")


def _sample_rows(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Inverse transform sampling in fp64, (B,). Filters as in Hugging Face: top-k, top-p, then min-p."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).unsqueeze(1)

    # The best one is 0 before the division, so that no temperature is too small for the exponent.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column([row.sampling.temperature for row in rows])
    for i, row in enumerate(rows):
        top_k = row.sampling.top_k
        if 0 < top_k < logits.shape[1]:
            smallest = logits[i].topk(top_k).values[-1]
            logits[i, logits[i] < smallest] = float("-inf")
    probabilities = logits.softmax(dim=-1)
    if any(row.sampling.top_p < 1 for row in rows):
        probabilities *= _nucleus(probabilities, column([row.sampling.top_p for row in rows]))
    floor = column([row.sampling.min_p for row in rows]) * probabilities.amax(dim=-1, keepdim=True)
    probabilities[probabilities < floor] = 0
    cumulative = probabilities.cumsum(dim=-1)
    draws = column([uniform(row.sampling.seed, row.choice_index, row.position) for row in rows])
    # Right-sided, so that a draw on an edge never lands on a token of probability zero.
    token_ids = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True).squeeze(1)
    return token_ids.clamp_(max=logits.shape[1] - 1)


def _nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest set of best tokens whose mass reaches top_p: a mask (B, vocabulary)."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = (ordered.cumsum(dim=-1) - ordered < top_p) | (top_p >= 1)
    return torch.zeros_like(kept).scatter(1, order, kept)


def _with_logprobs(token_id: int, logits: torch.Tensor, row: SampleRow) -> SampledToken:
    """Log-probabilities of the model itself: before bias, penalties and temperature, as OpenAI's."""
    count = row.sampling.logprobs
    if count is None:
        return SampledToken(token_id)
    logprobs = logits.double().log_softmax(dim=-1)
    best = logprobs.topk(min(count, len(logprobs))) if count else None
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else ()
    return SampledToken(token_id, float(logprobs[token_id]), top)
