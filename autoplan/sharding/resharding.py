# SPDX-License-Identifier: Apache-2.0
"""From one sharding spec to another: the one shortest path that cost model and executor share.

A move changes the placement on one axis. Where several axes split one dim, only the innermost of
them may be gathered or added, because its parts are contiguous in what the outer ones left.
`transition` finds the cheapest sequence of moves by volume; bytes are in fractions of the global
tensor, so a path depends on specs and axis sizes alone and is cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import networkx as nx  # type: ignore[import-untyped]  # has no stubs

from autoplan.placements import Partial, Placement, R, Replicate, Shard, ShardingSpec

# an outer axis is the slower link (inside a host against between hosts); decides ties between paths
# only
OUTER_AXIS_WEIGHT = 8.0
MOVE_WEIGHT = 1e-4  # of a whole tensor's volume: fewer moves win when volumes are equal


@dataclass(frozen=True, slots=True)
class Move:
    """One collective (or local step) on one axis.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or local: "slice", "keep"
            (rank 0 keeps the value, the others hold zero), "pad" (the part in its place, zero
            around it).
        axis: The mesh axis.
        source, target: The placement on that axis before and after.
        fraction: Bytes of the larger of the local tensors before and after, as a fraction of the
            global tensor; what `collective_time` takes as its size.
    """

    kind: str
    axis: int
    source: Placement
    target: Placement
    fraction: float

    @property
    def is_local(self) -> bool:
        """No bytes move between ranks."""
        return self.kind in ("slice", "keep", "pad")

    def __str__(self) -> str:
        return f"{self.kind} {self.source}->{self.target} on axis {self.axis}"


@cache
def transition(
    source: ShardingSpec, target: ShardingSpec, axis_sizes: tuple[int, ...]
) -> tuple[Move, ...]:
    """The moves from `source` to `target`, in order; none when they are equal.

    Source of the idea: shortest paths over primitive moves, as in Megatron-LM's and nnScaler's
    adapters; the nesting rule is DESIGN 2's "nesting order is part of the layout".
    """
    different = [axis for axis in range(len(source)) if source[axis] != target[axis]]
    if len(different) <= 1:
        direct = [m for m, after in _moves(source, source, target, axis_sizes) if after == target]
        if direct or not different:
            return tuple(direct)
    graph = nx.DiGraph()
    states = _states(source, target)
    for state in states:
        for move, after in _moves(state, source, target, axis_sizes):
            graph.add_edge(state, after, move=move, weight=_weight(move, axis_sizes))
    path = nx.dijkstra_path(graph, source, target)
    return tuple(graph.edges[edge]["move"] for edge in pairwise(path))


def _states(source: ShardingSpec, target: ShardingSpec) -> list[ShardingSpec]:
    """Specs that may lie on a path: each axis at its source, at its target, or whole."""
    states: list[tuple[Placement, ...]] = [()]
    for s, t in zip(source, target):
        options = [s] if s == t and not isinstance(s, Shard) else list(dict.fromkeys((s, R, t)))
        states = [(*head, option) for head in states for option in options]
    return [ShardingSpec(state) for state in states]


def _moves(
    state: ShardingSpec, source: ShardingSpec, target: ShardingSpec, sizes: tuple[int, ...]
) -> list[tuple[Move, ShardingSpec]]:
    found = []
    for axis, here in enumerate(state):
        for there in dict.fromkeys((target[axis], R)):
            kind = _kind(here, there)
            if kind is None:
                continue
            if isinstance(here, Shard) and axis != max(state.axes_of(here.dim)):
                continue  # not the innermost: its parts are not contiguous
            after = state.replace(axis, there)
            if isinstance(there, Shard) and axis != max(after.axes_of(there.dim)):
                continue
            fraction = max(_fraction(state, sizes), _fraction(after, sizes))
            found.append((Move(kind, axis, here, there, fraction), after))
    return found


def _kind(here: Placement, there: Placement) -> str | None:
    if here == there:
        return None
    if isinstance(here, Partial):
        return "all_reduce" if isinstance(there, Replicate) else "reduce_scatter"
    if isinstance(here, Shard):
        if isinstance(there, Shard):
            return (
                "all_to_all" if here.dim != there.dim else None
            )  # other blocks of one dim go through the whole tensor
        return "all_gather" if isinstance(there, Replicate) else "pad"
    return "slice" if isinstance(there, Shard) else "keep"


def _fraction(spec: ShardingSpec, sizes: tuple[int, ...]) -> float:
    return 1.0 / spec.num_shards(sizes)


def _weight(move: Move, sizes: tuple[int, ...]) -> float:
    size = sizes[move.axis]
    volume = (
        0.0
        if move.is_local
        else (2.0 if move.kind == "all_reduce" else 1.0) * (size - 1) / size * move.fraction
    )
    return volume * OUTER_AXIS_WEIGHT ** (len(sizes) - 1 - move.axis) + MOVE_WEIGHT
