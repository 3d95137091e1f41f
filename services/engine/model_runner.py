"""Runs the model: one forward pass over the chunks of a step, through the paged cache.

Any decoder-only transformers model whose attention goes through the attention interface is served
without code of its own. Knows tokens, block tables and tensors; not why a chunk was scheduled.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from services.engine import attention
from services.engine.attention import KV_MULTIPLE, AttentionGroup, AttentionStep
from services.engine.block_manager import blocks_for
from services.engine.errors import UnsupportedModel
from services.engine.kv_cache import KvCache, KvLayout
from services.engine.linear_packing import pack_linears
from services.engine.precision import Precision
from services.engine.scheduler import ScheduledChunk

_MAX_REASON_CHARS = 300  # transformers may list every class it knows
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}  # what `paged_attention` computes


class ModelRunner:
    """A loaded model. Not thread-safe: one thread runs it. `bind` a cache before `forward`."""

    def __init__(self, folder: Path, precision: Precision = Precision.FP32) -> None:
        self._model = _load(folder)
        config = self._model.config.get_text_config()
        _check_config(config)
        num_heads = config.num_attention_heads
        self.layout = KvLayout(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        )
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = _longest_context(config)
        self.eos_token_ids = _eos_token_ids(self._model)
        self._cache: KvCache | None = None
        self._check_attention()
        self.precision = pack_linears(self._model, precision)

    def bind(self, cache: KvCache) -> None:
        """Sets the cache that `forward` reads and writes."""
        self._cache = cache

    @torch.inference_mode()
    def forward(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """Logits (S, vocabulary) in fp32 for the S chunks that sample, in order; (0, vocabulary) if none."""
        assert self._cache is not None
        token_ids: list[int] = []
        positions: list[int] = []
        sampling_rows: list[int] = []
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.samples:
                sampling_rows.append(len(token_ids) - 1)
        step = plan_attention(chunks, self._cache)
        logits = self._run(step, token_ids, positions, sampling_rows or [0])
        return logits[: len(sampling_rows)]

    def _run(
        self, step: AttentionStep, token_ids: list[int], positions: list[int], rows: list[int]
    ) -> torch.Tensor:
        token = attention.CURRENT_STEP.set(step)
        try:
            output = self._model(
                input_ids=torch.tensor([token_ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                logits_to_keep=torch.tensor(rows),
            )
        finally:
            attention.CURRENT_STEP.reset(token)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def _check_attention(self) -> None:
        """Refuses models that would compute something else through the paged cache, or nothing at all.

        Compares two chunks through a small cache with the model's own eager attention.
        """
        ids = [(7 * i + 3) % self.vocab_size for i in range(12)]
        cache = KvCache(self.layout, num_blocks=1, block_size=KV_MULTIPLE)
        try:
            step, rows = None, []
            for start, end in ((0, 7), (7, 12)):
                positions = torch.arange(start, end)
                group = AttentionGroup(
                    rows=torch.arange(end - start),
                    blocks=torch.zeros(1, 1, dtype=torch.long),
                    positions=positions.unsqueeze(0),
                    length=KV_MULTIPLE,
                )
                step = AttentionStep(cache, positions, [group])
                rows.append(self._run(step, ids[start:end], positions.tolist(), list(range(end - start))))
            self._model.set_attn_implementation("eager")
            expected = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            self._model.set_attn_implementation(attention.IMPLEMENTATION)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise UnsupportedModel(f"its attention cannot be paged: {error}") from error
        if step is None or step.num_calls != self.layout.num_layers:
            raise UnsupportedModel("its layers do not all go through transformers' attention interface")
        if not torch.allclose(torch.cat(rows), expected, rtol=1e-3, atol=1e-3):
            raise UnsupportedModel("its paged attention does not equal its eager attention")


def plan_attention(chunks: Sequence[ScheduledChunk], cache: KvCache) -> AttentionStep:
    """Places of new keys and values, and who attends together.

    Single queries attend in groups of similar length (padding at most doubles what is read), longer
    chunks alone.
    """
    groups: list[AttentionGroup] = []
    single: dict[int, list[tuple[int, ScheduledChunk]]] = defaultdict(list)
    new_slots = []
    row = 0
    for chunk in chunks:
        new_slots.append(cache.slots(chunk.sequence.block_table, chunk.start, chunk.end))
        num_blocks = blocks_for(chunk.end, cache.block_size)
        if chunk.num_tokens == 1:
            single[num_blocks.bit_length()].append((row, chunk))
        else:
            rows = torch.arange(row, row + chunk.num_tokens)
            positions = torch.arange(chunk.start, chunk.end).unsqueeze(0)
            groups.append(_group([chunk], cache, rows, positions))
        row += chunk.num_tokens
    for members in single.values():
        alike = [chunk for _, chunk in members]
        rows = torch.tensor([row for row, _ in members])
        positions = torch.tensor([[chunk.start] for chunk in alike])
        groups.append(_group(alike, cache, rows, positions))
    return AttentionStep(cache, torch.cat(new_slots), groups)


def _group(
    chunks: Sequence[ScheduledChunk], cache: KvCache, rows: torch.Tensor, positions: torch.Tensor
) -> AttentionGroup:
    """Block tables padded to the longest, and to a length that is a multiple of KV_MULTIPLE."""
    size = cache.block_size
    longest = max(chunk.end for chunk in chunks)
    num_blocks = blocks_for(longest, size)
    while num_blocks * size % KV_MULTIPLE:
        num_blocks += 1
    tables = torch.zeros(len(chunks), num_blocks, dtype=torch.long)
    for i, chunk in enumerate(chunks):
        table = chunk.sequence.block_table[: blocks_for(chunk.end, size)]
        tables[i, : len(table)] = torch.tensor(table)
    return AttentionGroup(rows=rows, blocks=tables, positions=positions, length=num_blocks * size)


def _load(folder: Path) -> Any:
    """The model, complete: transformers fills weights that a checkpoint lacks with random numbers."""
    try:
        if AutoConfig.from_pretrained(folder).is_encoder_decoder:
            raise UnsupportedModel("it is an encoder-decoder model; only decoder-only ones can be served")
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=attention.IMPLEMENTATION,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).partition("\n")[0][:_MAX_REASON_CHARS]
        raise UnsupportedModel(f"transformers cannot load it for causal generation: {reason}") from error
    if missing := sorted(loading["missing_keys"]):
        raise UnsupportedModel(f"its checkpoint lacks {len(missing)} weights, {missing[0]} among them")
    return model.eval()


def _check_config(config: Any) -> None:
    """Refuses what is known from the configuration alone; `_check_attention` sees short prompts only."""
    needed = ("num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    if missing := [name for name in needed if not hasattr(config, name)]:
        raise UnsupportedModel(f"its configuration has no {' and no '.join(missing)}")
    if unknown := sorted({*(getattr(config, "layer_types", None) or ())} - _KNOWN_LAYER_TYPES):
        raise UnsupportedModel(f"its layers are of a type that cannot be paged: {', '.join(unknown)}")


def _longest_context(config: Any) -> int:
    """Positions that one sequence may take.

    longrope turns all keys, also those in the cache, by other factors as soon as one position of a step
    lies past the original length; below it a token does not depend on its company.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [part for part in (rope, *rope.values()) if isinstance(part, dict)]  # by layer type, or one
    bounds = [
        part["original_max_position_embeddings"] for part in ropes if part.get("rope_type") == "longrope"
    ]
    return int(min([config.max_position_embeddings, *bounds]))


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Those that the model can say: some configurations keep another vocabulary's default."""
    config = model.config.get_text_config()
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = config.eos_token_id
    if found is None:
        return ()
    named = found if isinstance(found, list) else [int(found)]
    return tuple(token_id for token_id in named if 0 <= token_id < config.vocab_size)
