"""A model's forward pass as one straight-line function: captured, rewritten, then packed.

Linear layers that read the same tensor (queries, keys and values; gate and up) become one: the graph
shows which do, whatever the model calls them.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from services.engine.capture import Recorder, Recording, Unifier, leaf
from services.engine.rotary import rewrite_rotations

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_INPUTS = ("token_ids", "position_ids", "rows")
_ATEN = torch.ops.aten
# The same functions by a shorter way: torch parses their arguments itself.
_DIRECT: dict[Any, Callable[..., Any]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.mean.dim: torch.mean,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.reshape.default: torch.reshape,
    _ATEN.view.default: torch.reshape,  # of a part of a merged layer's output, a view may be impossible
}


def record(forward: Forward, model: nn.Module, *inputs: torch.Tensor) -> Recording:
    """One pass over (1, T) token IDs and positions and (S,) rows. Raises NotCapturable."""
    token_ids, _, rows = inputs
    with _linears_as_leaves(model):
        return Recorder(inputs, (token_ids.shape[1], rows.shape[0])).run(forward, *inputs)


class GraphModel:
    """The function that both recordings are runs of. Raises NotCapturable."""

    def __init__(self, first: Recording, second: Recording) -> None:
        unifier = Unifier(first, second, _INPUTS)
        unifier.unify((_num_tokens, _num_rows))
        self._graph = unifier.graph
        self._constants = tuple(unifier.constants)
        _merge_linears(self._graph)
        rewrite_rotations(self._graph)
        for node in self._graph.nodes:
            node.target = _DIRECT.get(node.target, node.target)
        self._graph.eliminate_dead_code()
        self._compile()

    def __call__(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        output: torch.Tensor = self._forward(token_ids, position_ids, rows, *self._constants)
        return output

    @property
    def linears(self) -> list[nn.Linear]:
        """Every linear layer of the model that the pass uses."""
        return [linear for node in self._linear_nodes() for linear in node.target.__self__.linears]

    @property
    def linear_shapes(self) -> list[tuple[int, int]]:
        """(out, in) of the layers that are computed; those with the same input as one."""
        return [node.target.__self__.shape for node in self._linear_nodes()]

    def pack(self, pack: Callable[[nn.Linear], nn.Module]) -> None:
        """Replaces linear layers by packed ones, and empties the model's own."""
        for node in self._linear_nodes():
            layers: _Linears = node.target.__self__
            node.target = pack(layers.as_one()).forward
            for linear in layers.linears:
                linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self._compile()

    def _linear_nodes(self) -> list[Any]:
        return [
            node for node in self._graph.nodes if isinstance(getattr(node.target, "__self__", None), _Linears)
        ]

    def _compile(self) -> None:
        self._forward: Any = fx.GraphModule({}, self._graph).forward


class _Linears:
    """Linear layers that read the same tensor."""

    def __init__(self, linears: tuple[nn.Linear, ...]) -> None:
        self.linears = linears

    @property
    def shape(self) -> tuple[int, int]:
        return sum(linear.out_features for linear in self.linears), self.linears[0].in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, T, in) -> their outputs side by side, (1, T, sum of out)."""
        outputs = [call_linear(linear, x) for linear in self.linears]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def as_one(self) -> nn.Linear:
        """One layer that gives what `forward` does."""
        first = self.linears[0]
        if len(self.linears) == 1:
            return first
        one = nn.Linear(1, 1, bias=first.bias is not None)
        one.weight = nn.Parameter(torch.cat([layer.weight for layer in self.linears]), requires_grad=False)
        if first.bias is not None:
            one.bias = nn.Parameter(torch.cat([layer.bias for layer in self.linears]), requires_grad=False)
        one.out_features, one.in_features = one.weight.shape
        return one


def call_linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, linear.weight, linear.bias)


def _num_tokens(token_ids: torch.Tensor, *_: torch.Tensor) -> int:
    return token_ids.shape[1]


def _num_rows(_: torch.Tensor, __: torch.Tensor, rows: torch.Tensor) -> int:
    return rows.shape[0]


@contextmanager
def _linears_as_leaves(model: nn.Module) -> Iterator[None]:
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    for linear in linears:
        linear.forward = partial(leaf, call_linear, linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _merge_linears(graph: fx.Graph) -> None:
    """Layers with the same input become one, whose output is split."""
    siblings: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is call_linear:
            linear, x = node.args
            siblings[x, linear.bias is None, linear.weight.dtype].append(node)
    for nodes in siblings.values():
        linears = tuple(node.args[0] for node in nodes)
        x = nodes[0].args[1]
        with graph.inserting_before(nodes[0]):
            together = graph.call_function(_Linears(linears).forward, (x,))
            outputs = [together]
            if len(nodes) > 1:
                sizes = [linear.out_features for linear in linears]
                parts = graph.call_function(torch.split_with_sizes, (together, sizes, -1))
                outputs = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(nodes))]
        for node, output in zip(nodes, outputs, strict=True):
            node.replace_all_uses_with(output)
            graph.erase_node(node)
