"""From a loaded model to the forward pass that serves it: checked, captured as a graph, packed.

Everything here compares what the paged cache gives on a short prompt with what the model itself gives, so
that a model of a kind nobody thought of is refused at start, not answered wrongly.
"""

from typing import Any

import structlog
import torch
from torch import nn

from services.engine import attention
from services.engine.attention import AttentionGroup, AttentionStep
from services.engine.capture import NotCapturable
from services.engine.errors import UnsupportedModel
from services.engine.forward_pass import EagerModel, ForwardPass
from services.engine.graph_model import Forward, GraphModel, record
from services.engine.kv_cache import KvCache, KvLayout
from services.engine.linear_packing import Packer, linears_to_pack, pack_linears
from services.engine.model_loading import IGNORES_INTERFACE
from services.engine.precision import Precision

log = structlog.get_logger()

_TEST_CHUNKS = ((0, 7), (7, 12))  # of the prompt that a model is checked with
_TEST_BLOCK = 16
_RECORDED = ((5, 2), (7, 3))  # tokens and rows of logits
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of a norm


@torch.inference_mode()
def prepare(
    model: Any, layout: KvLayout, *, vocab_size: int, precision: Precision, device: torch.device
) -> ForwardPass:
    """The fastest forward pass that gives what the model does. The model's own weights may be gone then.

    Raises UnsupportedModel if the model computes something else through the paged cache, or nothing.
    """
    prompt = _TestPrompt(layout, vocab_size, device)
    _check_attention(model, prompt)
    try:
        graph = _captured(model, prompt)
    except NotCapturable as error:
        log.info("the model runs eagerly", reason=str(error))
        return ForwardPass(EagerModel(model), device, _pack_model(model, precision))
    return ForwardPass(graph, device, _pack_graph(graph, model, precision, device))


class _TestPrompt:
    """Twelve tokens through a small cache."""

    def __init__(self, layout: KvLayout, vocab_size: int, device: torch.device) -> None:
        self.token_ids = [(7 * i + 3) % vocab_size for i in range(_TEST_CHUNKS[-1][1])]
        self.num_layers = layout.num_layers
        self.device = device
        self.tolerance = _TOLERANCES[layout.torch_dtype]
        self._layout = layout

    def run(self, compute: Forward) -> tuple[int, torch.Tensor]:
        """Calls of the attention function in the last chunk, and logits of all positions (12, vocabulary)."""
        cache, forward = self.cache(), ForwardPass(compute, self.device)
        step, rows = None, []
        for start, end in _TEST_CHUNKS:
            step = _only_sequence(cache, start, end)
            ids, positions = self.token_ids[start:end], range(start, end)
            rows.append(forward.run(step, ids, positions, range(end - start)))
        assert step is not None
        return step.num_calls, torch.cat(rows)

    def cache(self) -> KvCache:
        return KvCache(self._layout, num_blocks=1, block_size=_TEST_BLOCK, device=self.device)

    def is_close(self, logits: torch.Tensor, expected: torch.Tensor) -> bool:
        return float((logits - expected).norm()) <= self.tolerance * float(expected.norm())


def _check_attention(model: Any, prompt: _TestPrompt) -> None:
    """Compares two chunks through the paged cache with the model's own eager attention."""
    try:
        num_calls, logits = prompt.run(EagerModel(model))
        model.set_attn_implementation("eager")
        input_ids = torch.tensor([prompt.token_ids], device=prompt.device)
        expected = model(input_ids=input_ids, use_cache=False).logits[0].float()
        model.set_attn_implementation(attention.IMPLEMENTATION)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"its attention cannot be paged: {error}") from error
    if num_calls != prompt.num_layers:
        raise UnsupportedModel(IGNORES_INTERFACE)
    if not prompt.is_close(logits, expected):
        raise UnsupportedModel("its paged attention does not equal its eager attention")


def _captured(model: Any, prompt: _TestPrompt) -> GraphModel:
    """The model as a graph that gives what the model does. Raises NotCapturable."""
    eager, cache = EagerModel(model), prompt.cache()
    recordings = []
    for num_tokens, num_rows in _RECORDED:
        ids = prompt.token_ids[:num_tokens]
        inputs = ForwardPass(eager, prompt.device).inputs(ids, range(num_tokens), range(num_rows))
        token = attention.CURRENT_STEP.set(_only_sequence(cache, 0, num_tokens))
        try:
            recordings.append(record(eager, model, *inputs))
        finally:
            attention.CURRENT_STEP.reset(token)
    graph = GraphModel(*recordings)
    _, expected = prompt.run(eager)
    try:
        _, logits = prompt.run(graph)
    except (RuntimeError, ValueError, TypeError) as error:
        raise NotCapturable(f"the graph fails: {error}") from error
    if not prompt.is_close(logits, expected):
        raise NotCapturable("the graph gives something else")
    return graph


def _pack_model(model: nn.Module, precision: Precision) -> int:
    """Packs what a model that runs eagerly has; the rows that a step is padded to."""
    linears = linears_to_pack(model)
    if not linears:
        _warn_of_plain_linears(precision)
        return 1
    packer = Packer(precision, [(linear.out_features, linear.in_features) for linear in linears])
    pack_linears(model, packer)
    return packer.min_rows


def _pack_graph(graph: GraphModel, model: nn.Module, precision: Precision, device: torch.device) -> int:
    linears = linears_to_pack(model)
    if linears and {*graph.linears} <= {*linears}:
        packer = Packer(precision, graph.linear_shapes)
        graph.pack(packer.pack)
        return packer.min_rows
    if device.type == "cpu":
        _warn_of_plain_linears(precision)
    else:
        graph.pack(lambda linear: linear)  # those with the same input as one
    return 1


def _warn_of_plain_linears(precision: Precision) -> None:
    """Nothing else would tell: replies are as right, only the last bits go with the company."""
    log.warning(
        "linear layers are not packed: slower, in fp32, and a reply may depend on its company",
        asked_for=precision,
        mkldnn=torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    )


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
