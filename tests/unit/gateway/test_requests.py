"""Chat bodies: what is wrong is named, what is right becomes a spec with the model's limits."""

import json
import time
from typing import Any

import pytest

from gateway.chat_spec import make_spec
from gateway.errors import ContextTooLong, InvalidRequest, NotFound
from gateway.requests import parse_chat_request
from gateway.sampling import ReplySpec
from tests.unit.gateway.served_gateway import MODEL, QUESTION, WordTokenizer


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        parse_chat_request(body)
    return refused.value


async def spec(**fields: Any) -> ReplySpec:
    return await make_spec(
        parse_chat_request(json.dumps({**QUESTION, **fields}).encode()),
        model=MODEL,
        tokenizer=WordTokenizer(),  # type: ignore[arg-type]
        owner_hash="o",
        request_timeout_s=60.0,
    )


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b"null", b'{"a": NaN}', b"\xff", b'{"messages": "\\ud800"}', b"[" * 100_000],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(body).shape.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("messages", value) for value in (None, [], {}, "hi", [1], [{"role": "user"}], [{"content": "x"}])),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        *(("max_tokens", value) for value in (-1, 0, 1.0, "1", True, 2**31)),
        ("max_completion_tokens", -1),
        *(("temperature", value) for value in (-0.1, 2.1, "1")),
        *(("top_p", value) for value in (0, -1, 1.1)),
        ("top_k", -1),
        ("min_p", 1.5),
        *(("n", value) for value in (0, -1, 9, "1")),
        *(("stop", value) for value in ("", [""], [1], ["x"] * 17)),
        ("stream", 1),
        ("seed", 1.5),
        ("timeout", 0),
        ("timeout", -5),
        ("on_disconnect", "never"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("metadata", {str(number): "x" for number in range(1025)}),
        ("min_tokens", -1),
        ("top_logprobs", 21),
        ("no_such_field", 1),
    ],
)
def test_a_bad_value_is_refused_by_its_fields_name(field: str, value: Any) -> None:
    refused = refusal(json.dumps({**QUESTION, field: value}).encode())
    assert (refused.param or "").split(".")[0] == field
    assert field in refused.message


BAD_MESSAGE = {"role": "user", "content": "x", **{f"field{number}": 1 for number in range(40)}}


@pytest.mark.parametrize(
    "fields",
    [
        {f"field{number}": 1 for number in range(150_000)},
        {"metadata": {str(number): 1 for number in range(150_000)}},
        {"messages": [BAD_MESSAGE] * 4000},
    ],
)
def test_a_body_full_of_faults_is_refused_about_as_fast_as_it_is_read(fields: dict[str, Any]) -> None:
    body = json.dumps({**QUESTION, **fields}).encode()
    started = time.thread_time()
    json.loads(body)
    read_s = time.thread_time() - started
    refusal(body)
    refused_s = time.thread_time() - started - read_s
    assert refused_s < 3 * read_s + 0.05, "an error for each fault would take ten times as long"


async def test_without_a_limit_the_reply_gets_what_the_model_has_left() -> None:
    assert (await spec()).sampling.max_tokens == MODEL.max_model_len - 2
    assert (await spec(max_tokens=7)).sampling.max_tokens == 7
    assert (await spec(max_tokens=7, max_completion_tokens=8)).sampling.max_tokens == 8


async def test_a_prompt_that_leaves_no_room_names_the_messages() -> None:
    with pytest.raises(ContextTooLong) as refused:
        await spec(messages=[{"role": "user", "content": "baton " * MODEL.max_model_len}])
    assert refused.value.param == "messages"
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_that_does_not_fit_is_refused_by_its_name(name: str) -> None:
    assert (await spec(**{name: 98})).sampling.max_tokens == 98
    with pytest.raises(ContextTooLong) as refused:
        await spec(**{name: 99})
    assert refused.value.param == name


async def test_an_unknown_model_is_a_404_that_names_it() -> None:
    with pytest.raises(NotFound) as refused:
        await spec(model="gpt-9")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    assert "gpt-9" in refused.value.message
    assert (await spec(model=MODEL.name)).model == (await spec()).model == MODEL.name


async def test_what_the_request_says_nothing_about_takes_openais_defaults() -> None:
    plain = await spec()
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.num_choices) == (1.0, 1.0, 1)
    assert plain.sampling.logprobs is None
    assert (plain.seed, plain.on_disconnect, plain.timeout_s, plain.owner_hash) == (None, "grace", 60.0, "o")


async def test_zero_is_a_value_and_no_default() -> None:
    assert (await spec(temperature=0)).sampling.temperature == 0
    assert (await spec(seed=0)).seed == 0
    assert (await spec(logprobs=True)).sampling.logprobs == 0
    assert (await spec(logprobs=True, top_logprobs=0)).sampling.logprobs == 0


async def test_fields_reach_the_sampler() -> None:
    found = await spec(
        stop="\n", logit_bias={"7": -100}, top_k=5, n=2, seed=-1, logprobs=True, top_logprobs=3, timeout=500
    )
    sampling = found.sampling
    assert (sampling.stop, sampling.logit_bias, sampling.top_k) == (("\n",), {7: -100.0}, 5)
    assert (found.num_choices, found.seed, sampling.logprobs) == (2, 2**64 - 1, 3)
    assert found.timeout_s == 60.0, "no longer than the gateway allows"


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {"1000": 1}), ("stop_token_ids", [1000])])
async def test_a_token_that_the_model_lacks_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await spec(**{field: value})
    assert refused.value.param == field


async def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": " hello"}]
    assert (await spec(messages=[{"role": "user", "content": parts}])).prompt_token_ids == (0, 1)


async def test_only_the_options_of_the_rendering_are_kept_with_the_reply() -> None:
    streamed = await spec(stream=True, stream_options={"include_usage": True})
    assert streamed.format_options == {"include_usage": True}
