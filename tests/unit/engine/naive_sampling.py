"""Sampling the plain way, in fp64 with sorts and loops over tokens: what the engine's is compared with."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.engine.request import SamplingParams

Float64s = npt.NDArray[np.float64]


def adjusted(
    logits: Float64s,
    sampling: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    ends: Sequence[int],
) -> Float64s:
    changed = logits.copy()
    for token in {*prompt, *generated}:
        if changed[token] > 0:
            changed[token] /= sampling.repetition_penalty
        else:
            changed[token] *= sampling.repetition_penalty
    for token in set(generated):
        changed[token] -= sampling.presence_penalty + sampling.frequency_penalty * list(generated).count(
            token
        )
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    if len(generated) < sampling.min_tokens:
        for token in ends:
            changed[token] = -np.inf
    return changed


def softmax(logits: Float64s) -> Float64s:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def without_top_p(logits: Float64s, sampling: SamplingParams) -> Float64s:
    """Probabilities (V,) after temperature, top-k and min-p."""
    scaled = (logits - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-sampling.top_k]] = -np.inf
    probabilities = softmax(scaled)
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return np.asarray(probabilities / probabilities.sum())


def mass_above(logits: Float64s, sampling: SamplingParams) -> Float64s:
    """For each token (V,) the mass of the better ones, on which top-p decides: below top_p it stays."""
    probabilities = without_top_p(
        logits, SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k)
    )
    ascending = np.sort(logits)
    from_here_on = np.append(np.cumsum(probabilities[np.argsort(logits, kind="stable")][::-1])[::-1], 0.0)
    return np.asarray(from_here_on[np.searchsorted(ascending, logits, side="right")])


def probabilities_of(logits: Float64s, sampling: SamplingParams) -> Float64s:
    """What a sample must follow, (V,)."""
    probabilities = without_top_p(logits, sampling)
    if sampling.top_p < 1:
        probabilities[mass_above(logits, sampling) >= sampling.top_p] = 0
    return np.asarray(probabilities / probabilities.sum())
