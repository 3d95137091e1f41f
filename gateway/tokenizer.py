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

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.errors import InvalidRequest

_INLINE_CHARS = 4096  # encoding this much takes about a millisecond
_BATCH = 1024


class ChatTokenizer:
    """A model folder's tokenizer and chat template.

    Raises ValueError, with the file and what to do, for a folder that chats cannot be rendered with.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._spelled = _spelled_control_tokens(self._tokenizer)
        self._control_token = re.compile("|".join(map(re.escape, self._spelled)) or r"(?!)")
        config = _read_json(folder / "tokenizer_config.json")
        self._template = _read_template(folder, config)
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


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library's only type
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_template(folder: Path, config: dict[str, Any]) -> str:
    """From its own file, or from the tokenizer's configuration, where it may be one of several."""
    path = folder / "chat_template.jinja"
    template: str | None
    if path.is_file():
        template = path.read_text()
    else:
        path = folder / "tokenizer_config.json"
        template = config.get("chat_template")
        if isinstance(template, list):
            template = next((each["template"] for each in template if each["name"] == "default"), None)
        if not template:
            raise ValueError(
                f"{folder} has no chat template: no chat_template.jinja, and none in tokenizer_config.json. "
                "Base models come without one: take the chat version of the model, or put its "
                "chat_template.jinja into the folder"
            )
    try:
        render_jinja_template([[{"role": "user", "content": ""}]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template in {path} is none: line {error.lineno}: {error}") from error
    except TemplateError:
        pass  # it may want other messages than these
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return content
