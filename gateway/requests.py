"""Bodies of chat requests: read within a bound, parsed strictly, turned into a `ReplySpec`.

Invariant: whatever is wrong is a 400 that names the field; nothing is coerced, nothing unknown is
ignored. Must not know: workers, logs, formats' renderings.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from starlette.requests import ClientDisconnect, Request

from gateway.errors import BodyTooLarge, InvalidRequest
from gateway.sampling import OnDisconnect

# Parameters of the OpenAI API that are not supported, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

_MAX_FIELDS = 64  # of one object, unknown ones included
_MAX_TOKEN_ID_DIGITS = 10


def _at_most(num_entries: int) -> Callable[[Any], Any]:
    """Bounds an object before its entries are looked at: a body full of bad ones costs a second."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_entries:
            raise ValueError(f"it should have at most {num_entries} entries, not {len(value)}")
        return value

    return check


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    _few_fields = model_validator(mode="before")(_at_most(_MAX_FIELDS))


class TextPart(_Strict):
    type: Literal["text"]
    text: str


def _join_parts(value: Any) -> Any:
    """Text parts are concatenated; anything that is not a list goes on to be checked as a string."""
    if not isinstance(value, list):
        return value
    return "".join(TextPart.model_validate(part).text for part in value)


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_join_parts)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Templates know `system`, not its newer name."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted; no padding is sent


StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_ID_DIGITS


class ChatRequest(_Strict):
    """`POST /v1/chat/completions`. None means the default throughout."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1, max_length=4096)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=8)
    stop: Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_at_most(1024))] | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_at_most(1024))] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    timeout: float | None = Field(None, gt=0)
    on_disconnect: OnDisconnect | None = None

    @model_validator(mode="before")
    @classmethod
    def _unsupported_parameters(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        for name, harmless in UNSUPPORTED.items():
            if body.get(name) is not None and body[name] not in harmless:
                raise InvalidRequest(f"`{name}` is not supported by this server.", param=name)
        return {name: value for name, value in body.items() if name not in UNSUPPORTED}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream: true`.", param="stream_options")
        if self.logit_bias and not all(map(_is_token_id, self.logit_bias)):
            raise InvalidRequest("The keys of `logit_bias` must be token IDs.", param="logit_bias")
        limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise InvalidRequest("`min_tokens` is larger than the token limit.", param="min_tokens")
        return self

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` is the newer name and wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, counted while it comes. Raises BodyTooLarge, ClientDisconnect."""
    too_large = BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        more = message.get("more_body", False)
    return bytes(body)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidRequest naming the field. NaN, Infinity and lone surrogates are no JSON here."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    try:
        return ChatRequest.model_validate(document)
    except ValidationError as error:
        raise _first_fault(error) from error


def _first_fault(error: ValidationError) -> InvalidRequest:
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in fault["loc"]) or None
    if fault["type"] == "missing":
        return InvalidRequest(
            f"Missing required parameter: `{param}`.", param=param, code="missing_required_parameter"
        )
    if fault["type"] == "extra_forbidden":
        return InvalidRequest(f"Unknown parameter: `{param}`.", param=param, code="unknown_parameter")
    name = f"Invalid `{param}`: " if param else ""
    return InvalidRequest(f"{name}{fault['msg'].removeprefix('Value error, ')}.", param=param)
