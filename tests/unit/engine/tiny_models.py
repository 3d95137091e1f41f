"""Small models with random weights, saved as real folders, and ways to run them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.engine import interface
from services.engine.config import EngineConfig
from services.engine.loop import HfEngine
from services.engine.model_runner import ModelRunner
from services.engine.page_range import PageRange
from services.engine.paged_engine import PagedEngine
from services.engine.request import (
    EngineRequest,
    FirstTokenSampled,
    KvComputed,
    SamplingParams,
    SequenceFinished,
    SubmitMode,
    TextGenerated,
)
from services.engine.sequence import EngineSequence
from services.engine.sim_model import make_tokenizer
from tests.waiting import eventually

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_MULTI_HEAD = {k: v for k, v in SHAPE.items() if k not in ("num_key_value_heads", "head_dim")}
_WINDOW: dict[str, Any] = SHAPE | {"sliding_window": 24}  # shorter than some prompts
# With tied embeddings a random model repeats one token for ever, which shows little.
_UNTIED = {"tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "qwen2": SHAPE,
    "qwen3": SHAPE,
    "mistral": _WINDOW,
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_neox": _MULTI_HEAD,
    "olmo2": SHAPE,
    "olmo3": _WINDOW,
    "granite": SHAPE,
    "gemma": SHAPE | _UNTIED,
    "gemma2": _WINDOW | _UNTIED | {"query_pre_attn_scalar": 8},
    "gemma3_text": _WINDOW | _UNTIED | {"query_pre_attn_scalar": 8},
    "phi": SHAPE,
    "phi3": SHAPE,
    "smollm3": SHAPE,
    "starcoder2": _WINDOW | _UNTIED,
    "cohere2": _WINDOW,
    "glm4": SHAPE,
    "opt": _MULTI_HEAD | _UNTIED | {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "mixtral": SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def save_model(folder: Path, family: str = "llama", seed: int = 0, **changes: int) -> Path:
    """Writes a model folder with weights drawn from the seed; changes are fields of its configuration."""
    tokenizer = make_tokenizer()
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **FAMILIES[family] | shape | changes)
    )
    for parameter in model.parameters():  # spread the logits, so that no two tokens are nearly tied
        parameter.data.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def generate(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """transformers' own greedy replies."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@asynccontextmanager
async def running_engine(
    folder: Path, runner_type: type[ModelRunner] = ModelRunner, **config: Any
) -> AsyncIterator[HfEngine]:
    """A started HfEngine; `config` are fields of EngineConfig."""
    engine = HfEngine(EngineConfig(model=folder, model_name="tiny", **config), runner_type=runner_type)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def make_request(prompt: Sequence[int], num_tokens: int, **changes: Any) -> EngineRequest:
    """`changes` are fields of SamplingParams, or `generated_token_ids`."""
    generated = tuple(changes.pop("generated_token_ids", ()))
    return EngineRequest(
        request_id="tiny/0",
        prompt_token_ids=tuple(prompt),
        generated_token_ids=generated,
        sampling=SamplingParams(**{"max_tokens": num_tokens, "min_tokens": num_tokens, **changes}),
    )


async def complete(
    engine: interface.Engine, request: EngineRequest, mode: SubmitMode = SubmitMode.LOCAL
) -> tuple[list[int], str]:
    """Runs a request to its end; new token IDs and text."""
    return await read_out(engine.submit(request, mode))


async def read_out(sequence: interface.Sequence) -> tuple[list[int], str]:
    """Reads a sequence to its end and releases it; new token IDs and text."""
    try:
        tokens, text = [], ""
        async for event in sequence.events():
            assert isinstance(event, TextGenerated | SequenceFinished)
            tokens += [token.token_id for token in event.tokens]
            text += event.text if isinstance(event, TextGenerated) else ""
        return tokens, text
    finally:
        sequence.release()


async def hand_over(source: PagedEngine, target: PagedEngine, sequence: EngineSequence) -> None:
    """What prefill and decode do, without the wire: pages in odd pieces, layers apart."""
    reading = source.submit(sequence.request, SubmitMode.PREFILL_ONLY)
    try:
        await sequence.reserved()
        async for event in reading.events():
            if isinstance(event, FirstTokenSampled):
                sequence.accept_first_token(event.token)
                continue
            assert isinstance(event, KvComputed)
            for layer in range(event.layer_start, event.layer_end):
                for start in range(max(event.token_start, sequence.num_held_tokens), event.token_end, 13):
                    where = PageRange(layer, layer + 1, start, min(start + 13, event.token_end))
                    page = reading.kv.export_page(where)
                    sequence.kv.import_page(where, memoryview(page.numpy().tobytes()))
        sequence.join()
    finally:
        reading.release()


async def end_in_order_of_arrival(engine: PagedEngine, source: PagedEngine) -> list[list[int]]:
    """A reply gives way to a later one's reservation, and ends before it; tokens of both.

    Args:
        engine: its pool has 8 blocks of 4 tokens.
    """
    with engine.lock():
        first = engine.submit(make_request(range(3, 7), 24), SubmitMode.LOCAL)
        later = engine.submit(make_request(range(50, 62), 12), SubmitMode.HANDOFF)
    await eventually(lambda: first.was_preempted)
    await hand_over(source, engine, later)
    ended: list[EngineSequence] = []

    async def read(sequence: EngineSequence) -> list[int]:
        tokens, _ = await read_out(sequence)
        ended.append(sequence)
        return tokens

    replies = await asyncio.gather(read(first), read(later))
    assert ended == [first, later]
    return replies
