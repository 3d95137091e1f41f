"""A token depends on its logits, parameters, seed, choice and position, and on nothing else."""

from dataclasses import replace

import pytest
import torch

from services.engine.request import SamplingParams
from services.engine.sampler import SampleRow, sample, uniform

VOCABULARY = 50
LOGITS = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2


def row(position: int = 7, prompt: int = 4, **sampling: object) -> SampleRow:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return SampleRow(params, 0, [i % VOCABULARY for i in range(position)], prompt, (3,))


def token(logits: torch.Tensor, where: SampleRow) -> int:
    return sample(logits, [where])[0].token_id


def test_greedy_takes_the_best() -> None:
    assert token(LOGITS, row()) == int(LOGITS.argmax())


def test_company_changes_nothing() -> None:
    rows = [row(position=5 + i, temperature=0.5 + i / 10, seed=i, top_p=0.9, top_k=20) for i in range(8)]
    rows[3] = row(position=9)
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(1))
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(8)]
    assert together == alone


def test_seed_choice_and_position_each_matter_and_nothing_else() -> None:
    base = uniform(1, 0, 10)
    assert base == uniform(1, 0, 10)
    assert len({base, uniform(2, 0, 10), uniform(1, 1, 10), uniform(1, 0, 11)}) == 4
    assert all(0 <= uniform(seed, 0, 1) < 1 for seed in range(1000))


def test_samples_follow_the_exact_probabilities() -> None:
    """Chi-square over 20,000 draws; the bound is the 99.99% quantile for 49 degrees of freedom (97.6)."""
    draws = 20_000
    rows = [row(temperature=1.0, seed=seed) for seed in range(draws)]
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    for start in range(0, draws, 1000):
        for sampled in sample(LOGITS.expand(1000, -1), rows[start : start + 1000]):
            counts[sampled.token_id] += 1
    expected = LOGITS[0].double().softmax(-1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 97.6


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 1.0}, 1),
    ],
)
def test_filters_keep_only_the_best(sampling: dict[str, object], allowed: int) -> None:
    best = set(LOGITS[0].topk(allowed).indices.tolist())
    seen = {token(LOGITS, row(temperature=3.0, seed=seed, **sampling)) for seed in range(200)}
    assert seen <= best
    assert len(seen) == allowed


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    seen = {token(logits, row(temperature=1.0, seed=seed, top_p=0.75)) for seed in range(300)}
    assert seen == {0, 1}


def test_logprobs_are_the_models_own() -> None:
    sampled = sample(LOGITS, [row(temperature=0.3, logprobs=5, presence_penalty=1.0)])[0]
    exact = LOGITS[0].double().log_softmax(-1)
    assert sampled.logprob == pytest.approx(float(exact[sampled.token_id]), abs=1e-4)
    assert [t for t, _ in sampled.top_logprobs] == exact.topk(5).indices.tolist()


def test_penalties_and_bias_move_tokens() -> None:
    best, second = LOGITS[0].topk(2).indices.tolist()
    assert token(LOGITS, row(logit_bias=((best, -100.0),))) == second
    repeated = replace(row(), token_ids=[0, best, best], num_prompt_tokens=1)
    assert token(LOGITS, replace(repeated, sampling=SamplingParams(frequency_penalty=50.0))) != best
    assert token(LOGITS, replace(repeated, sampling=SamplingParams(presence_penalty=50.0))) != best
    assert token(LOGITS, replace(repeated, sampling=SamplingParams(repetition_penalty=50.0))) != best
    in_prompt = replace(repeated, num_prompt_tokens=3)
    assert token(LOGITS, replace(in_prompt, sampling=SamplingParams(frequency_penalty=50.0))) == best


def test_min_tokens_bars_the_end() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3] = 50.0
    assert token(logits, row(position=7, prompt=4, min_tokens=4)) != 3
    assert token(logits, row(position=8, prompt=4, min_tokens=4)) == 3


@pytest.mark.parametrize("temperature", [1e-30, 1e-307, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    assert token(LOGITS, row(temperature=temperature)) == int(LOGITS.argmax())
