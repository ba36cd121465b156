# SPDX-License-Identifier: Apache-2.0
"""Functions with a backward of their own, kept whole.

A plan's backward is the derivative of the forward in its graph. A `torch.autograd.Function` whose
backward is another one (a straight-through estimator, a clipped derivative) is therefore one op of
the graph, `autoplan.function`, that every rank runs on whole tensors through the class itself. What
would differ from rank to rank or reach past the op (random numbers, writes into inputs, tensors
that are no arguments) is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function  # checked on 2.13

from autoplan.graph import Ref

TARGET = "autoplan.function"
_PLAIN = (int, float, bool, str, type(None))


@dataclass
class WholeCall:
    """One call that is kept.

    Attributes:
        function: The class.
        arguments: Of `apply`, a Ref for each tensor.
        is_single: The result is a tensor, no tuple.
    """

    function: type[Function]
    arguments: tuple[object, ...]
    is_single: bool = True


_calls: dict[str, WholeCall] = {}  # of the trace that goes on
_known: dict[str, type[Function]] = {}  # by name, all that this process has captured


@contextmanager
def kept_calls() -> Iterator[None]:
    """While a model is traced and its graph read: forgets the calls afterwards."""
    try:
        yield
    finally:
        _calls.clear()


def keep_call(function: type[Function], args: tuple[object, ...]) -> Any:
    """A traced call as one op, with the result that the call has."""
    tensors: list[Tensor] = []
    arguments = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
            arguments.append(Ref(len(tensors) - 1))
        else:
            arguments.append(arg)  # type: ignore[arg-type]
    key = str(len(_calls))
    _calls[key] = WholeCall(function, tuple(arguments))
    _known[name_of(function)] = function
    made = torch.ops.autoplan.function(tensors, key)
    return made[0] if _calls[key].is_single else tuple(made)


def call_of(key: str) -> WholeCall:
    """The call that a traced op stands for."""
    return _calls[key]


def name_of(function: type[Function]) -> str:
    """As a graph names a function: "package.module.Class"."""
    return f"{function.__module__}.{function.__qualname__}"


def function_named(name: str) -> type[Function]:
    """The class of a captured function, in the process that captured it."""
    return _known[name]


@torch.library.custom_op(
    "autoplan::function", mutates_args=(), schema="(Tensor[] tensors, str call) -> Tensor[]"
)
def _function(tensors: list[Tensor], call: str) -> list[Tensor]:
    """Only traced: the executor calls the class."""
    raise AssertionError(f"call {call} is run through its class")


@_function.register_fake
def _traced(tensors: list[Tensor], call: str) -> list[Tensor]:
    whole = _calls[call]
    given = [tensors[a.index] if isinstance(a, Ref) else a for a in whole.arguments]
    made = run_forward(whole.function, given)
    whole.is_single = isinstance(made, Tensor)
    results = (made,) if isinstance(made, Tensor) else made
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in results
    ]


class _Context:
    """What a forward may do with its ctx."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs

    def save_for_backward(self, *tensors: object) -> None: ...

    def mark_non_differentiable(self, *tensors: object) -> None: ...

    def mark_dirty(self, *tensors: object) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def run_forward(function: type[Function], given: list[object]) -> Any:
    """The forward alone, as plain operations on its arguments."""
    if function.setup_context is not Function.setup_context:  # the form without ctx
        return function.forward(*given)
    needs = tuple(isinstance(x, Tensor) and x.requires_grad for x in given)
    return function.forward(_Context(needs), *given)


def why_not_whole(function: type[Function], given: list[object]) -> str:
    """What hinders running a function whole on every rank; "" if nothing.

    Args:
        function: The class.
        given: Arguments to try it with.
    """
    if not all(isinstance(a, Tensor) or _is_plain(a) for a in given):
        return "it has arguments that are neither tensors nor plain values"
    parts = (function.forward, function.backward, function.setup_context)
    cells = itertools.chain(*(getattr(part, "__closure__", None) or () for part in parts))
    if any(isinstance(cell.cell_contents, Tensor | nn.Module) for cell in cells):
        return "it uses tensors that are none of its arguments"
    before = [a.detach().clone() if isinstance(a, Tensor) else a for a in given]
    with torch.random.fork_rng():
        results = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            made = function.apply(*given)  # type: ignore[no-untyped-call] # torch's
            results.append(made if isinstance(made, tuple) else (made,))
    if not all(isinstance(x, Tensor) for x in results[0]):
        return "its results are not all tensors"
    if not all(map(_same, before, given)):
        return "it writes into its arguments"
    if not all(map(_same, *results)):
        return "it draws random numbers"
    trains = any(isinstance(a, Tensor) and a.requires_grad for a in given)
    if any(x.is_floating_point() and x.requires_grad != trains for x in results[0]):
        return "not all of its results have gradients"
    return ""


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, _PLAIN)


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())
    return a is b or a == b
