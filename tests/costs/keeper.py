# SPDX-License-Identifier: Apache-2.0
"""Ops run as autograd sees them: what a call keeps for backward, against what saved.py predicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from autoplan.costs.saved import Saved, saved_by
from autoplan.graph import Op, Ref, TensorMeta


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


def replaced(value: object, change: Callable[[torch.Tensor], object]) -> object:
    if isinstance(value, torch.Tensor):
        return change(value)
    return (
        type(value)(replaced(v, change) for v in value)
        if isinstance(value, list | tuple)
        else value
    )


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def schema_arguments(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, object]:
    schema = func._schema.arguments
    given = {**dict(zip([a.name for a in schema], args)), **kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def op_of(
    target: str, arguments: dict[str, object], num_outputs: int
) -> tuple[Op, list[torch.Tensor]]:
    found: list[torch.Tensor] = []

    def ref(tensor: torch.Tensor) -> Ref:
        found.append(tensor)
        return Ref(len(found) - 1)

    refs = {name: replaced(value, ref) for name, value in arguments.items()}
    refs = {k: tuple(v) if isinstance(v, list) else v for k, v in refs.items()}
    names = tuple(f"i{n}" for n in range(len(found)))
    return Op("op", target, names, tuple(f"o{n}" for n in range(num_outputs)), refs), found


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    held = tensor.untyped_storage()
    return held.data_ptr(), held.nbytes()


class Keeper:
    """What autograd keeps, address -> bytes; holds the tensors, so addresses stay unique."""

    def __init__(self) -> None:
        self.kept: dict[int, int] = {}
        self.held: list[torch.Tensor] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)

    def __enter__(self) -> Keeper:
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.held.append(tensor)
        address, size_bytes = storage(tensor)
        self.kept[address] = size_bytes
        return tensor


def compare(func, args: tuple, kwargs: dict, needs: tuple[bool, ...]) -> tuple[Saved, str]:
    """The prediction, and where autograd differs from it ("" when it does not)."""
    _, inputs = op_of(str(func), schema_arguments(func, args, kwargs), 1)
    leaves = {id(t): t.detach().requires_grad_(n) for t, n in zip(inputs, needs)}
    args = tuple(replaced(a, lambda t: leaves[id(t)]) for a in args)
    kwargs = {k: replaced(v, lambda t: leaves[id(t)]) for k, v in kwargs.items()}
    with Keeper() as keeper:
        result = func(*args, **kwargs)
    outputs = tensors_in([result])
    arguments = schema_arguments(func, args, kwargs)
    op, inputs = op_of(str(func), arguments, len(outputs))
    wanted = saved_by(op, tuple(map(meta_of, inputs)), tuple(map(meta_of, outputs)), needs)
    named = {storage(inputs[i])[0] for i in wanted.inputs} | {
        storage(outputs[i])[0] for i in wanted.outputs
    }
    known = {storage(t)[0] for t in (*inputs, *outputs)}
    got = {a for a in keeper.kept if a in known}
    extra = sum(size for a, size in keeper.kept.items() if a not in known)
    wrong = []
    if got != named or extra != wanted.extra_bytes:
        shown = [i for i, t in enumerate(inputs) if storage(t)[0] in got]
        shown_out = [i for i, t in enumerate(outputs) if storage(t)[0] in got]
        wrong.append(f"{func} {needs}: keeps {shown}, {shown_out}, {extra} bytes; said {wanted}")
    alias = any(storage(o)[0] == storage(i)[0] for o in outputs for i in inputs)
    if alias != (wanted.alias_of is not None):
        wrong.append(f"{func}: shares storage {alias}; said alias_of={wanted.alias_of}")
    return wanted, "\n".join(wrong)


def combinations(flags: list[bool]) -> Iterator[tuple[bool, ...]]:
    """Every choice of inputs that need a gradient, among those that may."""
    yield from itertools.product(*[(False, True) if flag else (False,) for flag in flags])
