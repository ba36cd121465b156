# SPDX-License-Identifier: Apache-2.0
"""An op as one rank sees it, and how it is called.

What `local_ops.py`, `special_ops.py` and `reduced_ops.py` speak of, and where a rank's shard lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from autoplan.executor.meshes import Ranks
from autoplan.graph import Op, Ref, TensorMeta
from autoplan.placements import Layout, Shard, ShardingSpec


@dataclass(frozen=True)
class LocalOp:
    """An op, and the sizes and layouts it runs at on this rank.

    Attributes:
        op: The op.
        inputs, outputs: Its strategy's layouts.
        global_inputs, global_outputs: Metas of the whole batch on one device.
        local_inputs, local_outputs: Metas of this rank's shards of one microbatch.
        index: Its number in the graph: the name of its random stream.
        over_time: An output differs from microbatch to microbatch.
    """

    op: Op
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    global_inputs: tuple[TensorMeta, ...]
    global_outputs: tuple[TensorMeta | None, ...]
    local_inputs: tuple[TensorMeta, ...]
    local_outputs: tuple[TensorMeta | None, ...]
    index: int
    over_time: bool

    @property
    def refs(self) -> tuple[Ref, ...]:
        """All tensor inputs, in order."""
        return tuple(Ref(i) for i in range(len(self.op.inputs)))

    def integer(self, name: str) -> int:
        """An argument that is a whole number."""
        value = self.op.arguments[name]
        assert isinstance(value, int), f"{self.op.name}: {name}={value!r} is a whole number"
        return value

    def number(self, name: str) -> float:
        """An argument that is a number."""
        value = self.op.arguments[name]
        assert isinstance(value, int | float), f"{self.op.name}: {name}={value!r} is a number"
        return float(value)


@dataclass(frozen=True, slots=True)
class Call:
    """How to run an op.

    Attributes:
        function: A function, or a module.
        args, kwargs: Its arguments; a `Ref` stands for a tensor input.
        needs_moment: The first argument is the `Moment`: microbatch number and random seed.
    """

    function: Callable[..., object] | nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    needs_moment: bool = False


def first_index(spec: ShardingSpec, dim: int, size: int, ranks: Ranks) -> int:
    """Index of this rank's first element along a dim of global `size` that is split plainly."""
    start, held = 0, size
    for placement, parts, at in zip(spec, ranks.axis_sizes, ranks.coordinates):
        if isinstance(placement, Shard) and placement.dim == dim:
            held //= parts
            start += at * held
    return start


def shard_number(spec: ShardingSpec, ranks: Ranks) -> int:
    """Which of the different parts this rank holds; equal on ranks that hold the same part."""
    number = 0
    for placement, size, at in zip(spec, ranks.axis_sizes, ranks.coordinates):
        if isinstance(placement, Shard):
            number = number * size + at
    return number
