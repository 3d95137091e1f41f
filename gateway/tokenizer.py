"""From chat messages to prompt tokens, and from token IDs to the text shown in logprobs.

Invariant: what the template renders is encoded as it stands (no second BOS), and only the template
writes control tokens: where a message contains one's name, it is text like any other, so nobody can
forge a turn. Big prompts never hold up the event loop. Must not load torch: gateways are small.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.errors import InvalidRequest

_INLINE_CHARS = 4096  # encoding this much takes about a millisecond
_BATCH = 1024


class ChatTokenizer:
    """A model folder's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._spelled = _spelled_control_tokens(self._tokenizer)
        self._control_token = re.compile("|".join(map(re.escape, self._spelled)) or r"(?!)")
        config = _read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        self._template: str | None = (
            template.read_text() if template.is_file() else config.get("chat_template")
        )
        self._special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := config.get(name)) is not None
        }

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token IDs of the rendered chat, up to where the assistant speaks. Raises InvalidRequest."""
        if sum(len(message["content"]) for message in messages) <= _INLINE_CHARS:
            return self._encode_chat(messages)
        return await asyncio.to_thread(self._encode_chat, messages)

    def _encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        if self._template is None:
            raise InvalidRequest("This model has no chat template.", param="messages")
        marker = f"{secrets.token_hex(16)}:"  # nobody can write it into a message
        names: list[str] = []

        def hidden(name: re.Match[str]) -> str:
            names.append(name[0])
            return f"{marker}{len(names) - 1};"

        shown = [
            {**message, "content": self._control_token.sub(hidden, message["content"])}
            for message in messages
        ]
        try:
            rendered, _ = render_jinja_template(
                [shown],
                chat_template=self._template,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"The chat template refuses these messages: {error}", param="messages"
            ) from error
        texts = re.split(rf"{marker}(\d+);", rendered[0])
        spelled = [self._spelled[names[int(index)]] for index in texts[1::2]]
        token_ids: list[int] = []
        for encoded, control in zip(self._encoded(texts[::2]), [*spelled, []], strict=True):
            token_ids += encoded
            token_ids += control
        return tuple(token_ids)

    def _encoded(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """In batches: `encode` would hold the interpreter lock all the while, many results for long."""
        for start in range(0, len(texts), _BATCH):
            batch = list(texts[start : start + _BATCH])
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield encoding.ids

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones included."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def _spelled_control_tokens(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The names of all control tokens, longest first, and the tokens that spell each as plain text."""
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    tokenizer.encode_special_tokens = True
    spelled = {
        name: tokenizer.encode(name, add_special_tokens=False).ids
        for name in sorted(names, key=len, reverse=True)
    }
    tokenizer.encode_special_tokens = False
    return spelled


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
