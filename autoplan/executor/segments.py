# SPDX-License-Identifier: Apache-2.0
"""Segments of a stage: runs of ops, those of a recomputed layer together.

In: a body's ops in order, and the labels (module paths) of the layers whose activations are made
again in backward. Out: (label or None, ops) in an order in which every op runs after its inputs,
and the module that runs a labelled segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from autoplan.executor.special_ops import Moment
from autoplan.graph import Op

Tensor = torch.Tensor
Segment = tuple[str | None, list[Op]]


def find_segments(ops: list[Op], labels: Iterable[str]) -> list[Segment]:
    """Ops in order, those of a recomputed layer together.

    Args:
        ops: A body's ops, in topological order.
        labels: Module paths of the recomputed layers.
    """
    labels = tuple(labels)
    if not labels:
        return [(None, ops)]
    label_of = {op.name: _label(op, labels) for op in ops}
    users: dict[str, set[str | None]] = {}
    for op in reversed(ops):  # an op without a module path joins the layer that alone uses it
        mine = {label for n in op.outputs if n for label in users.get(n, {None})}
        alone = len(mine) == 1 and None not in mine
        if label_of[op.name] is None and alone and not op.module_path:
            label_of[op.name] = next(iter(mine))
        for name in op.inputs:
            users.setdefault(name, set()).add(label_of[op.name])
    return _grouped(ops, label_of)


def _label(op: Op, labels: Iterable[str]) -> str | None:
    return next(
        (x for x in labels if op.module_path == x or op.module_path.startswith(f"{x}.")), None
    )


def _grouped(ops: list[Op], label_of: Mapping[str, str | None]) -> list[Segment]:
    """Each label's ops at the place of its first one.

    What they need from outside the label moves in front of them.
    """
    order: list[Segment] = []
    place: dict[str, int] = {}
    for op in ops:
        label = label_of[op.name]
        if label is not None and label in place:
            order[place[label]][1].append(op)
        elif label is None and order and order[-1][0] is None:
            order[-1][1].append(op)
        else:
            if label is not None:
                place[label] = len(order)
            order.append((label, [op]))
    made: set[str] = set()
    inside = {n for op in ops for n in op.outputs if n}
    result: list[Segment] = []
    for label, group in _hoisted(order, label_of):
        for op in group:
            assert all(n in made or n not in inside for n in op.inputs), (
                f"{op.name} runs before its inputs"
            )
            made.update(n for n in op.outputs if n)
        result.append((label, group))
    return result


def _hoisted(order: list[Segment], label_of: Mapping[str, str | None]) -> list[Segment]:
    """Unlabelled ops that a labelled group before them needs move in front of that group."""
    ops = [op for _, group in order for op in group]
    maker = {n: op for op in ops for n in op.outputs if n}
    emitted: set[str] = set()
    result: list[Segment] = []

    def require(op: Op) -> None:
        for name in op.inputs:
            before = maker.get(name)
            if before is not None and before.name not in emitted and label_of[before.name] is None:
                require(before)
                emitted.add(before.name)
                result.append((None, [before]))

    for label, group in order:
        for op in group:
            require(op)
        fresh = [op for op in group if op.name not in emitted]
        emitted.update(op.name for op in fresh)
        if fresh:
            result.append((label, fresh))
    return result


class Recomputed(nn.Module):
    """A layer whose activations are made again in backward."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, moment: Moment, *inputs: Tensor) -> object:
        if not torch.is_grad_enabled():
            made: object = self.body(moment, *inputs)
        else:
            made = checkpoint(
                self.body, moment, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        return made
