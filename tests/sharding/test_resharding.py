# SPDX-License-Identifier: Apache-2.0
"""Transitions on pretend ranks: every pair of specs, each rank ends with exactly its part."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from pretend import Sizes, parts_of, run_moves, wrong_part

from autoplan.placements import P, Partial, Placement, R, Replicate, Shard, ShardingSpec
from autoplan.sharding.resharding import OUTER_AXIS_WEIGHT, Move, transition

PLACEMENTS: tuple[Placement, ...] = (R, P, Shard(0), Shard(1), Shard(0, 2))
MESHES: tuple[Sizes, ...] = ((2,), (2, 2), (2, 3), (4, 2))
SHAPE = (48, 24)  # divides by every spec on every mesh
VALUE = np.arange(48 * 24, dtype=np.int64).reshape(SHAPE)


def specs(num_axes: int) -> list[ShardingSpec]:
    return [ShardingSpec(p) for p in itertools.product(PLACEMENTS, repeat=num_axes)]


CASES = [(sizes, source) for sizes in MESHES for source in specs(len(sizes))]
by_case = pytest.mark.parametrize(("sizes", "source"), CASES, ids=lambda x: str(x))


@by_case
def test_every_rank_ends_with_its_part(sizes: Sizes, source: ShardingSpec) -> None:
    rng = np.random.default_rng(20)
    for target in specs(len(sizes)):
        parts = parts_of(VALUE, source, sizes, lambda x: rng.integers(-99, 99, x.shape))
        moves = transition(source, target, sizes)
        after = run_moves(parts, moves, sizes)
        wrong = wrong_part(after, VALUE, target, sizes, np.array_equal)
        assert not wrong, f"{source} to {target}: {wrong} after {', '.join(map(str, moves))}"


@by_case
def test_moves_follow_each_other_and_know_their_sizes(sizes: Sizes, source: ShardingSpec) -> None:
    for target in specs(len(sizes)):
        here = source
        for move in transition(source, target, sizes):
            assert here[move.axis] == move.source, f"{source} to {target}: {move}"
            before = np.prod(here.local_shape(SHAPE, sizes))
            here = here.replace(move.axis, move.target)
            after = np.prod(here.local_shape(SHAPE, sizes))
            assert move.fraction * VALUE.size == pytest.approx(max(before, after))
        assert here == target


@by_case
def test_empty_only_when_equal(sizes: Sizes, source: ShardingSpec) -> None:
    for target in specs(len(sizes)):
        assert (transition(source, target, sizes) == ()) == (source == target)


# -- the shortest path, found again ----------------------------------------------------------------


def kind_of(here: Placement, there: Placement) -> str:
    """The single move between two placements of one axis, "" where there is none (DESIGN 2)."""
    if here == there:
        return ""
    if isinstance(here, Partial):
        return "all_reduce" if isinstance(there, Replicate) else "reduce_scatter"
    if isinstance(here, Replicate):
        return "slice" if isinstance(there, Shard) else "keep"
    if isinstance(there, Shard):
        return "all_to_all" if here.dim != there.dim else ""
    return "all_gather" if isinstance(there, Replicate) else "pad"


def volume_of(kind: str, axis: int, fraction: float, sizes: Sizes) -> float:
    """Bytes per rank that a move sends, in tensors, an outer axis counting for its slower link."""
    if kind in ("slice", "keep", "pad"):
        return 0.0
    size, passes = sizes[axis], 2 if kind == "all_reduce" else 1
    return passes * (size - 1) / size * fraction * OUTER_AXIS_WEIGHT ** (len(sizes) - 1 - axis)


def is_innermost(spec: ShardingSpec, axis: int) -> bool:
    """No later axis splits the same dim; only then are the axis's own parts contiguous."""
    here = spec[axis]
    inner = [p for p in spec.placements[axis + 1 :] if isinstance(p, Shard)]
    return not isinstance(here, Shard) or all(p.dim != here.dim for p in inner)


def single_moves(
    spec: ShardingSpec, sizes: Sizes, allowed: tuple[tuple[Placement, ...], ...]
) -> Iterator[tuple[ShardingSpec, float, int]]:
    """(spec after, volume, 1 if bytes move between ranks) of every legal single move."""
    for axis, there in ((a, p) for a in range(len(sizes)) for p in allowed[a]):
        after = spec.replace(axis, there)
        kind = kind_of(spec[axis], there)
        if kind and is_innermost(spec, axis) and is_innermost(after, axis):
            local = max(np.prod(s.local_shape(SHAPE, sizes)) for s in (spec, after))
            volume = volume_of(kind, axis, local / VALUE.size, sizes)
            yield after, volume, int(kind not in ("slice", "keep", "pad"))


def search(
    source: ShardingSpec,
    sizes: Sizes,
    allowed: tuple[tuple[Placement, ...], ...],
    *,
    by_count: bool,
) -> dict[ShardingSpec, tuple[float, float]]:
    """Spec -> the least (count, volume), or (volume, count), of any sequence of single moves."""
    best = {source: (0.0, 0.0)}
    queue = [(best[source], 0, source)]
    numbers = itertools.count(1)  # specs do not compare, so ties are broken by number
    while queue:
        cost, _, spec = heapq.heappop(queue)
        if cost > best[spec]:
            continue
        for after, volume, count in single_moves(spec, sizes, allowed):
            step = (count, volume) if by_count else (volume, count)
            reached = (round(cost[0] + step[0], 9), round(cost[1] + step[1], 9))
            if reached < best.get(after, (np.inf, np.inf)):
                best[after] = reached
                heapq.heappush(queue, (reached, next(numbers), after))
    return best


@cache
def fewest_moves(source: ShardingSpec, sizes: Sizes) -> dict[ShardingSpec, tuple[float, float]]:
    return search(source, sizes, (PLACEMENTS,) * len(sizes), by_count=True)


def volume_and_count(moves: tuple[Move, ...], sizes: Sizes) -> tuple[float, int]:
    volume = sum(volume_of(m.kind, m.axis, m.fraction, sizes) for m in moves)
    return volume, sum(not m.is_local for m in moves)


@by_case
def test_no_path_over_all_specs_has_fewer_collectives(sizes: Sizes, source: ShardingSpec) -> None:
    """One with more must send less than every path that has the fewest."""
    for target in specs(len(sizes)):
        volume, count = volume_and_count(transition(source, target, sizes), sizes)
        fewest, their_volume = fewest_moves(source, sizes)[target]
        assert count == fewest or volume < their_volume - 1e-6, f"{source} to {target}"


@by_case
def test_no_path_through_whole_axes_sends_less(sizes: Sizes, source: ShardingSpec) -> None:
    """Among those that change every axis to what it will be, or first to whole."""
    for target in specs(len(sizes)):
        allowed = tuple((placement, R) for placement in target)
        least, _ = search(source, sizes, allowed, by_count=False)[target]
        volume, _ = volume_and_count(transition(source, target, sizes), sizes)
        assert volume == pytest.approx(least, abs=1e-6), f"{source} to {target}"
