"""Bad input against a running stack: the right status, the field named, and nothing hangs."""

from typing import Any

import httpx
import pytest

from tests.e2e.sse_client import post_json, stream_chat
from tests.e2e.stack import Stack

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(stack: Stack, body: dict[str, Any] | bytes) -> tuple[int, dict[str, Any]]:
    status, answer = post_json(stack.port, "/v1/chat/completions", body)
    return status, answer["error"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b'{"messages": NaN}', b"\xff\xfe{}", b'{"a":' * 5000]
)
def test_what_is_no_json_object_is_a_400(sim_stack: Stack, body: bytes) -> None:
    status, error = chat(sim_stack, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hello"),
        ("messages", None),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("model", 7),
        ("stream", "yes"),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", "10"),
        ("max_completion_tokens", -5),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 2),
        ("n", 0),
        ("stop", [""]),
        ("seed", "x"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("stop_token_ids", [-1]),
        ("top_logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("no_such_field", 1),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(sim_stack: Stack, field: str, value: object) -> None:
    status, error = chat(sim_stack, {"messages": MESSAGES, field: value})
    assert status == 400, error
    assert field in f"{error['param']} {error['message']}"


def test_an_unknown_model_is_a_404_that_names_it(sim_stack: Stack) -> None:
    status, error = chat(sim_stack, {"model": "gpt-9", "messages": MESSAGES})
    assert status == 404
    assert error["code"] == "model_not_found"
    assert "gpt-9" in error["message"]


@pytest.mark.parametrize("options", [{}, {"stream": True}])
def test_a_prompt_longer_than_the_model_is_a_400(sim_stack: Stack, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "baton " * 40_000}]
    status, error = chat(sim_stack, {"messages": messages, **options})
    assert status == 400
    assert error["code"] == "context_length_exceeded"


def test_a_body_of_10_mb_is_a_413(sim_stack: Stack) -> None:
    status, error = chat(sim_stack, {"messages": [{"role": "user", "content": "x" * 10_000_000}]})
    assert status == 413
    assert error["message"]


def test_unknown_paths_and_methods_answer_in_the_same_shape(sim_stack: Stack) -> None:
    unknown = httpx.get(f"{sim_stack.url}/v1/nothing")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"]
    wrong_method = httpx.get(f"{sim_stack.url}/v1/chat/completions")
    assert wrong_method.status_code == 405
    assert wrong_method.json()["error"]["message"]
    no_stream = httpx.post(f"{sim_stack.url}/v1/streams/no-such-reply-0123456789/cancel")
    assert no_stream.status_code == 404
    assert httpx.get(f"{sim_stack.url}/v1/models/no-such-model").status_code == 404


def test_good_requests_still_work_after_all_that(sim_stack: Stack) -> None:
    with stream_chat(sim_stack.port, max_tokens=3) as stream:
        assert stream.read_all()[-1].data == "[DONE]"
