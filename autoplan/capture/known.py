# SPDX-License-Identifier: Apache-2.0
"""Branches on tensors that a trace can decide: what no input, parameter or random draw can change.

While a model is traced its tensors have no values, so `if mask.any():` cannot be answered. Often it
can be all the same: the mask was made of ones (its value is known), the number drawn from [0, 1) is
asked to be below 0 (no draw is), or the question is a check that only raises. `KnownValues` follows
such tensors beside the trace and answers; every other question is left to torch.export, which
refuses it.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # checked on 2.13
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # checked on 2.13; torch.export's own containers use it
from torch.utils._python_dispatch import _disable_current_modes  # checked on 2.13
from torch.utils.weak import WeakTensorKeyDictionary

# elements up to which a value is worked out beside the trace
MAX_ELEMENTS = 1 << 20
_QUESTIONS = frozenset(("__bool__", "item", "__int__", "__float__", "__index__", "tolist"))
_FACTORIES = frozenset(("zeros", "ones", "full", "arange", "eye", "linspace", "tensor"))
_FILLS = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_DRAWS = frozenset(("rand", "rand_like"))  # numbers from [0, 1)
_BELOW = frozenset(("lt", "less", "__lt__", "le", "__le__", "less_equal"))
_ABOVE = frozenset(("gt", "greater", "__gt__", "ge", "__ge__", "greater_equal"))
_WRITES = frozenset(("__setitem__", "copy_", "fill_"))


class RandomBranchError(Exception):
    """A question to a random number whose answer differs from draw to draw."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """A random number of which only the range is known, from 0 to below 1; or what it was compared
    with.
    """


class KnownValues(TorchFunctionMode):
    """Answers questions to tensors whose values follow from shapes and constants alone.

    Args:
        device: Where the model's tensors are. If that is meta, factories called without a device
            make theirs there too: on a real device they would meet.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device
        self.known: Any = WeakTensorKeyDictionary()
        self.stale: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a call of the traced model, or answers it."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS and args and isinstance(args[0], Tensor):
            value = self.value_of(args[0])
            if isinstance(self.known.get(args[0]), _Draw):
                raise RandomBranchError
            if value is not None:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    return func(value)
            if name in ("__bool__", "item") and args[0].dtype == torch.bool:
                passing = passing_answer(sys._getframe(1))
                if passing is not None:
                    return passing
        on_meta = self.device is not None and self.device.type == "meta"
        if on_meta and name in _FACTORIES - {"tensor"} | _DRAWS and not _tensors(args):
            given["device"] = self.device if given.get("device") is None else given["device"]
        if on_meta and name == "type" and isinstance(args[-1], torch.dtype):
            return args[0].to(args[1])  # Tensor.type takes a meta tensor to the CPU
        result = func(*args, **given)
        if name != "__get__":
            self.follow(func, name, args, given, result)
        return result

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The value of a traced tensor, on the CPU; None if it is not known."""
        value = self.known.get(tensor)
        if not isinstance(value, Tensor) or _storage(value) in self.stale:
            return None
        return value

    def follow(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Works out the value of a result beside the trace, where all that it needs is known."""
        results = _tensors(result)
        operands = _tensors((args, kwargs))
        if not results and name not in _WRITES:
            return
        if any(map(is_functorch_wrapped_tensor, (*results, *operands))):
            return  # inside vmap a tensor stands for many
        if any(not _is_small(r) for r in results):
            self.forget(operands)
        elif name in _FILLS:
            self.note(results[0], _full(results[0], _FILLS[name]))
        elif name in _DRAWS:
            self.known[results[0]] = _Draw()
        elif args and isinstance(args[0], Tensor) and isinstance(self.known.get(args[0]), _Draw):
            answer = _compared(name, args[1:])
            if answer is not None:
                self.note(results[0], _full(results[0], answer))
            elif name in _BELOW | _ABOVE:
                self.known[results[0]] = _Draw()
        elif (operands and all(self.value_of(t) is not None for t in operands)) or (
            not operands and name in _FACTORIES
        ):
            self.repeat(func, args, kwargs, result, operands)
        elif operands:
            written = name in _WRITES or "out" in kwargs or _in_place(name)
            self.forget(operands if written else [])

    def repeat(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        operands: list[Tensor],
    ) -> None:
        """The same call on values."""
        real_args, real_kwargs = pytree.tree_map(self.as_value, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = "cpu"
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                values = func(*real_args, **real_kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError):
                self.forget(operands)
                return
        for traced, value in zip(_tensors(result), _tensors(values)):
            if value.device.type == "cpu" and value.shape == traced.shape:
                self.note(traced, value)

    def as_value(self, leaf: Any) -> Any:
        """An argument of a call on values: values for traced tensors, the CPU for every device."""
        if isinstance(leaf, Tensor):
            return self.value_of(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def note(self, traced: Tensor, value: Tensor) -> None:
        """Notes the value of a traced tensor."""
        self.known[traced] = value

    def forget(self, tensors: list[Tensor]) -> None:
        """What these share their memory with may have been written to, unseen."""
        for tensor in tensors:
            value = self.known.get(tensor)
            if isinstance(value, Tensor):
                self.stale.add(_storage(value))


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_small(tensor: Tensor) -> bool:
    """Whether its size is known and at most MAX_ELEMENTS."""
    return all(isinstance(s, int) for s in tensor.shape) and tensor.numel() <= MAX_ELEMENTS


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _full(like: Tensor, number: float) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.full(tuple(like.shape), number, dtype=like.dtype)


def _compared(name: str, others: tuple[Any, ...]) -> bool | None:
    """What comparing a draw from [0, 1) with a number gives whatever is drawn; else None."""
    if len(others) != 1 or not isinstance(others[0], int | float):
        return None
    number = float(others[0])
    if name in _BELOW:
        strict = name in ("lt", "less", "__lt__")
        return False if number < 0 or (number == 0 and strict) else True if number >= 1 else None
    if name in _ABOVE:
        strict = name in ("gt", "greater", "__gt__")
        return (
            False if number >= 1 else True if number < 0 or (number == 0 and not strict) else None
        )
    return None


# -- checks ----------------------------------------------------------------------------------------


def passing_answer(frame: FrameType | None) -> bool | None:
    """The answer with which a check goes on: True inside `assert ...` and `if not ...: raise`,
    False inside `if ...: raise`; None where the question decides what is computed.

    Args:
        frame: Of the question, or of torch's own code that it was asked through.
    """
    while frame is not None and "torch/overrides" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return None
    place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, column = place[0], place[2]
    if line is None or column is None:
        return None
    return _checks(frame.f_code.co_filename).get((line, column))


@cache
def _checks(filename: str) -> dict[tuple[int, int], bool]:
    """(line, column) of every expression in the test of a check -> the answer that passes it."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    found: dict[tuple[int, int], bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            test, passing = node.test, True
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            test, passing = node.test, False
        else:
            continue
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, passing = test.operand, not passing
        if not isinstance(test, ast.BoolOp):
            found[(test.lineno, test.col_offset)] = passing
            found[(node.lineno, node.col_offset)] = passing
    return found
