"""Records a model's forward pass as a graph of torch operations, free of the Python around them.

A small model's decode step spends as long in module calls and decorators as in arithmetic. So the
pass is recorded twice, with different numbers of tokens and of sampled rows: operations must agree, and
an integer that differs must be a multiple of one of the two numbers. Whatever could make another step take
another path is refused: reading values, shapes that depend on values, randomness, writing in place. The
caller keeps the eager model for what is refused, and compares the replay with it before relying on it.

torch's symbolic tracer (`make_fx`) gives the same graph for as many models, but takes eight times as long:
3.8 s instead of 0.5 for 30 layers, at every start of every worker.

Knows no model, and no operation by name.
"""

import operator
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode


class NotCapturable(Exception):
    """This model's forward pass is no fixed sequence of operations."""


_ACTIVE: ContextVar["Recorder | None"] = ContextVar("baton_recorder", default=None)
_REFUSED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


def leaf(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function; a recorder takes it down as one operation."""
    recorder = _ACTIVE.get()
    return function(*args) if recorder is None else recorder.leaf(function, args)


def _picks_by_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Indexing has a shape that depends on values only where a mask picks."""
    picked = args[1] if func is torch.ops.aten.index.Tensor else (None,)
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(i is not None and i.dtype in masks for i in picked)


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor that an earlier operation gave, or an input, by number."""

    number: int


@dataclass(slots=True)
class _Operation:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[int]
    is_sequence: bool  # the outputs are elements of a list or tuple


@dataclass(slots=True)
class Recording:
    """What happened in one pass. `sizes` are those that may differ from another recording's."""

    sizes: tuple[int, ...]
    operations: list[_Operation] = field(default_factory=list)
    result: int = 0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down every operation while it is entered. Inputs get the first numbers."""

    def __init__(self, inputs: tuple[torch.Tensor, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording(sizes)
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # an id may be used again once its tensor is gone
        self._is_inside_leaf = False
        for tensor in inputs:
            self._number(tensor)

    def run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Recording:
        """Records the function. Raises NotCapturable."""
        token = _ACTIVE.set(self)
        try:
            with self:
                result = function(*inputs)
        finally:
            _ACTIVE.reset(token)
        if id(result) not in self._numbers:
            raise NotCapturable("its result is made outside of torch")
        self.recording.result = self._numbers[id(result)]
        return self.recording

    def leaf(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._is_inside_leaf = True
        try:
            output = function(*args)
        finally:
            self._is_inside_leaf = False
        self._note(function, args, {}, output)
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._is_inside_leaf:
            return output
        if func._schema.is_mutable:
            raise NotCapturable(f"it writes in place: {func}")
        if args and output is args[0]:  # `to`, `contiguous` and `dropout` often have nothing to do
            return output
        if _REFUSED & {*func.tags} and not _picks_by_number(func, args):
            raise NotCapturable(f"its result or path depends on values: {func}")
        self._note(func, args, kwargs or {}, output)
        return output

    def _number(self, tensor: torch.Tensor) -> int:
        self._alive.append(tensor)
        number = len(self._alive) - 1
        self._numbers[id(tensor)] = number
        return number

    def _note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        args, kwargs = self._named(args), {name: self._named(value) for name, value in kwargs.items()}
        is_sequence = isinstance(output, tuple | list)
        tensors = output if is_sequence else [output]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise NotCapturable(f"{function} gives something else than tensors")
        outputs = [self._number(tensor) for tensor in tensors]
        self.recording.operations.append(_Operation(function, args, kwargs, outputs, is_sequence))

    def _named(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            number = self._numbers.get(id(argument))
            return argument if number is None else _Value(number)
        if isinstance(argument, tuple | list):
            return type(argument)(map(self._named, argument))
        return argument


class Unifier:
    """Builds the graph that two recordings are instances of.

    The graph's placeholders are the inputs, then the constants, whose values are in `constants`.
    """

    def __init__(self, first: Recording, second: Recording, inputs: tuple[str, ...]) -> None:
        self.graph = fx.Graph()
        self.constants: list[torch.Tensor] = []
        self._first, self._second = first, second
        self._nodes: dict[int, fx.Node] = {i: self.graph.placeholder(name) for i, name in enumerate(inputs)}
        self._last_placeholder = self._nodes[len(inputs) - 1]
        self._constant_nodes: dict[int, fx.Node] = {}
        self._sizes: list[fx.Node] = []
        self._multiples: dict[tuple[int, int], fx.Node] = {}

    def unify(self, size_of: tuple[Callable[..., int], ...]) -> None:
        """`size_of` compute each size from the inputs. Raises NotCapturable."""
        first, second = self._first, self._second
        inputs = list(self._nodes.values())
        self._sizes = [self.graph.call_function(function, tuple(inputs)) for function in size_of]
        if len(first.operations) != len(second.operations) or first.result != second.result:
            raise NotCapturable("its operations depend on the number of tokens")
        for a, b in zip(first.operations, second.operations, strict=True):
            if a.function != b.function or a.outputs != b.outputs or a.kwargs.keys() != b.kwargs.keys():
                raise NotCapturable("its operations depend on the number of tokens")
            args = self._same(a.args, b.args)
            kwargs = {name: self._same(value, b.kwargs[name]) for name, value in a.kwargs.items()}
            node = self.graph.call_function(a.function, args, kwargs)
            for i, number in enumerate(a.outputs):
                self._nodes[number] = (
                    self.graph.call_function(operator.getitem, (node, i)) if a.is_sequence else node
                )
        self.graph.output(self._nodes[first.result])
        self.graph.eliminate_dead_code()

    def _same(self, a: Any, b: Any) -> Any:
        if isinstance(a, _Value) and a == b:
            return self._nodes[a.number]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return self._constant(a, b)
        if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
            return type(a)(map(self._same, a, b))
        if type(a) is type(b) and (a is b or a == b):
            return a
        if type(a) is int and type(b) is int:
            return self._multiple(a, b)
        raise NotCapturable(f"an argument differs by the number of tokens: {a} and {b}")

    def _constant(self, a: torch.Tensor, b: torch.Tensor) -> fx.Node:
        if a is not b and not (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)):
            raise NotCapturable("a constant depends on the number of tokens")
        if id(a) not in self._constant_nodes:
            with self.graph.inserting_after(self._last_placeholder):
                self._last_placeholder = self.graph.placeholder(f"constant_{len(self.constants)}")
            self._constant_nodes[id(a)] = self._last_placeholder
            self.constants.append(a)
        return self._constant_nodes[id(a)]

    def _multiple(self, a: int, b: int) -> fx.Node:
        for i, (p, q) in enumerate(zip(self._first.sizes, self._second.sizes, strict=True)):
            if a % p == 0 and a // p * q == b:
                key = (i, a // p)
                if key not in self._multiples:
                    node = self._sizes[i]
                    factor = a // p
                    self._multiples[key] = (
                        node if factor == 1 else self.graph.call_function(operator.mul, (node, factor))
                    )
                return self._multiples[key]
        raise NotCapturable(f"a size is no multiple of the number of tokens: {a} and {b}")
