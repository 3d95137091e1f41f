"""Checks a request before it is admitted: what could never be computed is refused by name."""

from services.engine.block_manager import blocks_for
from services.engine.errors import InvalidRequest, PromptTooLong
from services.engine.request import EngineInfo, EngineRequest, SamplingParams, SubmitMode

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31),
    ("min_tokens", 0, 2**31),
    ("top_k", 0, 2**31),
    ("temperature", 0, 100),
    ("min_p", 0, 1),
    ("repetition_penalty", 0.01, 100),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
)
_MOST_LOGPROBS = 20  # each of them a token's text in every event
_LARGEST_BIAS = 100  # more would overflow a logit and says no more


def check_request(request: EngineRequest, mode: SubmitMode, info: EngineInfo, vocab_size: int) -> None:
    """Raises InvalidRequest; PromptTooLong if prompt and reply can never fit the model or the pool."""
    for field in ("prompt_token_ids", "generated_token_ids"):
        ids = getattr(request, field)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(field, f"token IDs must lie below {vocab_size}")
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "is empty; at least one token is needed")
    if not 0 <= request.choice_index < 2**32:
        raise InvalidRequest("choice_index", "must lie between 0 and 4294967295")
    _check_sampling(request.sampling, vocab_size)
    _check_ends(request.sampling, info, vocab_size)
    num_tokens = request.num_context_tokens
    # One that fills the context already is a complete reply, and ends before it needs room.
    is_continuation = request.generated_token_ids and mode is not SubmitMode.PREFILL_ONLY
    if num_tokens >= info.max_model_len and not is_continuation:
        raise PromptTooLong(
            "prompt_token_ids",
            f"{num_tokens} tokens leave no room for a reply within the model's {info.max_model_len}",
        )
    if mode is SubmitMode.PREFILL_ONLY:
        needed = blocks_for(num_tokens, info.block_size)
    else:
        needed = blocks_for(request.most_positions(info.max_model_len), info.block_size)
    if needed > info.num_blocks:
        prompt_fits = blocks_for(num_tokens, info.block_size) <= info.num_blocks
        raise PromptTooLong(
            "max_tokens" if prompt_fits else "prompt_token_ids",
            f"prompt and reply need {needed} KV blocks of {info.block_size} tokens, "
            f"the pool has {info.num_blocks}",
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    for field, low, high in _RANGES:
        value = getattr(sampling, field)
        if not low <= value <= high:  # so written, NaN fails too
            raise InvalidRequest(field, f"must lie between {low} and {high}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p", "must lie above 0 and not above 1")
    if any(not 0 <= token_id < vocab_size for token_id, _ in sampling.logit_bias):
        raise InvalidRequest("logit_bias", f"token IDs must lie below {vocab_size}")
    if any(not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS for _, bias in sampling.logit_bias):
        raise InvalidRequest("logit_bias", f"must lie between -{_LARGEST_BIAS} and {_LARGEST_BIAS}")
    if any(not 0 <= token_id < vocab_size for token_id in sampling.stop_token_ids):
        raise InvalidRequest("stop_token_ids", f"must lie below {vocab_size}")
    if any(not stop for stop in sampling.stop):
        raise InvalidRequest("stop", "must not be empty strings")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= _MOST_LOGPROBS:
        raise InvalidRequest("logprobs", f"must lie between 0 and {_MOST_LOGPROBS}")


def _check_ends(sampling: SamplingParams, info: EngineInfo, vocab_size: int) -> None:
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(info.eos_token_ids)
    if sampling.min_tokens and len(ends) >= vocab_size:
        raise InvalidRequest("stop_token_ids", "name every token, and min_tokens bars them all")
