# SPDX-License-Identifier: Apache-2.0
"""How a tensor is laid out over a mesh: placements on one axis, specs on all, and the (value,
gradient) pair.

`axis` is of the mesh, `dim` is of a tensor. Names and text are DTensor's: `R`, `S(0)`, `P`; a spec
is one placement per mesh axis, outermost first: `S(0)R`. Where several axes split one dim, the
outer axis splits first (nesting order is part of the layout). What moves a tensor from one layout
to another lives in `sharding/resharding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """The whole tensor on every rank of the axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Rank i of the axis holds the i-th of equal parts of every one of `blocks` equal contiguous
    blocks along `dim`.

    One block is the plain split. More appear where a dim is a product of factors and one to the
    right is split: the packed query-key-value output of one linear (3 blocks), or a sequence
    flattened behind its batch. Text: `S(1)`, `S(1/3)`.
    """

    dim: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim}/{self.blocks})"


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """The true value is the sum over the ranks of the axis."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial
R, P = Replicate(), Partial()
_PLAIN: dict[str, Placement] = {"R": R, "P": P}


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """One placement per mesh axis, outermost first."""

    placements: tuple[Placement, ...]
    _hash: int = field(init=False, repr=False, compare=False)
    """Worked out once: tables of layouts look up little else."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.placements))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return "".join(map(str, self.placements))

    def __len__(self) -> int:
        return len(self.placements)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.placements)

    def __getitem__(self, axis: int) -> Placement:
        return self.placements[axis]

    @staticmethod
    def replicated(num_axes: int) -> ShardingSpec:
        """The spec that holds everything everywhere."""
        return ShardingSpec((R,) * num_axes)

    def replace(self, axis: int, placement: Placement) -> ShardingSpec:
        """This spec with another placement on one axis."""
        return ShardingSpec((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The axes that split `dim`, outermost first."""
        return tuple(
            a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim
        )

    def local_shape(self, shape: tuple[int, ...], axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape one rank holds of a tensor of global `shape`.

        Raises:
            ValueError: A split does not divide its dim; only even splits exist.
        """
        local = list(shape)
        for placement, size in zip(self.placements, axis_sizes):
            if isinstance(placement, Shard):
                if local[placement.dim] % (size * placement.blocks):
                    raise ValueError(
                        f"dim {placement.dim} of {shape} does not divide as {self} "
                        f"on axes {axis_sizes}"
                    )
                local[placement.dim] //= size
        return tuple(local)

    def num_shards(self, axis_sizes: tuple[int, ...]) -> int:
        """How many different parts the tensor is cut into."""
        count = 1
        for placement, size in zip(self.placements, axis_sizes):
            count *= size if isinstance(placement, Shard) else 1
        return count


@cache
def parse_spec(text: str) -> ShardingSpec:
    """The spec written as `S(0)R`, `RS(1)P`.

    Raises:
        ValueError: The text is not a spec.
    """
    parts = re.findall(r"R|P|S\(\d+(?:/\d+)?\)", text)
    if "".join(parts) != text:
        raise ValueError(
            f"{text!r} is not a sharding spec; "
            f"write one of R, P, S(dim) per mesh axis, as in 'S(0)R'"
        )
    return ShardingSpec(tuple(_PLAIN.get(p) or Shard(*map(int, p[2:-1].split("/"))) for p in parts))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is laid out where it is produced or used: its value's spec and its gradient's.

    Per axis one of four pairs (DESIGN 2): R/R, S/S, P/R (a sum not yet taken) and R/P (used whole,
    its gradient a sum not yet taken). Text: `S(0)R`, and `S(0)R~S(0)P` where the gradient's spec
    differs.
    """

    value: ShardingSpec
    grad: ShardingSpec
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.value, self.grad)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return str(self.value) if self.value == self.grad else f"{self.value}~{self.grad}"


@cache
def parse_layout(text: str) -> Layout:
    """The layout written as `S(0)R` or `S(0)R~S(0)P`.

    Raises:
        ValueError: The text is not a layout.
    """
    value, _, grad = text.partition("~")
    return Layout(parse_spec(value), parse_spec(grad or value))
