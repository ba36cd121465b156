# SPDX-License-Identifier: Apache-2.0
"""What is computed: a forward-only graph of ATen ops over named values, without torch.

`capture.py` makes a Graph from a module; strategies, costs and solvers read it. Everything points
by name, so a graph prints, compares, pickles and hashes. Backward is not in it: it follows from the
sharding rules (DESIGN 2).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from autoplan.units import DTYPE_BYTES, FLOATING

KINDS = ("input", "parameter", "buffer", "constant", "activation")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Global shape and dtype ("bfloat16") of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOATING

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph.

    Attributes:
        name: Unique. Inputs, parameters and buffers carry the model's own names ("input_ids",
            "lm_head.weight").
        meta: Global shape and dtype.
        kind: One of KINDS.
        requires_grad: A gradient flows to it: a trainable parameter, or an activation that depends
            on one.
        stored_dtype: Of a parameter that is kept in another dtype than the ops use ("float32" for a
            bfloat16 one); else "".
    """

    name: str
    meta: TensorMeta
    kind: str
    requires_grad: bool = False
    stored_dtype: str = ""


_RANDOM = frozenset(
    "alpha_dropout bernoulli cauchy dropout exponential geometric log_normal multinomial "
    "native_dropout normal poisson rand rand_like randint randint_like randn randn_like randperm "
    "rrelu_with_noise rrelu_with_noise_functional uniform".split()
)


@dataclass(frozen=True, slots=True)
class Ref:
    """Inside `Op.arguments`: the op's tensor input number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an ATen op.

    Attributes:
        name: Unique.
        target: "aten.linear.default".
        inputs: Value names of its tensor inputs, in the order in which they appear in `arguments`.
        outputs: Value names of its tensor outputs; "" for an output that nobody uses.
        arguments: Every argument of the op's schema by name: numbers, strings, None, tuples, and
            Ref for tensors. Dtypes are strings ("float32"); devices, layouts and memory formats are
            left out, they belong to where it runs.
        module_path: "model.layers.3.mlp", or "".
        source: "file.py:123" of the call in the model's code, or "".
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: Mapping[str, object]
    module_path: str = ""
    source: str = ""

    @property
    def draws(self) -> bool:
        """It draws random numbers."""
        return self.target.split(".")[1] in _RANDOM

    def signature(self) -> str:
        """Target and arguments as text, free of value names: equal for the same op of two equal
        blocks.
        """
        return f"{self.target}({', '.join(f'{k}={v}' for k, v in self.arguments.items())})"


@dataclass(frozen=True)
class Graph:
    """Ops in topological order over named values. Immutable; checked by `verify`.

    Attributes:
        name: The model's class name.
        values: Every value by name.
        ops: In topological order.
        inputs: The user's tensor inputs, in call order.
        outputs: The model's tensor outputs, flattened, in order; None where an output is not a
            tensor.
        loss: The scalar that training minimises, or None.
        buffer_updates: buffer name -> value that it takes after the forward pass.
        shared: Groups of parameter names that are one tensor; the first of a group is the one in
            `values`.
    """

    name: str
    values: Mapping[str, Value]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    loss: str | None = None
    buffer_updates: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    shared: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """Value name -> index of the op that makes it; graph inputs are absent."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs if v}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Value name -> (op index, input slot) of every use by an op."""
        uses: dict[str, list[tuple[int, int]]] = {name: [] for name in self.values}
        for i, op in enumerate(self.ops):
            for slot, name in enumerate(op.inputs):
                uses[name].append((i, slot))
        return {name: tuple(where) for name, where in uses.items()}

    def of_kind(self, kind: str) -> tuple[Value, ...]:
        """The values of one kind, in order."""
        return tuple(v for v in self.values.values() if v.kind == kind)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters, shared ones once."""
        return sum(v.meta.numel for v in self.of_kind("parameter"))

    @cached_property
    def digest(self) -> str:
        """A stable hash of everything that decides a plan: ops, wiring, shapes, dtypes, names."""
        text = [
            self.name,
            repr(self.inputs),
            repr(self.outputs),
            repr(self.loss),
            repr(self.shared),
            repr(dict(self.buffer_updates)),
        ]
        text += [
            f"{v.name}|{v.meta}|{v.kind}|{v.requires_grad}|{v.stored_dtype}"
            for v in self.values.values()
        ]
        text += [
            f"{o.name}|{o.signature()}|{o.inputs}|{o.outputs}|{o.module_path}" for o in self.ops
        ]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def verify(self) -> None:
        """Checks names and order.

        Raises:
            ValueError: A value is used before it is made, made twice, or unknown.
        """
        known = {v.name for v in self.values.values() if v.kind != "activation"}
        for op in self.ops:
            for name in op.inputs:
                if name not in known:
                    raise ValueError(f"op {op.name} uses {name!r}, which is not made before it")
            for name in op.outputs:
                if name and (name in known or name not in self.values):
                    raise ValueError(
                        f"op {op.name} makes {name!r}, which is made twice or undeclared"
                    )
                known.add(name)
        for name in (
            *(o for o in self.outputs if o),
            *self.buffer_updates.values(),
            *([self.loss] if self.loss else []),
        ):
            if name not in known:
                raise ValueError(f"{name!r} leaves the graph but is not made in it")


def prune(graph: Graph) -> Graph:
    """The graph without the ops that nothing uses; which values carry a gradient is worked out
    again.
    """
    ends = (*graph.outputs, graph.loss, *graph.buffer_updates.values())
    needed = {name for name in ends if name}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if any(name in needed for name in op.outputs):
            kept.append(replace(op, outputs=tuple(n if n in needed else "" for n in op.outputs)))
            needed.update(op.inputs)
    kept.reverse()
    grads = _requires_grad(graph, kept)
    values = {
        v.name: v
        for v in graph.values.values()
        if v.kind in ("input", "parameter", "buffer") or (v.kind == "constant" and v.name in needed)
    }
    for op in kept:
        for name in op.outputs:
            if name:
                v = graph.values[name]
                values[name] = Value(v.name, v.meta, v.kind, name in grads)
    return replace(graph, values=MappingProxyType(values), ops=tuple(kept))


def _requires_grad(graph: Graph, ops: list[Op]) -> set[str]:
    grads = {v.name for v in graph.of_kind("parameter") if v.requires_grad}
    for op in ops:
        if op.target != "aten.detach.default" and any(name in grads for name in op.inputs):
            grads.update(n for n in op.outputs if n and graph.values[n].requires_grad)
    return grads
