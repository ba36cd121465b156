# SPDX-License-Identifier: Apache-2.0
"""The local form of an op: what a rank runs on its shards so that all together compute the op.

Most ops run as they are on local tensors; sizes among their arguments become local sizes here, in
one place. The few that need more are in `special_ops.py` and `reduced_ops.py`. Legality is
`sharding/`'s; nothing here chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from autoplan.executor.local_op import Call, LocalOp
from autoplan.executor.meshes import Ranks
from autoplan.executor.reduced_ops import REDUCED_OPS
from autoplan.executor.special_ops import SPECIAL_OPS, Drawn
from autoplan.graph import Op, Ref, TensorMeta

Tensor = torch.Tensor


def local_call(local: LocalOp, ranks: Ranks) -> Call:
    """The call that one rank makes for an op."""
    op = local.op
    own_form = _OWN_FORMS.get(op.target)
    if own_form is not None:
        return own_form(local, ranks)
    overload = _overload(op.target)
    given = dict(op.arguments)
    _localize(op, given, local)
    if any("device" == a.name for a in overload._schema.arguments) and not local.op.inputs:
        given["device"] = str(ranks.device)
    args, kwargs = _by_schema(overload, given)
    if op.target in _BY_MEMORY:
        return Call(_Contiguous(overload), args, kwargs)
    if op.draws:
        drawn = Drawn(overload, local.index, local.over_time, ranks.device)
        return Call(drawn, args, kwargs, needs_moment=True)
    is_mean_loss = op.target in _MEAN_LOSSES and op.arguments.get("reduction", 1) == 1
    if is_mean_loss or op.target.startswith("aten.mean."):
        share = _share(local)
        if share != 1.0:
            return Call(_ScaledMean(overload, share), args, kwargs)
    return Call(overload, args, kwargs)


class _Contiguous(nn.Module):
    """An op that reads memory by strides, on tensors that lie in memory as captured; a converted
    layout may lie otherwise.
    """

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        super().__init__()
        self.overload = overload

    def forward(self, *args: object, **kwargs: object) -> object:
        given = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
        return self.overload(*given, **kwargs)


_BY_MEMORY = frozenset(
    f"aten.{name}.default"
    for name in ("view_as_complex", "as_strided", "as_strided_copy", "as_strided_scatter")
)
_OWN_FORMS = {**SPECIAL_OPS, **REDUCED_OPS}
_MEAN_LOSSES = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    )
)


def _overload(target: str) -> torch._ops.OpOverload:
    namespace, name, overload = target.split(".")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def _by_schema(
    overload: torch._ops.OpOverload, given: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional up to the last argument that differs from its default; dtypes as torch's own."""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    for argument in positional:
        args.append(_value(argument.name, given.get(argument.name, argument.default_value)))
    while (
        args
        and positional[len(args) - 1].has_default_value()
        and args[-1] == positional[len(args) - 1].default_value
        and not isinstance(args[-1], Ref)
    ):
        args.pop()
    for argument in overload._schema.arguments:
        if (
            argument.kwarg_only
            and argument.name in given
            and given[argument.name] != argument.default_value
        ):
            kwargs[argument.name] = _value(argument.name, given[argument.name])
    return tuple(args), kwargs


def _value(name: str, value: object) -> object:
    if name == "dtype" and isinstance(value, str):
        return getattr(torch, value)
    return list(value) if isinstance(value, tuple) else value


def _share(local: LocalOp) -> float:
    """The part of the reduced elements that this rank and microbatch hold."""
    before, after = local.global_inputs[0].numel, _out(local.global_outputs).numel
    here, left = local.local_inputs[0].numel, _out(local.local_outputs).numel
    return (here / left) / (before / after)


def _out(metas: tuple[TensorMeta | None, ...]) -> TensorMeta:
    return next(m for m in metas if m is not None)


class _ScaledMean(nn.Module):
    """A mean over split elements is a sum of local means, each weighted by its share."""

    def __init__(self, overload: torch._ops.OpOverload, share: float) -> None:
        super().__init__()
        self.overload, self.share = overload, share

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        mean: Tensor = self.overload(*args, **kwargs)
        return mean * self.share


_SIZED = frozenset(("expand", "zeros", "ones", "full", "empty"))


def _localize(op: Op, given: dict[str, object], local: LocalOp) -> None:
    """Sizes and positions among the arguments, as this rank has them."""
    family = op.target.split(".")[1]
    if family == "reshape":
        given["shape"] = _out(local.local_outputs).shape
    elif family in _SIZED:
        given["size"] = _out(local.local_outputs).shape
    elif family in ("slice", "slice_scatter"):
        _localize_slice(given, local)
    elif family in ("split", "chunk", "split_with_sizes"):
        _localize_split(given, local)
    elif family == "repeat_interleave":
        given["output_size"] = None  # a hint that saves a synchronisation, at global size
    elif family.startswith("conv") and given.get("groups", 1) != 1:
        given["groups"] = _local_count("groups", local)
    elif family == "group_norm":
        given["num_groups"] = _local_count("num_groups", local)
    elif family == "native_group_norm":
        shape = local.local_inputs[0].shape
        given["group"] = _local_count("group", local)
        given["N"], given["C"], given["HxW"] = shape[0], shape[1], math.prod(shape[2:])


def _local_count(name: str, local: LocalOp) -> int:
    """This rank's part of a number of channel groups; channels are dim 1."""
    return local.integer(name) * local.local_inputs[0].shape[1] // local.global_inputs[0].shape[1]


def _dim(given: Mapping[str, object], local: LocalOp) -> int:
    dim = given.get("dim") or 0
    assert isinstance(dim, int), "a dim is a number"
    return dim % len(local.local_inputs[0].shape)


def _localize_slice(given: dict[str, object], local: LocalOp) -> None:
    dim = _dim(given, local)
    whole, here = local.global_inputs[0].shape[dim], local.local_inputs[0].shape[dim]
    if whole == here:
        return
    start = given.get("start") or 0
    assert isinstance(start, int), "slices start at a number"
    part = _out(local.local_outputs).shape[dim]
    first = (start + whole if start < 0 else min(start, whole)) * here // whole
    given["start"], given["end"] = first, first + part


def _localize_split(given: dict[str, object], local: LocalOp) -> None:
    dim = _dim(given, local)
    whole, here = local.global_inputs[0].shape[dim], local.local_inputs[0].shape[dim]
    if whole == here:
        return
    if "split_size" in given and isinstance(given["split_size"], int):
        given["split_size"] = given["split_size"] * here // whole
    elif "split_sizes" in given:
        sizes = given["split_sizes"]
        assert isinstance(sizes, tuple), "split sizes are a tuple"
        given["split_sizes"] = tuple(int(s) * here // whole for s in sizes)
