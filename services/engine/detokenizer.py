"""From tokens to text that may be shown: whole characters, nothing of a stop string.

Invariant: text leaves in whole tokens only (the last piece before a stop string excepted, and that one
names every token up to the stop). So the tokens of what has left decide the state completely: replaying
them puts a continuation exactly where the undisturbed run stood.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.engine.request import SampledToken, SamplingParams, TextGenerated

_Unit = tuple[str, tuple[SampledToken, ...]]  # whole text and the tokens that make it up


class TextStream:
    """The text of one sequence, token by token.

    Args:
        prior_token_ids: tokens of a continuation, whose text has left already.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prior_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = sampling.stop
        self._include_stop = sampling.include_stop
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._held: list[_Unit] = []
        self._incomplete: list[SampledToken] = []  # no whole text yet
        self.stopped = False
        for token_id in prior_token_ids:
            self.push(SampledToken(token_id))
            if self.stopped:
                break
        self._held.clear()
        self._incomplete.clear()

    def push(self, token: SampledToken) -> TextGenerated | None:
        """Takes the next token; returns what may be shown now. Sets `stopped` at a stop string."""
        self._num_tokens += 1
        self._incomplete.append(token)
        piece = self._decode(token.token_id)
        if not piece:
            return None
        self._held.append((piece, tuple(self._incomplete)))
        self._incomplete = []
        if not self._stop or self._num_tokens < self._min_tokens:
            return self._emit(len(self._held))
        window = "".join(text for text, _ in self._held)
        matches = [(at, stop) for stop in self._stop if (at := window.find(stop)) >= 0]
        if matches:
            return self._end_at(window, *min(matches))
        return self._emit(self._num_free_of_stops(window))

    def end_token(self, token: SampledToken) -> None:
        """Takes a token that ends the reply and has no text, such as end-of-sequence."""
        self._incomplete.append(token)

    def flush(self) -> TextGenerated | None:
        """The reply ends: what was held only because a stop string might have followed."""
        return self._emit(len(self._held))

    def take_textless(self) -> tuple[SampledToken, ...]:
        """Tokens that never got text: end-of-sequence, a stop string's, half a character."""
        held = [token for _, tokens in self._held for token in tokens]
        tokens = (*held, *self._incomplete)
        self._held, self._incomplete = [], []
        return tokens

    def _decode(self, token_id: int) -> str | None:
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - the library has no other type for it
            # Where bytes fall back to tokens of their own, bytes that are no UTF-8 change how those before
            # them decode. What was shown stands; decoding starts anew at the first token without text.
            without_text = [token.token_id for token in self._incomplete[:-1]]
            self._stream = DecodeStream(ids=without_text, skip_special_tokens=True)
            piece = self._stream.step(self._tokenizer, token_id)
        return piece

    def _emit(self, num_units: int) -> TextGenerated | None:
        if not num_units:
            return None
        units, self._held = self._held[:num_units], self._held[num_units:]
        return TextGenerated(
            "".join(text for text, _ in units), tuple(token for _, tokens in units for token in tokens)
        )

    def _end_at(self, window: str, at: int, stop: str) -> TextGenerated | None:
        self.stopped = True
        text = window[: at + len(stop)] if self._include_stop else window[:at]
        return TextGenerated(text, self.take_textless()) if text else None

    def _num_free_of_stops(self, window: str) -> int:
        """How many held units lie wholly before the first place where a stop string may begin."""
        longest = max(map(len, self._stop)) - 1
        for start in range(max(0, len(window) - longest), len(window)):
            tail = window[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                break
        else:
            return len(self._held)
        length = count = 0
        for text, _ in self._held:
            length += len(text)
            if length > start:
                break
            count += 1
        return count
