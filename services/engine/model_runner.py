"""Runs the model: one forward pass over the chunks of a step, through the paged cache.

Any decoder-only transformers model whose attention goes through the attention interface is served
without code of its own; where its forward pass can be captured as a graph, the graph runs in its place.
Knows tokens, block tables and tensors; not why a chunk was scheduled.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from services.engine import attention
from services.engine.attention import AttentionGroup, AttentionStep
from services.engine.attention_plan import plan_attention
from services.engine.capture import NotCapturable
from services.engine.decode_graph import CudaCapture, DecodeGraphs
from services.engine.device import Device
from services.engine.errors import UnsupportedModel
from services.engine.graph_model import Forward, GraphModel, record
from services.engine.kv_cache import KvCache, KvLayout
from services.engine.kv_lengths import ALL_LENGTHS, find_lengths
from services.engine.linear_packing import Packer, linears_to_pack, pack_linears
from services.engine.model_loading import (
    IGNORES_INTERFACE,
    check_config,
    eos_token_ids,
    load_model,
    longest_context,
)
from services.engine.placement import resolve
from services.engine.precision import Precision
from services.engine.scheduler import ScheduledChunk
from services.engine.varlen import VarlenKernel, varlen_kernel

log = structlog.get_logger()

_TEST_CHUNKS = ((0, 7), (7, 12))  # of the prompt that a model is checked with
_TEST_BLOCK = 16
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of a norm


class ModelRunner:
    """A loaded model. Not thread-safe: one thread runs it. `bind` a cache before `forward`."""

    def __init__(
        self, folder: Path, precision: Precision = Precision.FP32, device: Device = Device.CPU
    ) -> None:
        self.device = resolve(device)
        is_cpu = self.device.type == "cpu"
        dtype = torch.float32 if is_cpu else torch.bfloat16
        model = load_model(folder, dtype).to(self.device)
        config = model.config.get_text_config()
        check_config(config)
        num_heads = config.num_attention_heads
        self.layout = KvLayout(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            dtype="float32" if is_cpu else "bfloat16",
        )
        self.vocab_size = int(config.vocab_size)
        self.max_model_len = longest_context(config)
        self.eos_token_ids = eos_token_ids(model)
        self.precision = precision
        self._lengths = find_lengths(self.layout.head_size) if is_cpu else ALL_LENGTHS
        self._tolerance = _TOLERANCES[dtype]
        self._kernel: VarlenKernel | None = None
        self._decode: DecodeGraphs | None = None
        self._min_rows = 1
        self._cache: KvCache | None = None
        self._compute: Forward = _Eager(model)
        self._check_attention(model)
        self._pack(model)

    def bind(self, cache: KvCache) -> None:
        """Sets the cache that `forward` reads and writes."""
        self._cache = cache
        self._kernel = varlen_kernel(self.device, self.layout.head_size, cache.block_size)

    def prepare_decode(self, max_num_seqs: int, max_model_len: int) -> None:
        """Captures decode steps on a GPU, if the model is a fixed sequence of operations."""
        if self.device.type != "cuda" or self._cache is None or not isinstance(self._compute, GraphModel):
            return
        self._decode = DecodeGraphs(
            self._compute,
            self._cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kernel=self._kernel,
            capture=CudaCapture(),
        )
        self._decode.warm_up()

    @torch.inference_mode()
    def forward(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """Logits (S, vocabulary) in fp32 for the S chunks that sample, in order; (0, vocabulary) if none."""
        assert self._cache is not None
        _clear_begun_blocks(chunks, self._cache)
        if self._decode is not None and self._decode.can_run(chunks):
            return self._decode.run(chunks).float().cpu()
        token_ids: list[int] = []
        positions: list[int] = []
        sampling_rows: list[int] = []
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.samples:
                sampling_rows.append(len(token_ids) - 1)
        step = plan_attention(chunks, self._cache, self._lengths, self._kernel)
        logits = self._run(step, token_ids, positions, sampling_rows or [0])
        return logits[: len(sampling_rows)].cpu()

    def _run(
        self, step: AttentionStep, token_ids: list[int], positions: list[int], rows: list[int]
    ) -> torch.Tensor:
        """Logits (len(rows), vocabulary)."""
        num_rows = len(rows)
        for values in (token_ids, positions, rows):
            values += values[-1:] * (self._min_rows - len(values))
        token = attention.CURRENT_STEP.set(step)
        try:
            logits = self._compute(*self._inputs(token_ids, positions, rows))
        finally:
            attention.CURRENT_STEP.reset(token)
        return logits[0, :num_rows].float()

    def _inputs(self, token_ids: list[int], positions: list[int], rows: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(values, device=self.device) for values in ([token_ids], [positions], rows)]

    @torch.inference_mode()
    def _check_attention(self, model: Any) -> None:
        """Refuses models that would compute something else through the paged cache, or nothing at all.

        Compares two chunks through a small cache with the model's own eager attention.
        """
        try:
            num_calls, logits = self._run_test_prompt()
            model.set_attn_implementation("eager")
            input_ids = torch.tensor([self._test_prompt], device=self.device)
            expected = model(input_ids=input_ids, use_cache=False).logits[0].float()
            model.set_attn_implementation(attention.IMPLEMENTATION)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise UnsupportedModel(f"its attention cannot be paged: {error}") from error
        if num_calls != self.layout.num_layers:
            raise UnsupportedModel(IGNORES_INTERFACE)
        if not self._is_close(logits, expected):
            raise UnsupportedModel("its paged attention does not equal its eager attention")

    def _is_close(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        return float((logits - expected).norm()) <= self._tolerance * float(expected.norm())

    @property
    def _test_prompt(self) -> list[int]:
        return [(7 * i + 3) % self.vocab_size for i in range(_TEST_CHUNKS[-1][1])]

    def _run_test_prompt(self) -> tuple[int, torch.Tensor]:
        """Calls of the attention function in the last chunk, and logits of all positions (12, vocabulary)."""
        cache = KvCache(self.layout, num_blocks=1, block_size=_TEST_BLOCK, device=self.device)
        step, rows = None, []
        for start, end in _TEST_CHUNKS:
            step = _only_sequence(cache, start, end)
            ids, positions = self._test_prompt[start:end], list(range(start, end))
            rows.append(self._run(step, ids, positions, list(range(end - start))))
        assert step is not None
        return step.num_calls, torch.cat(rows)

    @torch.inference_mode()
    def _pack(self, model: Any) -> None:
        """Takes the model over into a graph with packed layers; or packs the model itself."""
        linears = linears_to_pack(model)
        try:
            graph = self._captured(model)
        except NotCapturable as error:
            log.info("the model runs eagerly", reason=str(error))
            if linears:
                shapes = [(linear.out_features, linear.in_features) for linear in linears]
                packer = Packer(self.precision, shapes)
                pack_linears(model, packer)
                self._min_rows = packer.min_rows
            return
        self._compute = graph
        if linears and {*graph.linears} <= {*linears}:
            packer = Packer(self.precision, graph.linear_shapes)
            graph.pack(packer.pack)
            self._min_rows = packer.min_rows
        elif self.device.type == "cuda":
            graph.pack(lambda linear: linear)  # those with the same input as one

    def _captured(self, model: Any) -> GraphModel:
        """The model as a graph that gives what the model does. Raises NotCapturable."""
        cache = KvCache(self.layout, num_blocks=1, block_size=_TEST_BLOCK, device=self.device)
        recordings = []
        for num_tokens, num_rows in ((5, 2), (7, 3)):
            token = attention.CURRENT_STEP.set(_only_sequence(cache, 0, num_tokens))
            try:
                ids = self._test_prompt[:num_tokens]
                inputs = self._inputs(ids, list(range(num_tokens)), list(range(num_rows)))
                recordings.append(record(_Eager(model), model, *inputs))
            finally:
                attention.CURRENT_STEP.reset(token)
        _, expected = self._run_test_prompt()
        graph = GraphModel(*recordings)
        eager, self._compute = self._compute, graph
        try:
            _, logits = self._run_test_prompt()
        except (RuntimeError, ValueError, TypeError) as error:
            raise NotCapturable(f"the graph fails: {error}") from error
        finally:
            self._compute = eager
        if not self._is_close(logits, expected):
            raise NotCapturable("the graph gives something else")
        return graph


def _clear_begun_blocks(chunks: Sequence[ScheduledChunk], cache: KvCache) -> None:
    """Of the blocks that a step is the first to write into, those that it does not fill."""
    size = cache.block_size
    for chunk in chunks:
        last = chunk.end // size
        if chunk.start <= last * size < chunk.end:
            cache.clear_block(chunk.sequence.block_table[last])


class _Eager:
    """The model as transformers runs it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        output = self._model(
            input_ids=token_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows
        )
        logits: torch.Tensor = output.logits
        return logits


def _only_sequence(cache: KvCache, start: int, end: int) -> AttentionStep:
    """Positions [start, end) of a sequence in the cache's only block."""
    positions = torch.arange(start, end, device=cache.device)
    group = AttentionGroup(
        rows=slice(0, end - start),
        flat_blocks=torch.zeros(1, dtype=torch.long, device=cache.device),
        positions=positions.unsqueeze(0),
        length=_TEST_BLOCK,
        is_whole_step=True,
    )
    return AttentionStep(cache, positions, [group])
