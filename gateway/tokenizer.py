"""From chat messages to prompt tokens, and from token IDs to the text shown in logprobs.

Invariant: what the template renders is encoded as it stands (no second BOS). Big prompts never
hold up the event loop. Must not load torch: gateways are small.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.errors import InvalidRequest

_INLINE_CHARS = 4096  # encoding this much takes about a millisecond


class ChatTokenizer:
    """A model folder's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
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
        try:
            rendered, _ = render_jinja_template(
                [list(messages)],
                chat_template=self._template,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"The chat template refuses these messages: {error}", param="messages"
            ) from error
        # As a batch of one: `encode` would hold the interpreter lock all the while.
        (encoding,) = self._tokenizer.encode_batch_fast([rendered[0]], add_special_tokens=False)
        return tuple(encoding.ids)

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones included."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
