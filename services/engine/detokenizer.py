"""From tokens to text that may be shown: whole characters, nothing of a stop string.

Invariant: text leaves in whole tokens only (the last piece before a stop string excepted, and that one
names every token up to the stop). So the tokens of what has left decide the state completely: replaying
the last few of them puts a continuation exactly where the undisturbed run stood.

Of several stop strings the one that is complete first ends the reply, however its characters are spread
over tokens; of those complete with the same character the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from services.engine.incremental_decoder import IncrementalDecoder
from services.engine.request import SampledToken, SamplingParams, TextGenerated


@dataclass(frozen=True, slots=True, order=True)
class _Match:
    """A stop string found; the best one is the smallest."""

    end: int
    start: int


class TextStream:
    """The text of one sequence, token by token.

    Args:
        prior_token_ids: tokens of a continuation, whose text has left already. A stop string that they
            complete at their end sets `stopped`. One well before it may go unseen: no undisturbed run
            has tokens behind a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prior_token_ids: Sequence[int] = ()
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop = sampling.stop
        self._include_stop = sampling.include_stop
        self._min_tokens = sampling.min_tokens
        self._num_tokens = self._decoder.skip(prior_token_ids, max(map(len, self._stop), default=0))
        self._held: list[TextGenerated] = []
        self._num_exempt = 0  # characters not yet shown that came below min_tokens: no stop begins there
        self._ends: list[SampledToken] = []
        self.stopped = False
        for token_id in prior_token_ids[self._num_tokens :]:
            self.push(SampledToken(token_id))
            if self.stopped:
                break
        self.take_textless()
        self._num_exempt = 0

    def push(self, token: SampledToken) -> TextGenerated | None:
        """Takes the next token; returns what may be shown now. Sets `stopped` at a stop string."""
        self._num_tokens += 1
        if (unit := self._decoder.push(token)) is not None:
            self._held.append(unit)
        if not self._stop:
            return self._emit(len(self._held))
        if self._num_tokens < self._min_tokens:
            shown = self._emit(len(self._held))
            self._num_exempt = len(self._decoder.text_if_ended)
            return shown
        held = "".join(unit.text for unit in self._held)
        window = held + self._decoder.text_if_ended  # a stop ends the reply, so what follows changes nothing
        found = ((stop, window.find(stop, self._num_exempt)) for stop in self._stop)
        if matches := [_Match(start + len(stop), start) for stop, start in found if start >= 0]:
            return self._end_at(window, min(matches))
        return self._emit(self._num_free_of_stops(held))

    def end_token(self, token: SampledToken) -> None:
        """Takes a token that ends the reply and has no text, such as end-of-sequence."""
        self._ends.append(token)

    def flush(self) -> TextGenerated | None:
        """The reply ends: what was held only because something else might have followed."""
        if (unit := self._decoder.flush()) is not None:
            self._held.append(unit)
        return self._emit(len(self._held))

    def take_textless(self) -> tuple[SampledToken, ...]:
        """Tokens that never got text: end-of-sequence, a stop string's, half a character."""
        held = [token for unit in self._held for token in unit.tokens]
        tokens = (*held, *self._decoder.take_pending(), *self._ends)
        self._held, self._ends = [], []
        return tokens

    def _emit(self, num_units: int) -> TextGenerated | None:
        if not num_units:
            return None
        units, self._held = self._held[:num_units], self._held[num_units:]
        if num_units == 1 and not self._num_exempt:
            return units[0]
        text = "".join(unit.text for unit in units)
        self._num_exempt = max(0, self._num_exempt - len(text))
        return TextGenerated(text, tuple(token for unit in units for token in unit.tokens))

    def _end_at(self, window: str, match: _Match) -> TextGenerated | None:
        self.stopped = True
        text = window[: match.end if self._include_stop else match.start]
        return TextGenerated(text, self.take_textless()) if text else None

    def _num_free_of_stops(self, held: str) -> int:
        """How many held units lie wholly before the first place where a stop string may begin."""
        longest = max(map(len, self._stop)) - 1
        for start in range(max(self._num_exempt, len(held) - longest), len(held)):
            tail = held[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                break
        else:
            return len(self._held)
        length = count = 0
        for unit in self._held:
            length += len(unit.text)
            if length > start:
                break
            count += 1
        return count
