# SPDX-License-Identifier: Apache-2.0
"""Inter-op: layers into pipeline stages, by dynamic programming over the chain of layers.

Letters: p stages, m microbatches, t[i,j] the seconds a microbatch keeps the stage of layers i..j-1
busy, at the fastest of its points that fits in memory.

    1  t[i,j] = min over points of forward + backward + transfers + once-per-step / m   _Tables
       such that held + in_flight(stage) * activations + transient <= limit
    2  B = min over partitions of max t          the least bottleneck                   _bottleneck
    3  S(b) = min over partitions with max t <= b of sum t                              _shortest
    4  minimise S(b) + (m - 1) b over b >= B, replay the schedule of the best few   _candidates

Rows are points (of one Pareto front), columns are layers. Which devices a stage gets, and where the
points come from, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from autoplan.errors import InfeasibleError
from autoplan.interleaved import interleaved
from autoplan.schedule import Schedule, finish_times, make_schedule
from autoplan.units import format_bytes

Floats = npt.NDArray[np.float64]

# Sums of the same numbers in another order are equal to this share.
_ROUNDING = 1e-12
# Step 4 tries at most this many bottlenecks, evenly chosen among those that can win.
_MOST_BOTTLENECKS = 64
# Replays are worth about this many actions in all: some 50 ms.
_REPLAY_ACTIONS = 60_000
_MOST_REPLAYS = 12
# From the quickest, layers are moved to partitions that the formula finds so much worse at most.
_NEARLY = 0.01
_MOST_MOVES = 48


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerCosts:
    """What each layer costs at each point.

    Attributes:
        forward_s: (points, layers) seconds of one microbatch; np.inf where a layer lacks a point.
        backward_s: (points, layers) seconds of one microbatch.
        step_s: (points, layers) seconds once per step, after the last backward: gradient
            reduction, optimizer.
        held_bytes: (points, layers) parameters, gradients and optimizer state, as stored.
        activation_bytes: (points, layers) saved for the backward pass, per microbatch in flight.
        transient_bytes: (points, layers) needed only while the layer runs; a stage needs the
            largest.
        send_s: (layers - 1,) seconds to send one microbatch over the boundary after each layer.
        shared: (layers, bytes) of every tied parameter: it is in `held_bytes` of each of the
            layers, and a stage that has several of them holds it once.
        crowding: Devices per core, as of `schedule.replay`.
    """

    forward_s: Floats
    backward_s: Floats
    step_s: Floats
    held_bytes: Floats
    activation_bytes: Floats
    transient_bytes: Floats
    send_s: Floats
    shared: tuple[tuple[tuple[int, ...], float], ...] = ()
    crowding: float = 1.0

    @property
    def num_points(self) -> int:
        return int(self.forward_s.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.forward_s.shape[1])

    def verify(self) -> None:
        """Checks shapes, signs and indices.

        Raises:
            ValueError: A field does not fit; the message names it.
        """
        shape = self.forward_s.shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"forward_s is {shape}; give (points, layers), at least one of each")
        for name in (
            "forward_s",
            "backward_s",
            "step_s",
            "held_bytes",
            "activation_bytes",
            "transient_bytes",
            "send_s",
        ):
            values = getattr(self, name)
            expected = (shape[1] - 1,) if name == "send_s" else shape
            if values.shape != expected:
                raise ValueError(
                    f"{name} is {values.shape}; give {expected}, as forward_s is {shape}"
                )
            finite = name == "forward_s" or np.isfinite(values).all()
            if not finite or not (values >= 0.0).all():
                raise ValueError(
                    f"{name} has a negative or undefined entry; give numbers >= 0 "
                    "(inf only in forward_s, where a layer lacks a point)"
                )
        for layers, size_bytes in self.shared:
            if not all(0 <= layer < shape[1] for layer in layers) or size_bytes < 0.0:
                raise ValueError(
                    f"a shared parameter of {size_bytes} bytes names layers {layers}; "
                    f"give indices below {shape[1]} and bytes >= 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Which layers each stage runs, and at which point.

    Attributes:
        bounds: Per stage (first layer, last layer + 1).
        points: Per stage the row of LayerCosts.
        bottleneck_s: Seconds per microbatch of the slowest stage: forward, backward, transfers.
        step_s: Seconds of one step, from the schedule's replay, with what runs once per step.
        memory_bytes: Per stage, at the most microbatches that it holds.
    """

    bounds: tuple[tuple[int, int], ...]
    points: tuple[int, ...]
    bottleneck_s: float
    step_s: float
    memory_bytes: tuple[float, ...]


def partition_layers(
    costs: LayerCosts,
    num_stages: int,
    num_microbatches: int,
    *,
    schedule: str = "1f1b",
    memory_limit_bytes: float | None = None,
    stage_layers: tuple[int, ...] | None = None,
    chunks: int = 1,
) -> StageAssignment:
    """The fastest contiguous stages, none empty, each within memory at its own place.

    Minimises sum t + (m - 1) max t (Alpa, OSDI 2022, equation 2) and lets the schedule's replay
    choose among the best. Where transfers and points leave the sum alone, that is the least
    bottleneck. Ties go to the smaller bottleneck, then to the earliest cuts.

    Args:
        costs: Of every layer, in order.
        num_stages: p.
        num_microbatches: m.
        schedule: A name of `autoplan.schedule.SCHEDULES`; with "infer" only forwards count.
        memory_limit_bytes: Most bytes on a device; None: no limit.
        stage_layers: The number of layers of each stage, where a user has decided.
        chunks: Stages per rank, interleaved: then `stage_layers` gives all num_stages * chunks.

    Raises:
        ValueError: The costs do not fit together, or the schedule is unknown.
        InfeasibleError: Fewer layers than stages, pins that do not add up, or too little memory:
            the message names the layer or the stage, `required_bytes` the least possible need.
    """
    costs.verify()
    if chunks > 1:
        return _interleaved(costs, num_stages, chunks, num_microbatches, stage_layers)
    plan = make_schedule(schedule, num_stages, num_microbatches)
    _check_counts(costs.num_layers, num_stages, stage_layers)
    limit = np.inf if memory_limit_bytes is None else memory_limit_bytes
    tables = _Tables(costs, plan, limit, stage_layers)
    least = _bottleneck(tables.seconds)
    if not np.isfinite(least):
        raise _refusal(costs, tables, plan, limit)
    candidates = _candidates(tables.seconds, least, num_microbatches)
    affordable = _REPLAY_ACTIONS // (2 * num_stages * num_microbatches)
    most = min(max(affordable, 2), _MOST_REPLAYS)
    replayed = [_replayed(costs, tables, plan, bounds) for bounds in candidates[:most]]
    if plan.trains and costs.step_s.any() and stage_layers is None:
        replayed += _moved(costs, tables, plan, replayed)
    quickest = min(assignment.step_s for assignment in replayed)
    tied = [a for a in replayed if a.step_s <= quickest * (1 + 1e3 * _ROUNDING)]
    slowest = min(assignment.bottleneck_s for assignment in tied)
    tied = [a for a in tied if a.bottleneck_s <= slowest * (1 + 1e3 * _ROUNDING)]
    return min(tied, key=lambda assignment: assignment.bounds)


def _check_counts(num_layers: int, num_stages: int, stage_layers: tuple[int, ...] | None) -> None:
    """Raises InfeasibleError unless every stage can have a layer and pins add up."""
    if num_stages > num_layers:
        raise InfeasibleError(
            f"{num_layers} layers cannot fill {num_stages} stages, each of which needs at least "
            f"one. The maximum is {num_layers} stages, the layer count; use fewer stages."
        )
    if stage_layers is None:
        return
    if len(stage_layers) != num_stages or min(stage_layers) < 1 or sum(stage_layers) != num_layers:
        raise InfeasibleError(
            f"stage_layers={stage_layers} pins {sum(stage_layers)} layers on {len(stage_layers)} "
            f"stages; the model has {num_layers} layers and {num_stages} stages. Give one count "
            f"per stage, each at least 1, that sum up to {num_layers}."
        )


def _sums(values: Floats) -> Floats:
    """(points, layers, layers + 1) sums over layers i..j-1; inf where one of them is."""
    finite = np.isfinite(values)
    start = np.zeros((values.shape[0], 1))
    prefix = np.hstack((start, np.cumsum(np.where(finite, values, 0.0), axis=1)))
    sums: Floats = prefix[:, None, :] - prefix[:, :-1, None]
    if not finite.all():
        missing = np.hstack((start, np.cumsum(~finite, axis=1)))
        sums[missing[:, None, :] > missing[:, :-1, None]] = np.inf
    return sums


class _Tables:
    """Seconds, bytes and points of every run of layers, as a stage at every place.

    Attributes:
        busy_s: (points, first, last + 1) seconds that one microbatch keeps the stage busy, plus
            its share of what runs once per step; inf where no stage can be.
        bytes: Per stage (points, first, last + 1) memory.
        allowed: Per stage (first, last + 1), False where pins say otherwise.
        seconds: Per stage (first, last + 1) seconds of the fastest point that fits.
        points: Per stage (first, last + 1) that point.
    """

    def __init__(
        self,
        costs: LayerCosts,
        schedule: Schedule,
        limit: float,
        stage_layers: tuple[int, ...] | None,
    ) -> None:
        num_layers = costs.num_layers
        busy = _sums(costs.forward_s)
        left = np.concatenate(([0.0], costs.send_s))
        busy += left[None, :, None]
        if schedule.trains:
            busy += _sums(costs.backward_s) + _sums(costs.step_s) / schedule.num_microbatches
            right = np.concatenate(([0.0], costs.send_s, [0.0]))
            busy += right[None, None, :]
        first, last = np.arange(num_layers)[:, None], np.arange(num_layers + 1)[None, :]
        busy[:, last <= first] = np.inf
        self.busy_s = busy
        held = _sums(costs.held_bytes)
        for layers, size_bytes in costs.shared:
            uses = np.isin(np.arange(num_layers), layers).astype(float)[None, :]
            held -= size_bytes * np.maximum(_sums(uses) - 1.0, 0.0)
        transient = np.zeros_like(held)
        for i in range(num_layers):
            transient[:, i, i + 1 :] = np.maximum.accumulate(costs.transient_bytes[:, i:], axis=1)
        activations = _sums(costs.activation_bytes)
        self.bytes: list[Floats] = []
        self.allowed: list[npt.NDArray[np.bool_]] = []
        self.seconds: list[Floats] = []
        self.points: list[npt.NDArray[np.int64]] = []
        edges = None if stage_layers is None else np.cumsum((0, *stage_layers))
        for stage in range(schedule.num_stages):
            need = held + schedule.in_flight(stage) * activations + transient
            allowed = last > first
            if edges is not None:
                allowed = (first == edges[stage]) & (last == edges[stage + 1])
            fitting = np.where(allowed & (need <= limit), busy, np.inf)
            self.allowed.append(allowed)
            self.bytes.append(need)
            self.points.append(fitting.argmin(axis=0))
            self.seconds.append(fitting.min(axis=0))


def _bottleneck(matrices: list[Floats]) -> float:
    """The least, over all partitions, of the largest entry; inf where there is no partition.

    Args:
        matrices: Per stage (first, last + 1).
    """
    after = np.full(matrices[0].shape[1], np.inf)
    after[-1] = 0.0
    for matrix in reversed(matrices):
        here = np.maximum(matrix, after[None, :]).min(axis=1)
        after = np.append(here, np.inf)
    return float(after[0])


def _shortest(
    matrices: list[Floats], most: float, *, latest: bool = False
) -> tuple[float, tuple[tuple[int, int], ...]]:
    """The least sum over partitions whose entries are at most `most`, and its stages' bounds.

    Of equal partitions the one with the earliest cuts, first cut first; or the latest.

    Args:
        matrices: Per stage (first, last + 1).
        most: At least the bottleneck.
    """
    after = np.full(matrices[0].shape[1], np.inf)
    after[-1] = 0.0
    sums: list[Floats] = []
    for matrix in reversed(matrices):
        sums.append(np.where(matrix <= most, matrix, np.inf) + after[None, :])
        after = np.append(sums[-1].min(axis=1), np.inf)
    bounds, first = [], 0
    for matrix in reversed(sums):
        row = matrix[first]
        ends = np.flatnonzero(row <= row.min() * (1 + _ROUNDING))
        last = int(ends[-1 if latest else 0])
        bounds.append((first, last))
        first = last
    return float(after[0]), tuple(bounds)


def _candidates(
    matrices: list[Floats], least: float, num_microbatches: int
) -> list[tuple[tuple[int, int], ...]]:
    """Partitions of different bottlenecks, the best sum + (m - 1) * bottleneck first.

    A larger bottleneck comes only with a smaller sum. The largest that can win follows from the
    sum without any limit.
    """
    repeats = num_microbatches - 1
    tight = least * (1 + _ROUNDING)
    total, bounds = _shortest(matrices, tight)
    floor, _ = _shortest(matrices, np.inf)
    found = [(total + repeats * least, least, bounds)]
    slack = total - floor
    if slack > total * 1e3 * _ROUNDING:
        entries = np.unique(np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices]))
        largest = least + slack / repeats if repeats else np.inf
        entries = entries[(entries > tight) & (entries <= largest)]
        if len(entries) > _MOST_BOTTLENECKS:
            chosen = np.linspace(0, len(entries) - 1, _MOST_BOTTLENECKS).astype(int)
            entries = entries[chosen]
        smallest = total
        for entry in entries.tolist():
            total, bounds = _shortest(matrices, entry * (1 + _ROUNDING))
            if total < smallest * (1 - 1e3 * _ROUNDING):
                smallest = total
                worst = max(matrix[b] for matrix, b in zip(matrices, bounds))
                found.append((total + repeats * float(worst), float(worst), bounds))
    found.sort(key=lambda entry: entry[:2])
    ordered: list[tuple[tuple[int, int], ...]] = []
    for _, worst, bounds in found:
        _, other = _shortest(matrices, worst * (1 + _ROUNDING), latest=True)
        ordered += [b for b in (bounds, other) if b not in ordered]
    return ordered


def _moved(
    costs: LayerCosts, tables: _Tables, schedule: Schedule, replayed: list[StageAssignment]
) -> list[StageAssignment]:
    """The partitions met on the way down from the quickest one, one layer over one boundary at a
    time.

    The formula spreads what runs once per step over the microbatches, the replay has it after the
    last backward: partitions that the formula finds equal, or nearly, may differ.
    """
    repeats, found = schedule.num_microbatches - 1, list(replayed)

    def value(bounds: tuple[tuple[int, int], ...]) -> float:
        entries = [float(matrix[b]) for matrix, b in zip(tables.seconds, bounds)]
        return sum(entries) + repeats * max(entries)

    best = min(found, key=lambda a: a.step_s)
    while len(found) < len(replayed) + _MOST_MOVES:
        near = value(best.bounds) * (1 + _NEARLY)
        known = {a.bounds for a in found}
        moves = [b for b in _moves(best.bounds) if b not in known and value(b) <= near]
        found += [_replayed(costs, tables, schedule, bounds) for bounds in moves]
        quicker = min(found, key=lambda a: a.step_s)
        if quicker.step_s >= best.step_s:
            break
        best = quicker
    return found[len(replayed) :]


def _moves(bounds: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The partitions in which one layer has crossed one boundary."""
    for stage, ((first, middle), (_, last)) in enumerate(pairwise(bounds)):
        for cut in (middle - 1, middle + 1):
            if first < cut < last:
                yield (*bounds[:stage], (first, cut), (cut, last), *bounds[stage + 2 :])


def _replayed(
    costs: LayerCosts,
    tables: _Tables,
    schedule: Schedule,
    bounds: tuple[tuple[int, int], ...],
) -> StageAssignment:
    """The assignment with these bounds, each stage at its fastest point that fits, replayed."""
    points = tuple(int(table[b]) for table, b in zip(tables.points, bounds))
    runs = [(point, slice(*b)) for point, b in zip(points, bounds)]
    forward = [float(costs.forward_s[run].sum()) for run in runs]
    backward = [float(costs.backward_s[run].sum()) if schedule.trains else 0.0 for run in runs]
    once = [float(costs.step_s[run].sum()) if schedule.trains else 0.0 for run in runs]
    send = [float(costs.send_s[last - 1]) for _, last in bounds[:-1]]
    finish = finish_times(schedule, forward, backward, send, costs.crowding)
    busy = [
        f + b + before + (after if schedule.trains else 0.0)
        for f, b, before, after in zip(forward, backward, [0.0, *send], [*send, 0.0])
    ]
    return StageAssignment(
        bounds=bounds,
        points=points,
        bottleneck_s=max(busy),
        step_s=max(end + own for end, own in zip(finish, once)),
        memory_bytes=tuple(
            float(table[(point, *b)]) for table, point, b in zip(tables.bytes, points, bounds)
        ),
    )


def _interleaved(
    costs: LayerCosts,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    stage_layers: tuple[int, ...] | None,
) -> StageAssignment:
    """The pinned cut into num_ranks * chunks stages, replayed; memory per rank."""
    stages = num_ranks * chunks
    _check_counts(costs.num_layers, stages, stage_layers)
    if stage_layers is None:
        raise ValueError("interleaved stages are priced only; give stage_layers")
    edges = [0, *accumulate(stage_layers)]
    bounds = tuple(pairwise(edges))
    runs = [slice(*b) for b in bounds]

    def sums(values: Floats) -> list[float]:
        return [float(values[0, run].sum()) for run in runs]

    forward, backward, once = sums(costs.forward_s), sums(costs.backward_s), sums(costs.step_s)
    held, activations = sums(costs.held_bytes), sums(costs.activation_bytes)
    send = [float(costs.send_s[last - 1]) for _, last in bounds[:-1]]
    schedule = interleaved(num_ranks, chunks, num_microbatches)
    finish = schedule.finish_times(forward, backward, send)
    memory = []
    for rank in range(num_ranks):
        mine = range(rank, stages, num_ranks)
        need = sum(held[s] for s in mine)
        need += sum(n * activations[s] for n, s in zip(schedule.in_flight[rank], mine))
        memory.append(need + max(float(costs.transient_bytes[0, runs[s]].max()) for s in mine))
    ends = [end + sum(once[r::num_ranks]) for r, end in enumerate(finish)]
    busy = [sum(forward[r::num_ranks]) + sum(backward[r::num_ranks]) for r in range(num_ranks)]
    return StageAssignment(
        bounds=bounds,
        points=(0,) * stages,
        bottleneck_s=max(busy),
        step_s=max(ends),
        memory_bytes=tuple(memory),
    )


def _refusal(
    costs: LayerCosts, tables: _Tables, schedule: Schedule, limit: float
) -> InfeasibleError:
    """Why no partition fits: no common point, a layer too large alone, or a stage too large."""
    num_layers, num_stages = costs.num_layers, schedule.num_stages
    possible = np.isfinite(tables.busy_s)
    needs = [np.where(possible, need, np.inf).min(axis=0) for need in tables.bytes]
    pinned = [np.where(mask, need, np.inf) for mask, need in zip(tables.allowed, needs)]
    required = _bottleneck(pinned)
    if not np.isfinite(required):
        return InfeasibleError(
            f"{num_layers} layers in {num_stages} stages: every partition has a stage whose layers "
            "have no point in common. Give every layer a finite forward_s at a common point."
        )
    alone = []
    for layer in range(num_layers):
        places = range(max(0, num_stages - num_layers + layer), min(layer, num_stages - 1) + 1)
        alone.append(min(float(needs[stage][layer, layer + 1]) for stage in places))
    largest = int(np.argmax(alone))
    if alone[largest] > limit:
        return InfeasibleError(
            f"layer {largest} alone needs {format_bytes(alone[largest])}, a device has "
            f"{format_bytes(limit)}; with it, the best partition of {num_layers} layers into "
            f"{num_stages} stages needs {format_bytes(required)}. Split the layer over more "
            "devices, or use smaller microbatches or recomputation.",
            required_bytes=required,
            available_bytes=limit,
        )
    _, bounds = _shortest(pinned, required * (1 + _ROUNDING))
    sizes = [float(need[b]) for need, b in zip(pinned, bounds)]
    stage = int(np.argmax(sizes))
    first, last = bounds[stage]
    return InfeasibleError(
        f"{num_layers} layers in {num_stages} stages need at least {format_bytes(required)} on a "
        f"device, which has {format_bytes(limit)}: at best, stage {stage} with layers {first} to "
        f"{last - 1} holds {format_bytes(sizes[stage])}, {schedule.in_flight(stage)} microbatches "
        "in flight. Use more devices, smaller microbatches or recomputation.",
        stage=stage,
        required_bytes=required,
        available_bytes=limit,
    )
