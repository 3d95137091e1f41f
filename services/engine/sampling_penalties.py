"""What a request changes about the model's logits before a token is chosen, for one row.

Invariant: a pure function of the row; every operation is element by element. Tokens are handled as
arrays, and a duplicate among them only writes the same value twice.
"""

from collections.abc import Sequence

import numpy as np

from services.engine.request import SamplingParams
from services.engine.sampling_filters import Floats, TokenIds


def adjust(
    logits: Floats,
    sampling: SamplingParams,
    *,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    end_token_ids: tuple[int, ...],
) -> None:
    """Changes logits (V,) in place: penalties, then bias, then the bar on ends below `min_tokens`.

    Repetition counts prompt and reply, presence and frequency the reply alone (as in vLLM).
    """
    num_generated = len(token_ids) - num_prompt_tokens
    if _has_penalties(sampling):
        seen = np.asarray(token_ids, dtype=np.int64)
        if sampling.repetition_penalty != 1:
            _penalize_repetition(logits, seen, sampling.repetition_penalty)
        generated = seen[num_prompt_tokens:]
        if sampling.presence_penalty:
            logits[generated] -= np.float32(sampling.presence_penalty)  # once, however often a token came
        if sampling.frequency_penalty:
            np.subtract.at(logits, generated, np.float32(sampling.frequency_penalty))  # each time
    for token_id, bias in sampling.logit_bias:  # some dozens at most: as arrays they would take longer
        logits[token_id] += bias
    if num_generated < sampling.min_tokens:
        for token_id in end_token_ids:
            logits[token_id] = -np.inf


def _has_penalties(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)


def _penalize_repetition(logits: Floats, seen: TokenIds, penalty: float) -> None:
    """CTRL (https://arxiv.org/abs/1909.05858), as everybody runs it: away from the good, into the bad."""
    scores = logits.take(seen)
    logits[seen] = np.where(scores > 0, scores / penalty, scores * penalty)
