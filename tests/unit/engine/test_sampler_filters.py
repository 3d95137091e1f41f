"""The filters keep what a sort in fp64 would keep, and draws follow the exact probabilities."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.request import SamplingParams
from services.engine.sampler import SampleRow, uniform
from services.engine.sampling_filters import NUM_GROUPS, Floats, Workspace, draw_token, largest, weigh
from tests.unit.engine import naive_sampling as naive
from tests.unit.engine.sampling import sample

SHAPES = ("normal", "flat", "nearly flat", "peaked", "few values", "barred", "one left")
VOCAB_SIZES = (1, 2, 50, 63, NUM_GROUPS - 1, NUM_GROUPS, NUM_GROUPS + 1, 5000)


def logits_of(shape: str, vocab_size: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    logits = random.standard_normal(vocab_size) * 2
    if shape == "flat":
        logits[:] = logits[0]
    elif shape == "nearly flat":
        logits *= 0.01
    elif shape == "peaked":
        logits[random.integers(vocab_size, size=3)] += 9
    elif shape == "few values":
        logits = np.round(logits)
    elif shape == "barred":
        logits[random.random(vocab_size) < 0.5] = -np.inf
        logits[random.integers(vocab_size)] = 1.0
    elif shape == "one left":
        logits[:] = -np.inf
        logits[random.integers(vocab_size)] = -3.0
    return logits.astype(np.float32)


def loaded(logits: Floats) -> Workspace:
    work = Workspace.empty(len(logits))
    work.load(logits)
    work.look()
    return work


def drawn(logits: Floats, sampling: SamplingParams, uniforms: Callable[[int], float]) -> int:
    return draw_token(loaded(logits), float(logits.max()), sampling, uniforms)


class Rejected(Exception):
    """The first token drawn was filtered out."""


def once(value: float) -> Callable[[int], float]:
    def uniforms(attempt: int) -> float:
        if attempt:
            raise Rejected
        return value

    return uniforms


def drawn_first(logits: Floats, sampling: SamplingParams, value: float) -> int | None:
    """The token that this uniform number leads to; None if it was filtered out."""
    try:
        return drawn(logits, sampling, once(value))
    except Rejected:
        return None


@given(
    shape=st.sampled_from(SHAPES),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    seed=st.integers(0, 2**32),
    top_k=st.sampled_from([0, 1, 2, 50, 1000, 1500, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 3.0, 100.0]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_keeps_what_a_sort_keeps(
    shape: str, vocab_size: int, seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Aims a draw at the middle of each token's share and sees whether the token is returned."""
    logits = logits_of(shape, vocab_size, seed)
    exact = logits.astype(np.float64)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    pool, above = naive.without_top_p(exact, sampling), naive.mass_above(exact, sampling)
    is_table = not 0 < top_k < vocab_size  # whose draws go column by column
    order = np.array(
        sorted(range(vocab_size), key=lambda token: (token % NUM_GROUPS if is_table else 0, token))
    )
    middles = np.empty(vocab_size)
    middles[order] = np.cumsum(pool[order]) - pool[order] / 2
    aimed_at = np.flatnonzero(pool > 1e-5)  # the middle of a smaller share is not to be hit in fp32
    for token in np.random.default_rng(seed).permutation(aimed_at)[:60]:
        if abs(above[token] - top_p) > 1e-6:  # else a matter of rounding
            kept = above[token] < top_p or top_p == 1
            assert drawn_first(logits, sampling, middles[token]) == (token if kept else None)
    for value in (0.0, 1 - 2.0**-53):
        assert pool[drawn(logits, sampling, lambda attempt, value=value: value)] > 0


@given(
    shape=st.sampled_from(SHAPES),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    seed=st.integers(0, 2**32),
    k=st.integers(1, 1500),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_largest_equals_a_sort(shape: str, vocab_size: int, seed: int, k: int) -> None:
    logits = logits_of(shape, vocab_size, seed)
    threshold = np.sort(logits)[-min(k, vocab_size)]
    expected = [i for i in range(vocab_size) if logits[i] >= threshold and logits[i] > -np.inf]
    assert largest(loaded(logits), k).tolist() == expected


def chi_square_bound(degrees: int) -> float:
    """The 99.99% quantile, after Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3


ALL_FILTERS = {"top_k": 30, "top_p": 0.95, "min_p": 0.02}


@pytest.mark.parametrize(
    ("shape", "vocab_size", "filters"),
    [
        ("normal", 50, ALL_FILTERS),
        ("normal", 5000, ALL_FILTERS),
        ("few values", 50, ALL_FILTERS),
        ("nearly flat", 3000, {}),
        ("nearly flat", 3000, {"top_p": 0.3}),  # most draws are rejected
        ("normal", 3000, {"top_p": 0.6, "min_p": 0.05}),
    ],
)
def test_samples_follow_the_exact_probabilities(
    shape: str, vocab_size: int, filters: dict[str, float]
) -> None:
    draws, batch = 8000, 500
    logits = logits_of(shape, vocab_size, seed=4)
    params = [
        SamplingParams(temperature=0.9, seed=seed, **filters)  # type: ignore[arg-type]
        for seed in range(draws)
    ]
    exact = naive.probabilities_of(logits.astype(np.float64), params[0])
    rows = [SampleRow(sampling, 0, [1, 2, 3], 2, ()) for sampling in params]
    counts = np.zeros(vocab_size)
    for start in range(0, draws, batch):
        for sampled in sample(torch.from_numpy(logits).expand(batch, -1), rows[start : start + batch]):
            counts[sampled.token_id] += 1
    assert not counts[exact == 0].any()
    bins = np.cumsum(exact) * 40 // 1  # of about 200 draws each; the share of a frequent token is its own bin
    expected = np.bincount(bins.astype(int), exact) * draws
    seen = np.bincount(bins.astype(int), counts)[expected > 0]
    expected = expected[expected > 0]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert len(expected) > 5
    assert statistic < chi_square_bound(len(expected) - 1)


@pytest.mark.parametrize("temperature", [5e-324, 1e-307, 1e-38, 1e-30, 1e-3, 100.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, ALL_FILTERS])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e38])
def test_extremes_stay_within_the_kept_set(
    temperature: float, filters: dict[str, float], scale: float
) -> None:
    logits = (logits_of("barred", 1500, seed=1).clip(-3, 3) * np.float32(scale)).astype(np.float32)
    logits[logits_of("barred", 1500, seed=1) == -np.inf] = -np.inf
    sampling = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    with np.errstate(all="ignore"):
        tokens = {drawn(logits, sampling, lambda attempt, i=i: uniform(i, 0, 0, attempt)) for i in range(50)}
    assert all(np.isfinite(logits[token]) for token in tokens)
    if scale / temperature > 1e9:
        assert {logits[token] for token in tokens} == {logits.max()}


@pytest.mark.parametrize("top_p", [0.95, 0.3, 0.01, 5e-324])
def test_rejected_draws_come_to_an_end(top_p: float) -> None:
    """A stream of uniform numbers as bad as can be: always the last token of the rest."""
    logits = np.sort(logits_of("normal", 1000, seed=2))[::-1].copy()  # so that the last is the worst
    attempts = count(1)
    used = 0

    def worst(attempt: int) -> float:
        nonlocal used
        used = next(attempts)
        return 1 - 2.0**-53

    token = drawn(logits, SamplingParams(temperature=1.0, top_p=top_p), worst)
    assert naive.mass_above(logits.astype(np.float64), SamplingParams(temperature=1.0))[token] < top_p
    assert used <= 1000


def test_draws_at_the_edges_of_columns_stay_in_the_vocabulary() -> None:
    """A column's sum in fp32 may exceed the sum of its weights in fp64, and a draw may fall in between."""
    logits = logits_of("normal", 5000, seed=3)
    work = loaded(logits)
    weigh(work.logits, work.look(), 1.0, out=work.weights)
    ends = np.add.reduce(work.weights, axis=0).cumsum(dtype=np.float64)
    for column, end in enumerate(ends):
        value = float(np.nextafter(end / ends[-1], 0))
        token = drawn_first(logits, SamplingParams(temperature=1.0), value)
        assert token is not None
        assert token < 5000
        assert token % NUM_GROUPS in (column, column + 1)  # the quotient may have been rounded up
