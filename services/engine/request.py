"""What goes into the engine and what comes out: frozen dataclasses, no protobuf, no JSON."""

from dataclasses import dataclass
from enum import Enum

from services.engine.shared_pool import SharedPoolOffer


class FinishReason(Enum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class SubmitMode(Enum):
    """What the engine does with a sequence's prompt."""

    LOCAL = "local"  # run the prompt here, then generate
    PREFILL_ONLY = "prefill_only"  # run the prompt, sample one token, keep the blocks until released
    HANDOFF = "handoff"  # reserve blocks, wait for imported KV and `join`


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Everything that decides which token comes next. Defaults are greedy and unpenalised.

    `seed` is always set: the token at a position is a pure function of logits, these parameters,
    the choice index and the position. `max_tokens` and `min_tokens` count continued tokens too.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to compute. `generated_token_ids` makes it a continuation: these tokens stand.

    Sequences share cached prefixes only if their `cache_salt` is the same.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()
    choice_index: int = 0
    priority: int = 0  # higher first
    cache_salt: str = ""

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens that must be in the KV cache before the next one can be sampled."""
        return self.prompt_token_ids + self.generated_token_ids

    @property
    def num_context_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.generated_token_ids)

    def most_positions(self, max_model_len: int) -> int:
        """KV positions it can come to need: those of all its tokens but the last one sampled."""
        longest = min(len(self.prompt_token_ids) + self.sampling.max_tokens, max_model_len) - 1
        return max(longest, self.num_context_tokens)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, if asked for, its log-probability and the best alternatives (natural log)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class NoToken(Enum):
    """Why there is no token to choose."""

    LOGITS = "the model gave no finite best logit"  # NaN or +inf among them, or nothing but -inf
    REQUEST = "the request bars every token"


@dataclass(frozen=True, slots=True)
class KvComputed:
    """KV of context positions [token_start, token_end) in these layers is final and can be exported."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True)
class FirstTokenSampled:
    """Ends the compute of a PREFILL_ONLY sequence; its blocks stay until it is released."""

    token: SampledToken
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass(frozen=True, slots=True)
class TextGenerated:
    """Whole text became available. `text` is never empty; `tokens` are those it used up."""

    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The last event. `tokens` had no text to show: end-of-sequence, a stop string's."""

    reason: FinishReason
    tokens: tuple[SampledToken, ...]
    num_prompt_tokens: int
    num_generated_tokens: int  # continued tokens included
    num_cached_tokens: int = 0


SequenceEvent = KvComputed | FirstTokenSampled | TextGenerated | SequenceFinished


@dataclass(slots=True)
class SequenceTimings:
    """Durations of one sequence in seconds, from this process's monotonic clock; None: not yet."""

    queue_s: float | None = None  # submit to blocks reserved (HANDOFF) or first chunk scheduled
    prefill_s: float | None = None  # first chunk scheduled to first token sampled
    text_hold_s: float | None = None  # first token in hand to first text
    join_s: float | None = None  # join called to the step that takes the sequence in
    first_step_s: float | None = None  # that step's length


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What must match for one engine's KV cache to mean the same in another."""

    model: str
    fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    rope: str
    wire_version: int

    def compared(self) -> dict[str, object]:
        """The fields under the compatibility hash, in a fixed order (`model` is only a name)."""
        return {
            name: getattr(self, name)
            for name in (
                "wire_version",
                "fingerprint",
                "dtype",
                "num_layers",
                "num_kv_heads",
                "head_size",
                "rope",
            )
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Fixed for an engine's life."""

    identity: ModelIdentity
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_queue_len: int
    eos_token_ids: tuple[int, ...] = ()
    shared_pool: SharedPoolOffer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """A snapshot. Block counts are in blocks; counters run from the engine's start."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    prompt_tokens_computed: int = 0
    tokens_recomputed: int = 0
