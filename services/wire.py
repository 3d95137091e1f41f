"""Conversions between protobuf messages and the engine's dataclasses, at the workers' edge.

Inside a worker there is no protobuf; unknown enum values raise here.
"""

from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from services.engine.errors import InvalidRequest
from services.engine.identity import compatibility_hash
from services.engine.request import (
    EngineInfo,
    EngineRequest,
    FinishReason,
    ModelIdentity,
    SampledToken,
    SamplingParams,
)
from services.kv.payload import PayloadFormat

_FINISH_REASONS = {
    FinishReason.STOP: decode_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: decode_pb2.FINISH_REASON_LENGTH,
}
_PAYLOAD_FORMATS = {
    PayloadFormat.EXACT: prefill_pb2.PAYLOAD_FORMAT_EXACT,
    PayloadFormat.FLOAT16: prefill_pb2.PAYLOAD_FORMAT_FLOAT16,
    PayloadFormat.INT8: prefill_pb2.PAYLOAD_FORMAT_INT8,
}


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest where zero cannot be told from forgotten."""
    if message.max_tokens < 1:
        raise InvalidRequest("max_tokens", "must be at least 1")
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def engine_request(message: decode_pb2.GenerateRequest | prefill_pb2.PrefillRequest) -> EngineRequest:
    """One sequence, from either service's request."""
    return EngineRequest(
        request_id=f"{message.reply_id}/{message.choice_index}",
        prompt_token_ids=tuple(message.prompt_token_ids),
        generated_token_ids=tuple(message.generated_token_ids),
        sampling=sampling_from_proto(message.sampling),
        choice_index=message.choice_index,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def token_to_proto(token: SampledToken) -> common_pb2.SampledToken:
    message = common_pb2.SampledToken(token_id=token.token_id)
    if token.logprob is not None:
        message.logprob = token.logprob
    for token_id, logprob in token.top_logprobs:
        message.top_logprobs.add(token_id=token_id, logprob=logprob)
    return message


def token_from_proto(message: common_pb2.SampledToken) -> SampledToken:
    return SampledToken(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def identity_to_proto(identity: ModelIdentity) -> common_pb2.ModelIdentity:
    return common_pb2.ModelIdentity(
        model=identity.model,
        fingerprint=identity.fingerprint,
        dtype=identity.dtype,
        num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads,
        head_size=identity.head_size,
        rope=identity.rope,
        wire_version=identity.wire_version,
        compatibility_hash=compatibility_hash(identity),
    )


def identity_from_proto(message: common_pb2.ModelIdentity) -> ModelIdentity:
    return ModelIdentity(
        model=message.model,
        fingerprint=message.fingerprint,
        dtype=message.dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_size=message.head_size,
        rope=message.rope,
        wire_version=message.wire_version,
    )


def info_to_proto(
    info: EngineInfo, role: "common_pb2.Role.ValueType", instance: str, *, runs_prompts: bool
) -> common_pb2.WorkerInfo:
    offer = info.shared_pool
    return common_pb2.WorkerInfo(
        role=role,
        identity=identity_to_proto(info.identity),
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_queue_len=info.max_queue_len,
        instance=instance,
        runs_prompts=runs_prompts,
        shared_pool=None
        if offer is None
        else common_pb2.SharedPool(id=offer.pool_id, pid=offer.pid, fd=offer.fd, num_bytes=offer.num_bytes),
    )


def payload_format_to_proto(form: PayloadFormat) -> "prefill_pb2.PayloadFormat.ValueType":
    return _PAYLOAD_FORMATS[form]


def payload_format_from_proto(number: int) -> PayloadFormat:
    """Raises ValueError for none and for one of a later version."""
    for form, known in _PAYLOAD_FORMATS.items():
        if known == number:
            return form
    raise ValueError(f"{number} is no payload format")


def finish_reason_to_proto(reason: FinishReason) -> "decode_pb2.FinishReason.ValueType":
    return _FINISH_REASONS[reason]
