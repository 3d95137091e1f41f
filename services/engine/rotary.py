"""Rewrites rotary position embedding, as transformers spells it, to fewer operations.

`x * cos + cat(-x[h:], x[:h]) * sin` equals `x * cos + cat(x[h:], x[:h]) * signed` where `signed` is the
sine with its first half negated: computed once a step instead of a negation in every layer. Each element
sees the same multiplications and additions, so the result is the same to the bit.
"""

from typing import Any

import torch
from torch import fx

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
_CAT, _NEG, _SLICE = torch.ops.aten.cat.default, torch.ops.aten.neg.default, torch.ops.aten.slice.Tensor


def rewrite_rotations(graph: fx.Graph) -> None:
    """Replaces every rotation in the graph."""
    signed: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if (found := _match(node)) is None:
            continue
        x, cos, sin, half = found
        if sin not in signed:
            with graph.inserting_after(sin):
                signed[sin] = graph.call_function(_sign, (sin, half))
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(rotate, (x, cos, signed[sin], half)))


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, half: int) -> torch.Tensor:
    """(1, H, T, 2 * half), with (1, 1, T, 2 * half) cosines and sines."""
    return (x * cos).add_(x.roll(half, -1).mul_(signed_sin))


def _sign(sin: torch.Tensor, half: int) -> torch.Tensor:
    return torch.cat((-sin[..., :half], sin[..., half:]), -1)


def _match(node: Any) -> tuple[fx.Node, fx.Node, fx.Node, int] | None:
    """x, cosine, sine and half of the width, if the node is a rotation."""
    if node.target is not _ADD or len(node.args) != 2:
        return None
    straight, turned = node.args
    if not (_is(straight, _MUL) and _is(turned, _MUL)):
        return None
    (x, cos), (cat, sin) = straight.args, turned.args
    if not (_is(cat, _CAT) and len(cat.args[0]) == 2 and cat.args[1] == -1):
        return None
    neg, lower = cat.args[0]
    if not (_is(neg, _NEG) and _is(lower, _SLICE) and _is(neg.args[0], _SLICE)):
        return None
    upper = neg.args[0]
    half = lower.args[3]
    rest = (upper.args[0], upper.args[1], lower.args[0], lower.args[1], lower.args[2], upper.args[2])
    if rest != (x, 3, x, 3, 0, half):
        return None
    return x, cos, sin, half


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target
