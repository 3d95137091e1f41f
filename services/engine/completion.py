"""One sequence's tokens, what text they give, and where they end it.

Invariant: the first token that meets an end condition is the last one taken. Knows nothing of blocks or
of how tokens are computed.
"""

import time
from array import array
from collections.abc import Sequence

from services.engine.detokenizer import TextStream
from services.engine.request import EngineRequest, FinishReason, SampledToken, TextGenerated


class Completion:
    """Grows by the tokens that steps sample.

    Args:
        max_model_len: tokens of prompt and reply together, at most.
        natural_length: generated tokens after which a simulated model ends by itself.

    Attributes:
        token_ids: prompt, continued and generated tokens; an array, which the sampler reads without a copy.
        end: why it has ended; None while it goes on.
        text_hold_s: first token in hand to first text (or the end); None until then.
        detokenize_s: spent on text so far.
    """

    def __init__(
        self,
        request: EngineRequest,
        text: TextStream,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        natural_length: int | None,
    ) -> None:
        self.token_ids = array("q", (*request.prompt_token_ids, *request.generated_token_ids))
        self.end: FinishReason | None = None
        self.text_hold_s: float | None = None
        self.detokenize_s = 0.0
        self._request = request
        self._text = text
        self._end_token_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._end_token_ids |= eos_token_ids
        self._max_model_len = max_model_len
        self._natural_length = natural_length
        self._first_token_at: float | None = None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self._request.prompt_token_ids)

    def take(self, tokens: Sequence[SampledToken]) -> list[TextGenerated]:
        """Appends a step's tokens; returns the text they give. What lies beyond the end is dropped."""
        now = time.monotonic()
        self._first_token_at = self._first_token_at or now
        texts = []
        for token in tokens:
            self.token_ids.append(token.token_id)
            if (text := self._push(token)) is not None:
                texts.append(text)
            if self.end is not None:
                if not self._text.stopped and (rest := self._text.flush()):
                    texts.append(rest)
                break
        if self.text_hold_s is None and (texts or self.end is not None):
            self.text_hold_s = now - self._first_token_at
        return texts

    def end_if_complete(self) -> None:
        """Ends a continuation whose tokens already meet an end condition; nothing otherwise."""
        continued = self._request.generated_token_ids
        if continued:
            self.end = FinishReason.STOP if continued[-1] in self._end_token_ids else self._reached_end()

    def take_textless(self) -> tuple[SampledToken, ...]:
        """Tokens that never got text: end-of-sequence, a stop string's, half a character."""
        return self._text.take_textless()

    def _push(self, token: SampledToken) -> TextGenerated | None:
        if token.token_id in self._end_token_ids:
            self._text.end_token(token)
            self.end = FinishReason.STOP
            return None
        began = time.perf_counter()
        text = self._text.push(token)
        self.detokenize_s += time.perf_counter() - began
        self.end = self._reached_end()
        return text

    def _reached_end(self) -> FinishReason | None:
        num_generated = self.num_generated_tokens
        if self._text.stopped:
            return FinishReason.STOP
        if num_generated >= self._request.sampling.max_tokens or len(self.token_ids) >= self._max_model_len:
            return FinishReason.LENGTH
        if self._natural_length is not None and num_generated >= self._natural_length:
            return FinishReason.STOP
        return None
