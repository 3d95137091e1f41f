"""What the engines are asked: prompts of random tokens, from seeds, and two ways of sampling.

The same arguments give the same prompts in every process, so that two engines can be asked the same.
"""

import random
from collections.abc import Sequence

from services.engine.request import EngineRequest, SamplingParams

Prompt = tuple[int, ...]

# Never part of a reply: the search for them costs what it costs, and no reply ends early.
_STOPS = ("\x00never\x00", "\x00neither\x00")


def make_prompts(count: int, length: int, vocab_size: int, seed: str) -> list[Prompt]:
    """Prompts without a common beginning, so that no prefix cache can help.

    Drawn from the middle of the vocabulary: special tokens stand at its ends.
    """
    source = random.Random(seed)
    return [tuple(source.choices(range(vocab_size // 4, vocab_size // 2), k=length)) for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly `num_tokens` best tokens."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def all_features(num_tokens: int, row: int, vocab_size: int) -> SamplingParams:
    """Exactly `num_tokens`, with everything that sampling can be asked for at once.

    `min_tokens` bars the end of the sequence throughout.
    """
    biased = [(17 * row + 31 * i) % vocab_size for i in range(8)]
    return SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=tuple((token_id, 1.5) for token_id in dict.fromkeys(biased)),
        seed=1000 + row,
        max_tokens=num_tokens,
        min_tokens=num_tokens,
        stop=_STOPS,
        logprobs=5,
    )


def make_requests(prompts: Sequence[Prompt], samplings: Sequence[SamplingParams]) -> list[EngineRequest]:
    """One request for each prompt."""
    return [
        EngineRequest(request_id=f"bench/{i}", prompt_token_ids=prompt, sampling=sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
