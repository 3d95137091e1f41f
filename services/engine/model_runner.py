"""Runs the model: one forward pass over the chunks of a step, through the paged cache.

Any decoder-only transformers model whose attention goes through the attention interface is served
without code of its own; where its forward pass can be captured as a graph, the graph runs in its place.
Knows tokens, block tables and tensors; not why a chunk was scheduled.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from services.engine.attention import OnLayer
from services.engine.attention_plan import plan_attention
from services.engine.decode_graph import CudaCapture, DecodeGraphs
from services.engine.device import Device
from services.engine.graph_model import Forward, GraphModel
from services.engine.kv_cache import KvCache, KvLayout
from services.engine.kv_lengths import ALL_LENGTHS, find_lengths
from services.engine.model_loading import check_config, eos_token_ids, load_model, longest_context
from services.engine.model_preparation import prepare
from services.engine.placement import resolve
from services.engine.precision import Precision
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.varlen import VarlenKernel, varlen_kernel


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
        self._lengths = find_lengths(self.layout.head_size) if is_cpu else ALL_LENGTHS
        self._kernel: VarlenKernel | None = None
        self._decode: DecodeGraphs | None = None
        self._cache: KvCache | None = None
        self._pass = prepare(
            model, self.layout, vocab_size=self.vocab_size, precision=precision, device=self.device
        )

    @property
    def compute(self) -> Forward:
        """The forward pass itself, over tensors."""
        return self._pass.compute

    def bind(self, cache: KvCache, kernel: VarlenKernel | None = None) -> None:
        """Sets the cache that `forward` reads and writes; `kernel` attends, or what suits the device."""
        self._cache = cache
        self._kernel = kernel or varlen_kernel(self.device, self.layout.head_size, cache.block_size)

    def prepare_decode(self, max_num_seqs: int, max_model_len: int) -> None:
        """Captures decode steps on a GPU, if the model is a fixed sequence of operations."""
        if self.device.type != "cuda" or self._cache is None or not isinstance(self.compute, GraphModel):
            return
        self._decode = DecodeGraphs(
            self.compute,
            self._cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kernel=self._kernel,
            capture=CudaCapture(),
        )
        self._decode.warm_up()

    @torch.inference_mode()
    def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
        """Logits (S, vocabulary) in fp32 for the S chunks that sample, in order; (0, vocabulary) if none.

        Args:
            on_layer: told each layer when its keys and values are in the cache; not by a captured step.
        """
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
        step.on_layer = on_layer
        logits = self._pass.run(step, token_ids, positions, sampling_rows or [0])
        return logits[: len(sampling_rows)].cpu()


def _clear_begun_blocks(chunks: Sequence[ScheduledChunk], cache: KvCache) -> None:
    """Of the blocks that a step is the first to write into, those that it does not fill."""
    size = cache.block_size
    for chunk in chunks:
        last = chunk.end // size
        if chunk.start <= last * size < chunk.end:
            cache.clear_block(chunk.sequence.block_table[last])
