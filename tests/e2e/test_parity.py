"""Greedy replies of the real model equal transformers' own `generate`, token for token.

Split (decode imports KV over gRPC and may not run a prompt itself) and colocated, alone and eight
at once: four ways for each of twenty prompts.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from grpc import aio
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.e2e.prompts import PROMPTS, TOKEN_COUNTS
from tests.e2e.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    chats = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
        for text in PROMPTS
    ]
    prose = tokenizer.encode(
        "A relay is a race in which each runner hands a baton to the next one. " * 120
    ).ids
    return chats + [prose[:count] for _, count in TOKEN_COUNTS]


@pytest.fixture(scope="module")
def expected(model_folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, computed once, in fp32. On one thread: two wait for a busy neighbour."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    replies = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
        )
        replies.append(output[0, len(prompt) :].tolist())
    return replies


@pytest.fixture(scope="module")
def colocated_stack(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Stack]:
    with running_stack(
        tmp_path_factory.mktemp("colocated"), "--colocated", "--model", str(model_folder)
    ) as stack:
        yield stack


def request(index: int, prompt: list[int], targets: list[str]) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        reply_id=f"parity-{index:016d}",
        epoch=1,
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(max_tokens=NUM_NEW_TOKENS),
        prefill_targets=targets,
    )


async def generate(stack: Stack, prompts: list[list[int]], *, at_once: int) -> list[list[int]]:
    """Replies in order, `at_once` of them in flight at any time."""
    targets = [stack.process("prefill-0")["address"]] if "prefill-0" in stack_names(stack) else []
    gate = asyncio.Semaphore(at_once)
    async with aio.insecure_channel(stack.process("decode-0")["address"]) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)

        async def one(index: int, prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            async with gate:
                async for message in stub.Generate(request(index, prompt, targets)):
                    part = getattr(message, message.WhichOneof("message"))
                    tokens += [token.token_id for token in part.tokens]
            return tokens

        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


def stack_names(stack: Stack) -> list[str]:
    return list(json.loads((stack.folder / ".run" / "stack.json").read_text()))


def decode_load(stack: Stack) -> common_pb2.Load:
    async def first() -> common_pb2.Load:
        async with aio.insecure_channel(stack.process("decode-0")["address"]) as channel:
            call = decode_pb2_grpc.DecodeStub(channel).WatchLoad(common_pb2.WatchLoadRequest())
            load = await call.read()
            call.cancel()
            return load

    return asyncio.run(first())


@pytest.mark.parametrize("at_once", [1, 8])
def test_split_equals_generate(
    real_stack: Stack, prompts: list[list[int]], expected: list[list[int]], at_once: int
) -> None:
    assert asyncio.run(generate(real_stack, prompts, at_once=at_once)) == expected
    load = decode_load(real_stack)
    assert load.prompt_tokens_computed == 0, "decode ran a prompt itself"
    assert load.kv_bytes_received > 0


@pytest.mark.parametrize("at_once", [1, 8])
def test_colocated_equals_generate(
    colocated_stack: Stack, prompts: list[list[int]], expected: list[list[int]], at_once: int
) -> None:
    assert asyncio.run(generate(colocated_stack, prompts, at_once=at_once)) == expected
    assert decode_load(colocated_stack).kv_bytes_received == 0
