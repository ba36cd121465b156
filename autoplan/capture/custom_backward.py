# SPDX-License-Identifier: Apache-2.0
"""Backward passes written by hand, which a forward-only graph does not have.

`torch.export` traces the forward of a `torch.autograd.Function`; a plan's backward is the
derivative of that forward. `watched` notes the calls while a model is traced, `check_calls`
compares both backwards of each on small random inputs, and a function whose own backward is another
one (a straight-through estimator, a clipped derivative) is kept whole (`hand_written.py`) in a
second trace, or refused: the plan would train another model.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function  # checked on 2.13

from autoplan.capture.hand_written import keep_call, name_of, run_forward, why_not_whole
from autoplan.errors import CaptureError

LARGEST = 6  # sizes above it are made smaller in the comparison, equal ones equally
TOLERANCE = 1e-5  # forwards may cast to float32
_SCALES = (1.0, 0.1, 1e-6, 1e2)  # ordinary numbers, and the ends where derivatives are clipped


@dataclass
class Calls:
    """What a model does to its backward.

    Attributes:
        found: Hand-written functions, one call of each class: class -> (arguments, where).
        hooks: Where tensors get a hook.
    """

    found: dict[type[Function], tuple[tuple[object, ...], str]] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Meta:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@contextmanager
def watched(whole: frozenset[type[Function]] = frozenset()) -> Iterator[Calls]:
    """Notes the hand-written functions that are applied inside, torch's own left out, and the
    hooks that tensors get.

    Args:
        whole: Functions that become one op each.
    """
    calls, original, hook = Calls(), vars(Function)["apply"], torch.Tensor.register_hook

    def noted(cls: type[Function], /, *args: object, **kwargs: object) -> Any:
        if cls in whole:
            return keep_call(cls, args)
        if not cls.__module__.startswith("torch.") and cls not in calls.found:
            metas = tuple(_meta(a) if isinstance(a, torch.Tensor) else a for a in args)
            if any(isinstance(m, _Meta) and m.requires_grad for m in metas):
                calls.found[cls] = (metas, _where())
        return original.__func__(cls, *args, **kwargs)

    def hooked(x: torch.Tensor, function: object) -> Any:
        calls.hooks.append(_where())
        return hook(x, function)  # type: ignore[no-untyped-call]

    setattr(Function, "apply", classmethod(noted))  # noqa: B010 # mypy knows it as a method
    setattr(torch.Tensor, "register_hook", hooked)  # noqa: B010
    try:
        yield calls
    finally:
        setattr(Function, "apply", original)  # noqa: B010
        setattr(torch.Tensor, "register_hook", hook)  # noqa: B010


def check_calls(calls: Calls, model: nn.Module) -> frozenset[type[Function]]:
    """The functions whose backward is not the derivative of their forward, to be kept whole.

    Raises:
        CaptureError: There are hooks on gradients, or a function cannot be kept whole; names the
            function or the module, and where it is called.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            calls.hooks.append(f"module {name!r}" if name else "the model")
    calls.hooks += [f"parameter {n!r}" for n, p in model.named_parameters() if p._backward_hooks]
    if calls.hooks:
        raise CaptureError(
            f"the model cannot be captured at {calls.hooks[0]}: it has a backward hook, and a plan "
            "keeps the forward alone. Remove the hook, or use mode='infer'."
        )
    whole: set[type[Function]] = set()
    for function, (args, where) in calls.found.items():
        told = [_agrees(function, args, scale, sign) for scale in _SCALES for sign in (-1, 1)]
        if False not in told and True in told:
            continue
        try:
            hindrance = why_not_whole(function, _made(args, 1.0, 1))
        except Exception as error:  # whatever it raises on inputs that it was not made for
            hindrance = f"it cannot be tried on small random inputs ({type(error).__name__})"
        if name_of(function) in map(name_of, whole):
            hindrance = "another class of that name is to be kept whole, too"
        if hindrance:
            raise CaptureError(
                f"the model cannot be captured at {where}: {function.__name__} is a "
                "torch.autograd.Function whose backward is not the derivative of its forward, as "
                f"far as small random inputs tell, and cannot be kept whole: {hindrance}. Write it "
                "with torch ops and detach(), as in x + (f(x) - x).detach(), or use mode='infer'."
            )
        whole.add(function)
    return frozenset(whole)


def _meta(x: torch.Tensor) -> _Meta:
    return _Meta(tuple(x.shape), x.dtype, x.requires_grad and torch.is_grad_enabled())


def _where() -> str:
    own = [f for f in traceback.extract_stack() if not any(p in f.filename for p in _NOT_THEIRS)]
    last = own[-1] if own else traceback.extract_stack()[-1]
    return f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno} in {last.name}"


_NOT_THEIRS = ("/torch/", "/autoplan/")


def _agrees(
    function: type[Function], args: tuple[object, ...], scale: float, sign: int
) -> bool | None:
    """Both backwards give the same gradients for one set of random inputs; None where neither
    gives finite ones, or any.
    """
    given = _made(args, scale, sign)
    wanted = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    try:
        own = _gradients(lambda: function.apply(*given), wanted)  # type: ignore[no-untyped-call]
        derived = _gradients(lambda: run_forward(function, given), wanted)
    except Exception:  # whatever the function raises on inputs that it was not made for
        return False
    left, right = _joined(own), _joined(derived)
    if not any(bool(torch.isfinite(g).all() and g.any()) for g in (left, right)):
        return None
    return torch.allclose(left, right, rtol=TOLERANCE, atol=0.0)


def _made(args: tuple[object, ...], scale: float, sign: int) -> list[object]:
    """Small random tensors in place of the noted ones; equal sizes stay equal."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[int, int] = {}

    def made(meta: object) -> object:
        if not isinstance(meta, _Meta):
            return meta
        shape = [
            s if s <= LARGEST else sizes.setdefault(s, LARGEST + 1 + len(sizes)) for s in meta.shape
        ]
        if not meta.dtype.is_floating_point:
            return torch.ones(shape, dtype=meta.dtype)  # a mask that hides nothing
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return (x if sign < 0 else x.abs()).requires_grad_(meta.requires_grad)

    return [made(a) for a in args]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([p.flatten() for p in parts])


def _gradients(call: Callable[[], Any], wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.enable_grad():
        made = call()
        outputs = [
            x
            for x in (made if isinstance(made, tuple) else (made,))
            if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        weights = [torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x) for x in outputs]
        found = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found)]
