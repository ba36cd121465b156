# SPDX-License-Identifier: Apache-2.0
"""Reading an op's arguments and metas, as the resolvers of `compute_rules.py` and `view_rules.py`
do.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.graph import Op, Ref, TensorMeta
from autoplan.sharding.factors import Dims, OpRule, plain

Metas = tuple[TensorMeta, ...]
Outs = tuple[TensorMeta | None, ...]
Resolver = Callable[[Op, Metas, Outs], OpRule | None]


def as_int(value: object) -> int:
    """An argument that the op's schema says is an int."""
    assert isinstance(value, int), f"{value!r} is an int in the op's schema"
    return value


def as_ints(value: object) -> tuple[int, ...]:
    """An argument that the schema says is ints; a single one stands for one of them."""
    if isinstance(value, int):
        return (value,)
    assert isinstance(value, list | tuple), f"{value!r} is an int or ints in the op's schema"
    return tuple(as_int(v) for v in value)


def as_dim(value: object, rank: int) -> int:
    """A dim of a tensor of that rank, counted from the front."""
    dim = as_int(value)
    return dim + rank if dim < 0 else dim


def letters_of(prefix: str, rank: int) -> tuple[str, ...]:
    """One letter per dim: prefix0, prefix1, ..."""
    return tuple(f"{prefix}{i}" for i in range(rank))


def frozen(meta: TensorMeta | None) -> Dims:
    """Dims of which none is ever split; none at all for an absent tensor."""
    return plain((None,) * len(meta.shape), meta) if meta else ()


def slot_of(op: Op, name: str) -> int | None:
    """The input slot of a tensor argument, or None when it is absent or a number."""
    given = op.arguments.get(name)
    return given.index if isinstance(given, Ref) else None
