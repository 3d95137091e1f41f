"""What the tests of sampling share."""

from collections.abc import Sequence

import torch

from services.engine.request import SampledToken
from services.engine.sampler import Sampler, SampleRow


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token for each row of logits (B, V), from a sampler that has never sampled before."""
    tokens = Sampler(logits.shape[1]).sample(logits, rows)
    sampled = [token for token in tokens if isinstance(token, SampledToken)]
    assert len(sampled) == len(rows)
    return sampled
