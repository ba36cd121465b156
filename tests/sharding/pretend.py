# SPDX-License-Identifier: Apache-2.0
"""Pretend ranks: what each rank of a mesh holds of a tensor, and moves between them, by definition.

Nothing here shares code with the package: which elements a rank holds is worked out element by
element from the meaning of a spec, for numpy arrays and torch tensors alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from autoplan.placements import Partial, Replicate, Shard, ShardingSpec
from autoplan.sharding.resharding import Move

Place = tuple[int, ...]  # a rank's coordinates on the mesh axes, outermost first
Array = npt.NDArray[Any]
Sizes = tuple[int, ...]


def places_of(sizes: Sizes) -> list[Place]:
    """The coordinates of every rank, in row-major order."""
    return list(itertools.product(*(range(size) for size in sizes)))


def part_of(value: Any, spec: ShardingSpec, sizes: Sizes, place: Place) -> Any:
    """What a rank holds of a value (array or tensor) by the splits of a spec, in order of axes."""
    for dim in range(len(value.shape)):
        held = np.arange(value.shape[dim])
        for placement, size, at in zip(spec, sizes, place):
            if isinstance(placement, Shard) and placement.dim == dim:
                assert len(held) % (size * placement.blocks) == 0, f"{spec} on {sizes}, dim {dim}"
                held = held.reshape(placement.blocks, size, -1)[:, at].reshape(-1)
        if len(held) < value.shape[dim]:
            value = value[(slice(None),) * dim + (held,)]
    return value


def parts_of(
    value: Any, spec: ShardingSpec, sizes: Sizes, draw: Callable[[Any], Any]
) -> dict[Place, Any]:
    """What every rank holds. Of a sum not yet taken, each gets a random summand.

    Args:
        value: The whole value.
        spec: How it is laid out.
        sizes: The mesh.
        draw: Gives a random summand of the shape of the value it gets.
    """
    summed = [a for a, placement in enumerate(spec) if isinstance(placement, Partial)]
    if not summed:
        return {place: part_of(value, spec, sizes, place) for place in places_of(sizes)}
    counts = [range(sizes[a]) for a in summed]
    summands = {key: draw(value) for key in itertools.product(*counts)}
    last = max(summands)
    summands[last] = value - sum(s for key, s in summands.items() if key != last)
    return {
        place: part_of(summands[tuple(place[a] for a in summed)], spec, sizes, place)
        for place in places_of(sizes)
    }


def wrong_part(
    parts: Mapping[Place, Any],
    value: Any,
    spec: ShardingSpec,
    sizes: Sizes,
    equal: Callable[[Any, Any], bool],
) -> str:
    """The first rank whose part is not its part of the value, "" when all are right.

    Where the spec says Partial, the parts of the ranks along those axes are summed first.
    """
    summed = [a for a, placement in enumerate(spec) if isinstance(placement, Partial)]
    totals: dict[Place, Any] = {}
    for place, part in parts.items():
        key = tuple(0 if a in summed else at for a, at in enumerate(place))
        if key in totals and totals[key].shape != part.shape:
            return f"rank {place} of mesh {sizes} holds a summand of another shape"
        totals[key] = part if key not in totals else totals[key] + part
    for place in parts:
        wanted = part_of(value, spec, sizes, place)
        found = totals[tuple(0 if a in summed else at for a, at in enumerate(place))]
        if tuple(found.shape) != tuple(wanted.shape) or not equal(found, wanted):
            return f"rank {place} of mesh {sizes} does not hold its {spec} part"
    return ""


# -- moves, each as `executor/collectives.py` does it ----------------------------------------------


def run_moves(parts: Mapping[Place, Array], moves: tuple[Move, ...], sizes: Sizes) -> Any:
    """Every rank's part after the moves."""
    parts = dict(parts)
    for move in moves:
        groups: dict[Place, list[Place]] = {}
        for place in parts:
            key = (*place[: move.axis], 0, *place[move.axis + 1 :])
            groups.setdefault(key, []).append(place)
        for members in groups.values():
            after = _MOVES[move.kind]([parts[m] for m in members], move)
            parts.update(zip(members, after))
    return parts


def _split(placement: object) -> Shard:
    assert isinstance(placement, Shard), f"{placement} is a split"
    return placement


def _open(x: Array, shard: Shard) -> tuple[Array, int]:
    """The split dim seen as (blocks, rest), and where the rest is."""
    shape = (*x.shape[: shard.dim], shard.blocks, -1, *x.shape[shard.dim + 1 :])
    return x.reshape(shape), shard.dim + 1


def _close(x: Array, shard: Shard) -> Array:
    return x.reshape(*x.shape[: shard.dim], -1, *x.shape[shard.dim + 2 :])


def _all_reduce(xs: list[Array], move: Move) -> list[Array]:
    return [np.sum(xs, axis=0)] * len(xs)


def _all_gather(xs: list[Array], move: Move) -> list[Array]:
    shard = _split(move.source)
    opened = [_open(x, shard) for x in xs]
    whole = np.concatenate([x for x, _ in opened], axis=opened[0][1])
    return [_close(whole, shard)] * len(xs)


def _cut(x: Array, shard: Shard, size: int) -> list[Array]:
    opened, dim = _open(x, shard)
    return [_close(piece, shard) for piece in np.split(opened, size, axis=dim)]


def _reduce_scatter(xs: list[Array], move: Move) -> list[Array]:
    return _cut(np.sum(xs, axis=0), _split(move.target), len(xs))


def _all_to_all(xs: list[Array], move: Move) -> list[Array]:
    sent = [_cut(x, _split(move.target), len(xs)) for x in xs]
    received = [[pieces[i] for pieces in sent] for i in range(len(xs))]
    return [_all_gather(pieces, move)[0] for pieces in received]


def _slice(xs: list[Array], move: Move) -> list[Array]:
    return [_cut(x, _split(move.target), len(xs))[i] for i, x in enumerate(xs)]


def _pad(xs: list[Array], move: Move) -> list[Array]:
    found = []
    for i, x in enumerate(xs):
        pieces = [x if i == j else np.zeros_like(x) for j in range(len(xs))]
        found.append(_all_gather(pieces, move)[0])
    return found


def _keep(xs: list[Array], move: Move) -> list[Array]:
    assert isinstance(move.source, Replicate), "only a whole value is kept on one rank"
    return [x if i == 0 else np.zeros_like(x) for i, x in enumerate(xs)]


_MOVES: dict[str, Callable[[list[Array], Move], list[Array]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "pad": _pad,
    "keep": _keep,
}
