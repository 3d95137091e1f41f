"""From tokens to whole text, as they come.

Invariant: what is given out is what decoding all tokens at once has there, so nothing is given out that a
later token may change: no half character, and no run of byte tokens before its end. Tokenizers that fall
back to byte tokens decode a run of them to U+FFFD throughout as soon as one of its bytes is wrong. The
library's DecodeStream gives out such a run byte by byte, and fails when a later byte undoes it.

The context depends on the last tokens and on how many there were, not on where the first one stood, so a
replay of the last few tokens leads to the state that a replay of all does (`skip`).

Knows nothing of stop strings.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from services.engine.request import SampledToken, TextGenerated

_REPLACEMENT = "\ufffd"
_MOST_PENDING = 64  # tokens that wait for their end; bounds what a run of broken ones costs
_MOST_HALF = 3  # tokens of a character whose last byte is missing
_CONTEXT_PERIOD = 4  # tokens after which the context starts anew

_Group = tuple[SampledToken, ...]  # one that may have text, behind those before it that have none


class IncrementalDecoder:
    """The text of one sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_byte_tokens = _has_byte_tokens(tokenizer)
        self._context: list[int] = []  # tokens before: what follows decodes by where it stands
        self._context_length = 0  # characters
        self._context_period = 0  # the one that the context's last token ends in
        self._num_taken = 0  # tokens given out or skipped
        self._pending: list[_Group] = []
        self._pending_text = ""
        self._is_in_run = False
        self._textless: list[SampledToken] = []  # behind the pending ones
        self._textless_ids: set[int] = set()  # as far as seen

    @property
    def text_if_ended(self) -> str:
        """Text of the pending tokens as `flush` would give it now; a later token may change it."""
        return self._whole()[1] if self._pending_text else ""

    def skip(self, token_ids: Sequence[int], num_characters: int) -> int:
        """Passes over tokens of the past and returns how many. Only before the first `push`.

        Pushing the rest leads to the state that pushing all leads to. The rest begins with a whole token,
        behind which nothing is pending in any state; another one ends in a later period, so the context
        has started anew since. Between these two are at least `num_characters`.
        """
        last_period: int | None = None
        num_between = 0
        for place in reversed(range(len(token_ids))):
            token_id = token_ids[place]
            if token_id in self._textless_ids or not (text := self._text_if_whole(token_id)):
                continue
            period = (place + 1) // _CONTEXT_PERIOD
            if last_period is None:
                last_period = period
            elif period < last_period and num_between >= num_characters:
                self._num_taken = place
                return place
            else:
                num_between += len(text)
        return 0

    def push(self, token: SampledToken) -> TextGenerated | None:
        """Takes the next token; returns what has become certain.

        Tokens without text change nothing, however many there are: they leave with the next text.
        """
        if token.token_id in self._textless_ids:
            self._textless.append(token)
            return None
        before = self._pending_text
        self._pending.append((*self._textless, token))
        self._pending_text = self._decode(self._pending)
        if self._is_byte(token.token_id):
            self._is_in_run = True
        elif self._pending_text != before:
            self._is_in_run = False
        elif self._is_textless(token.token_id):
            self._pending.pop()
            self._textless.append(token)
            return None
        self._textless = []
        if self._pending_text and not self._is_in_run and not self._pending_text.endswith(_REPLACEMENT):
            unit = self._take(len(self._pending), self._pending_text)
            self._move_context(unit)
            return unit
        return self._take_oldest() if len(self._pending) > _MOST_PENDING else None

    def flush(self) -> TextGenerated | None:
        """No more tokens come: all that is pending, but for half a character at the end."""
        count, text = self._whole()
        return self._take(count, text) if text else None

    def take_pending(self) -> tuple[SampledToken, ...]:
        """The tokens without text; they are forgotten."""
        tokens = (*self._take(len(self._pending), "").tokens, *self._textless)
        self._num_taken += len(self._textless)
        self._textless = []
        return tokens

    def _take(self, count: int, text: str) -> TextGenerated:
        """Of the pending groups, the first ones; the context stays, for the rest may be of the same run."""
        taken, self._pending = self._pending[:count], self._pending[count:]
        tokens = tuple(token for group in taken for token in group)
        self._num_taken += len(tokens)
        self._pending_text = self._decode(self._pending)
        self._is_in_run = self._is_in_run and bool(self._pending)
        return TextGenerated(text, tokens)

    def _move_context(self, unit: TextGenerated) -> None:
        token_ids = [token.token_id for token in unit.tokens]
        before, self._context_period = self._context_period, self._num_taken // _CONTEXT_PERIOD
        if self._context_period == before:
            self._context += token_ids
            self._context_length += len(unit.text)
        else:
            self._context = token_ids
            self._context_length = len(self._decode_ids(token_ids))

    def _whole(self) -> tuple[int, str]:
        """How many pending groups there are without those of half a character at the end, and their text.

        The text may be empty.
        """
        count, text = len(self._pending), self._pending_text
        fewest = max(0, count - _MOST_HALF)
        while text.endswith(_REPLACEMENT) and count > fewest:
            count -= 1
            text = self._decode(self._pending[:count])
        if text.endswith(_REPLACEMENT):  # more is broken than half a character
            return len(self._pending), self._pending_text
        if not text:  # the half may share a token with whole ones
            return len(self._pending), self._pending_text.rstrip(_REPLACEMENT)
        return count, text

    def _take_oldest(self) -> TextGenerated | None:
        """The pending groups up to a border between characters, but the last few."""
        num_whole, text = self._whole()
        if not text:
            return None  # tokens that add none, however many: no border to look for among them
        for count in range(num_whole - _MOST_HALF - 1, 0, -1):
            first, rest = self._decode(self._pending[:count]), self._decode(self._pending[count:num_whole])
            if first and first + rest == text:
                return self._take(count, first)
        return None

    def _decode(self, groups: Sequence[_Group]) -> str:
        """Text of groups that follow the context."""
        if not groups:
            return ""
        ids = [*self._context, *(group[-1].token_id for group in groups)]
        return self._decode_ids(ids)[self._context_length :]

    def _decode_ids(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _text_if_whole(self, token_id: int) -> str:
        """Text of a token that is certain at once, whatever comes before and after; else empty."""
        text = self._decode_ids([token_id])
        if not text and self._is_textless(token_id):
            return ""
        return "" if _REPLACEMENT in text or self._is_byte(token_id) else text

    def _is_textless(self, token_id: int) -> bool:
        """Whether it has no text anywhere: a control token, or one that the tokenizer does not know.

        A lone space may have none at the beginning of a text. Two have, as far as decoders strip one blank.
        """
        if not self._decode_ids([token_id, token_id]):
            self._textless_ids.add(token_id)
        return token_id in self._textless_ids

    def _is_byte(self, token_id: int) -> bool:
        name = self._tokenizer.id_to_token(token_id) if self._has_byte_tokens else None
        return name is not None and len(name) == len("<0x0A>") and name.startswith("<0x")


def _has_byte_tokens(tokenizer: Tokenizer) -> bool:
    newline = tokenizer.token_to_id("<0x0A>")
    return newline is not None and tokenizer.decode([newline]) == "\n"
