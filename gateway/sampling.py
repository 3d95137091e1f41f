"""What is asked of the model: sampling parameters and everything a continuation needs.

Invariant: a `ReplySpec` together with the log so far decides the rest of the reply.
Must not know: HTTP, formats, routing.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, cast

from baton.v1 import common_pb2
from gateway.event_log import ReplyMeta

OnDisconnect = Literal["cancel", "grace", "continue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Fields as in common.proto's SamplingParams."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best

    def to_proto(self, seed: int) -> common_pb2.SamplingParams:
        message = common_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop,
        )
        if self.logprobs is not None:
            message.logprobs = self.logprobs
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpec:
    """One request, ready to be generated. `seed`: 64 bits unsigned; None: the gateway draws one."""

    model: str
    fingerprint: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    timeout_s: float
    num_choices: int = 1
    seed: int | None = None
    priority: int = 0
    owner_hash: str = ""
    on_disconnect: OnDisconnect = "grace"
    format: str = "chat"
    format_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_meta(cls, meta: ReplyMeta) -> Self:
        """What `as_dict` and the meta's own fields stored, for whoever goes on with the reply."""
        request = meta.request
        sampling = dict(request["sampling"])
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
        for name in ("stop", "stop_token_ids"):
            sampling[name] = tuple(sampling[name])
        return cls(
            model=meta.model,
            fingerprint=meta.fingerprint,
            prompt_token_ids=tuple(meta.prompt_token_ids),
            sampling=Sampling(**sampling),
            timeout_s=request["timeout_s"],
            num_choices=request["num_choices"],
            seed=meta.seed,
            priority=request["priority"],
            owner_hash=meta.owner_hash,
            on_disconnect=cast(OnDisconnect, meta.on_disconnect),
            format=meta.format,
            format_options=meta.format_options,
        )

    def as_dict(self) -> dict[str, Any]:
        """What is stored beside the log, as JSON; prompt, seed and model have fields of their own."""
        sampling = asdict(self.sampling)
        sampling["logit_bias"] = {str(token): bias for token, bias in self.sampling.logit_bias.items()}
        return {
            "sampling": sampling,
            "num_choices": self.num_choices,
            "priority": self.priority,
            "timeout_s": self.timeout_s,
        }
