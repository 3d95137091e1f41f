"""From a checked chat request to what is asked of the model: tokens, limits, defaults."""

from gateway.errors import ContextTooLong, InvalidRequest, NotFound
from gateway.requests import ChatRequest
from gateway.router import ServedModel
from gateway.sampling import ReplySpec, Sampling
from gateway.tokenizer import ChatTokenizer

_SEED_MASK = 2**64 - 1


async def make_spec(
    chat: ChatRequest,
    *,
    model: ServedModel,
    tokenizer: ChatTokenizer,
    owner_hash: str,
    request_timeout_s: float,
) -> ReplySpec:
    """Raises NotFound (model), ContextTooLong, InvalidRequest."""
    if chat.model is not None and chat.model != model.name:
        raise NotFound(
            f"The model `{chat.model}` does not exist; this server has `{model.name}`.",
            param="model",
            code="model_not_found",
        )
    _check_token_ids(chat, tokenizer.vocab_size)
    prompt = await tokenizer.encode_chat([message.for_template() for message in chat.messages])
    room = model.max_model_len - len(prompt)
    if room < 1:
        raise ContextTooLong(
            f"The messages are {len(prompt)} tokens; the model takes {model.max_model_len}, reply included.",
            param="messages",
        )
    limit = chat.token_limit if chat.token_limit is not None else room
    if limit > room:
        name = "max_completion_tokens" if chat.max_completion_tokens is not None else "max_tokens"
        raise ContextTooLong(
            f"`{name}` is {limit}, but the messages ({len(prompt)} tokens) leave {room} of the model's "
            f"{model.max_model_len}.",
            param=name,
        )
    return ReplySpec(
        model=model.name,
        fingerprint=model.fingerprint,
        prompt_token_ids=prompt,
        sampling=_sampling(chat, limit),
        timeout_s=min(chat.timeout or request_timeout_s, request_timeout_s),
        num_choices=chat.n or 1,
        seed=None if chat.seed is None else chat.seed & _SEED_MASK,
        priority=chat.priority or 0,
        owner_hash=owner_hash,
        on_disconnect=chat.on_disconnect or "grace",
        format="chat",
        format_options={"include_usage": chat.include_usage},
    )


def _sampling(chat: ChatRequest, limit: int) -> Sampling:
    """OpenAI's defaults where the request says nothing."""

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        max_tokens=limit,
        temperature=given(chat.temperature, 1.0),
        top_p=given(chat.top_p, 1.0),
        top_k=chat.top_k or 0,
        min_p=given(chat.min_p, 0.0),
        repetition_penalty=given(chat.repetition_penalty, 1.0),
        presence_penalty=given(chat.presence_penalty, 0.0),
        frequency_penalty=given(chat.frequency_penalty, 0.0),
        logit_bias={int(token): bias for token, bias in (chat.logit_bias or {}).items()},
        min_tokens=chat.min_tokens or 0,
        stop=tuple(chat.stop or ()),
        stop_token_ids=tuple(chat.stop_token_ids or ()),
        ignore_eos=bool(chat.ignore_eos),
        include_stop=bool(chat.include_stop_str_in_output),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


def _check_token_ids(chat: ChatRequest, vocab_size: int) -> None:
    for name, ids in (
        ("logit_bias", [int(token) for token in chat.logit_bias or ()]),
        ("stop_token_ids", chat.stop_token_ids or []),
    ):
        if any(token_id >= vocab_size for token_id in ids):
            raise InvalidRequest(
                f"`{name}` names a token above {vocab_size - 1}, the model's last.", param=name
            )
