from dataclasses import replace
from typing import Any

import pytest

from services.engine.errors import InvalidRequest, PromptTooLong
from services.engine.request import EngineInfo, EngineRequest, ModelIdentity, SamplingParams, SubmitMode
from services.engine.request_check import check_request

IDENTITY = ModelIdentity(
    model="m",
    fingerprint="f",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_size=1,
    rope="",
    wire_version=1,
)
INFO = EngineInfo(
    identity=IDENTITY, max_model_len=100, block_size=4, num_blocks=10, max_num_seqs=4, max_queue_len=4
)


def check(
    prompt: tuple[int, ...] = (1, 2),
    mode: SubmitMode = SubmitMode.LOCAL,
    choice_index: int = 0,
    **sampling: Any,
) -> None:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        choice_index=choice_index,
    )
    check_request(request, mode, INFO, vocab_size=50)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("prompt_token_ids", {"prompt": ()}),
        ("prompt_token_ids", {"prompt": (1, 50)}),
        ("prompt_token_ids", {"prompt": (-1,)}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("min_p", {"min_p": 2.0}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": 1e-300}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("presence_penalty", {"presence_penalty": float("inf")}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("logit_bias", {"logit_bias": ((50, 1.0),)}),
        ("logit_bias", {"logit_bias": ((1, float("nan")),)}),
        ("logit_bias", {"logit_bias": ((1, 1e39),)}),
        ("stop_token_ids", {"stop_token_ids": (50,)}),
        ("stop", {"stop": ("",)}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 10**400}),
        ("min_tokens", {"min_tokens": -1}),
        ("top_k", {"top_k": -1}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 21}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(50)), "min_tokens": 1}),
        ("choice_index", {"choice_index": -1}),
        ("choice_index", {"choice_index": 2**32}),
    ],
)
def test_what_is_wrong_is_named(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**arguments)
    assert caught.value.field == field


def test_a_prompt_that_leaves_no_room_for_a_reply_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="100"):
        check(prompt=(1,) * 100)


def test_a_reply_that_can_never_fit_the_pool_is_refused_by_the_field_at_fault() -> None:
    check(prompt=(1,) * 20, max_tokens=21)  # the last token is never computed
    with pytest.raises(PromptTooLong) as caught:
        check(prompt=(1,) * 20, max_tokens=22)
    assert caught.value.field == "max_tokens"
    check(prompt=(1,) * 40, mode=SubmitMode.PREFILL_ONLY, max_tokens=50)
    with pytest.raises(PromptTooLong) as caught:
        check(prompt=(1,) * 41, mode=SubmitMode.PREFILL_ONLY)
    assert caught.value.field == "prompt_token_ids"


def test_positions_that_the_model_does_not_have_are_never_computed() -> None:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=(1,),
        generated_token_ids=(2,) * 99,
        sampling=SamplingParams(max_tokens=200),
    )
    info = replace(INFO, num_blocks=100)
    check_request(request, SubmitMode.LOCAL, info, vocab_size=50)  # ends at once, with nothing computed
    with pytest.raises(PromptTooLong):
        check_request(request, SubmitMode.PREFILL_ONLY, info, vocab_size=50)
