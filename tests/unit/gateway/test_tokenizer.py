"""Prompts become the tokens of their template's text, and big ones hold nobody up."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway.tokenizer import ChatTokenizer
from services.engine.sim_model import write_sim_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sim_model(tmp_path)
    return tmp_path


@pytest.mark.parametrize("content", ["", "Hello, relay!", "é 🏃 <|end|>\0", "a" * 5000])
async def test_the_rendered_chat_is_encoded_as_it_stands(folder: Path, content: str) -> None:
    rendered = f"<|start|>user\n{content}<|end_of_turn|>\n<|start|>assistant\n"
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = await ChatTokenizer(folder).encode_chat([{"role": "user", "content": content}])
    assert list(encoded) == plain.encode(rendered, add_special_tokens=False).ids


async def test_the_event_loop_goes_on_while_a_big_prompt_is_encoded(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    encoding = asyncio.create_task(
        tokenizer.encode_chat([{"role": "user", "content": "hello world " * 100_000}])
    )
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 50, "the encoder takes about a second and must not keep the interpreter lock"
