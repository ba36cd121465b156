# SPDX-License-Identifier: Apache-2.0
"""The dynamic program against exhaustive partition, and known cases of uneven layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from autoplan.errors import InfeasibleError
from autoplan.schedule import Schedule, make_schedule, replay
from autoplan.solver.inter_op import LayerCosts, StageAssignment, partition_layers
from tests.reference import best_partition, partitions, stage_numbers


def layers(
    forward: list[float],
    *,
    backward: list[float] | None = None,
    held: list[float] | None = None,
    activations: list[float] | None = None,
    transient: list[float] | None = None,
    send: list[float] | None = None,
    shared: tuple[tuple[tuple[int, ...], float], ...] = (),
) -> LayerCosts:
    """Costs at a single point; what is not given costs nothing."""
    n = len(forward)

    def row(values: list[float] | None) -> np.ndarray:
        return np.array([values if values is not None else [0.0] * n], dtype=float)

    return LayerCosts(
        forward_s=row(forward),
        backward_s=row(backward),
        step_s=row(None),
        held_bytes=row(held),
        activation_bytes=row(activations),
        transient_bytes=row(transient),
        send_s=np.array(send if send is not None else [0.0] * (n - 1), dtype=float),
        shared=shared,
    )


def sizes(assignment: StageAssignment) -> list[int]:
    return [last - first for first, last in assignment.bounds]


def check_complete(assignment: StageAssignment, num_layers: int, num_stages: int) -> None:
    """Every layer exactly once and in order, no stage without layers."""
    listed = [i for first, last in assignment.bounds for i in range(first, last)]
    assert listed == list(range(num_layers))
    assert len(assignment.bounds) == len(assignment.points) == num_stages
    assert min(sizes(assignment)) >= 1


# The cases of uneven partitions that other planners got wrong: empty stages, dropped layers,
# heavy ends. (name, times, stages, least bottleneck)
CASES = [
    ("a", [1.0] * 5, 4, 2.0),
    ("b", [1.0] * 42, 16, 3.0),
    ("c", [1.0] * 30, 4, 8.0),
    ("d", [0.2, *[1.0] * 6, 2.5], 4, 2.5),
    ("e", [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0], 3, 4.0),
    ("g", [1.0] * 7, 2, 4.0),
]
ONLY = {"d": [3, 2, 2, 1], "e": [2, 4, 1]}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "infer"])
@pytest.mark.parametrize("num_microbatches", [1, 4, 32])
@pytest.mark.parametrize("backward_share", [0.0, 0.5, 2 / 3])
@pytest.mark.parametrize(("name", "times", "num_stages", "bottleneck"), CASES)
def test_uneven_layers(
    name: str,
    times: list[float],
    num_stages: int,
    bottleneck: float,
    backward_share: float,
    num_microbatches: int,
    schedule: str,
) -> None:
    share = 0.0 if schedule == "infer" else backward_share
    costs = layers([t * (1 - share) for t in times], backward=[t * share for t in times])
    found = partition_layers(costs, num_stages, num_microbatches, schedule=schedule)
    check_complete(found, len(times), num_stages)
    assert found.bottleneck_s == pytest.approx(bottleneck, abs=1e-9)
    if name in ONLY:
        assert sizes(found) == ONLY[name]
    again = partition_layers(costs, num_stages, num_microbatches, schedule=schedule)
    assert again == found


def test_memory_moves_the_cut() -> None:
    costs = layers([1.0] * 4, held=[5.0, 1.0, 1.0, 1.0])
    assert sizes(partition_layers(costs, 2, 4, memory_limit_bytes=6.0)) == [2, 2]
    found = partition_layers(costs, 2, 4, memory_limit_bytes=5.0)
    assert sizes(found) == [1, 3]
    assert found.bottleneck_s == pytest.approx(3.0, abs=1e-9)
    assert found.memory_bytes == (5.0, 3.0)


def test_layer_too_large_is_named() -> None:
    costs = layers([1.0] * 4, held=[5.0, 1.0, 1.0, 1.0])
    with pytest.raises(InfeasibleError, match="layer 0 alone needs 5 B") as caught:
        partition_layers(costs, 2, 4, memory_limit_bytes=4.0)
    assert caught.value.required_bytes == 5.0
    assert caught.value.available_bytes == 4.0


def test_pinned_layers() -> None:
    costs = layers([1.0] * 7)
    found = partition_layers(costs, 2, 4, stage_layers=(3, 4))
    assert sizes(found) == [3, 4]
    assert found.bottleneck_s == pytest.approx(4.0, abs=1e-9)
    assert sizes(partition_layers(costs, 2, 4, stage_layers=(6, 1))) == [6, 1]


@pytest.mark.parametrize("pins", [(3, 3), (3, 5), (7,), (3, 3, 1), (7, 0)])
def test_pins_that_do_not_add_up(pins: tuple[int, ...]) -> None:
    with pytest.raises(InfeasibleError, match="sum up to 7"):
        partition_layers(layers([1.0] * 7), 2, 4, stage_layers=pins)


def test_more_stages_than_layers() -> None:
    with pytest.raises(InfeasibleError, match="maximum is 3 stages"):
        partition_layers(layers([1.0] * 3), 4, 8)


def test_pinned_stage_too_large_is_named() -> None:
    costs = layers([1.0] * 4, held=[1.0, 1.0, 3.0, 3.0])
    with pytest.raises(InfeasibleError, match="stage 1 with layers 2 to 3") as caught:
        partition_layers(costs, 2, 4, stage_layers=(2, 2), memory_limit_bytes=5.0)
    assert (caught.value.stage, caught.value.required_bytes) == (1, 6.0)


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "held"),
    [
        ("1f1b", 4, (4.0, 3.0, 2.0, 1.0)),
        ("1f1b", 2, (2.0, 2.0, 2.0, 1.0)),
        ("gpipe", 4, (4.0, 4.0, 4.0, 4.0)),
        ("infer", 4, (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_memory_counts_microbatches_in_flight(
    schedule: str, num_microbatches: int, held: tuple[float, ...]
) -> None:
    costs = layers([1.0] * 4, activations=[1.0] * 4, transient=[0.0, 0.5, 0.0, 0.0])
    found = partition_layers(costs, 4, num_microbatches, schedule=schedule)
    assert found.memory_bytes == (held[0], held[1] + 0.5, held[2], held[3])


def test_worst_stage_counts_not_the_mean() -> None:
    """Eight equal layers in stages of 1, 2, 2 and 3: the last holds three layers' states."""
    costs = layers([1.0] * 8, held=[10.0] * 8)
    found = partition_layers(costs, 4, 8, stage_layers=(1, 2, 2, 3))
    assert max(found.memory_bytes) == found.memory_bytes[3] == 30.0
    with pytest.raises(InfeasibleError):
        partition_layers(costs, 4, 8, stage_layers=(1, 2, 2, 3), memory_limit_bytes=29.0)


def test_tied_parameter_is_held_once_per_stage() -> None:
    costs = layers([1.0] * 4, held=[8.0, 1.0, 1.0, 8.0], shared=(((0, 3), 8.0),))
    assert partition_layers(costs, 1, 1).memory_bytes == (10.0,)
    assert partition_layers(costs, 2, 4).memory_bytes == (9.0, 9.0)


def test_slow_boundary_is_avoided() -> None:
    costs = layers([1.0] * 4, backward=[1.0] * 4, send=[0.0, 5.0, 0.0])
    assert sizes(partition_layers(costs, 2, 8)) in ([1, 3], [3, 1])


def test_each_stage_picks_its_own_point() -> None:
    """The first stage holds two microbatches and must take the small point, the last need not."""
    ones = np.ones((1, 4))
    costs = LayerCosts(
        forward_s=np.vstack((1.0 * ones, 1.5 * ones)),
        backward_s=np.vstack((2.0 * ones, 2.0 * ones)),
        step_s=np.zeros((2, 4)),
        held_bytes=np.zeros((2, 4)),
        activation_bytes=np.vstack((4.0 * ones, 2.0 * ones)),
        transient_bytes=np.zeros((2, 4)),
        send_s=np.zeros(3),
    )
    found = partition_layers(costs, 2, 8, memory_limit_bytes=8.0)
    assert found.bounds == ((0, 2), (2, 4))
    assert found.points == (1, 0)
    assert found.memory_bytes == (8.0, 8.0)


def random_costs(seed: int) -> tuple[LayerCosts, int, int]:
    """Up to 8 layers, 3 points, some without a point, and a number of stages and microbatches."""
    rng = np.random.default_rng(seed)
    num_layers, num_points = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    shape = (num_points, num_layers)
    forward = rng.integers(1, 9, shape).astype(float)
    if num_points > 1:
        forward[rng.random(shape) < 0.1] = np.inf
    tied = tuple(sorted(rng.choice(num_layers, 2, replace=False).tolist()))
    held = rng.integers(4, 12, shape).astype(float)
    costs = LayerCosts(
        forward_s=forward,
        backward_s=rng.integers(1, 9, shape).astype(float),
        step_s=(rng.integers(0, 9, shape) * rng.integers(0, 2)).astype(float),
        held_bytes=held,
        activation_bytes=rng.integers(0, 4, shape).astype(float),
        transient_bytes=rng.integers(0, 6, shape).astype(float),
        send_s=(rng.integers(0, 4, num_layers - 1) * rng.integers(0, 2)).astype(float),
        shared=((tied, 3.0),),
    )
    return costs, int(rng.integers(1, min(4, num_layers) + 1)), int(rng.integers(1, 9))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "infer"])
def test_equals_exhaustive_partition(schedule: str) -> None:
    ends = []
    for seed in range(150):
        costs, num_stages, num_microbatches = random_costs(seed)
        plan = make_schedule(schedule, num_stages, num_microbatches)
        in_flight = [plan.in_flight(stage) for stage in range(num_stages)]
        limit = float(np.random.default_rng(seed).integers(15, 60))
        trains = schedule != "infer"
        reference = best_partition(costs, num_stages, num_microbatches, in_flight, limit, trains)
        bottleneck, total, memory = reference
        if np.isinf(bottleneck):
            with pytest.raises(InfeasibleError) as caught:
                partition_layers(
                    costs, num_stages, num_microbatches, schedule=schedule, memory_limit_bytes=limit
                )
            assert caught.value.required_bytes == (None if np.isinf(memory) else memory)
            ends.append("refused")
            continue
        found = partition_layers(
            costs, num_stages, num_microbatches, schedule=schedule, memory_limit_bytes=limit
        )
        check_complete(found, costs.num_layers, num_stages)
        check_numbers(costs, found, plan, in_flight, limit)
        assert found.step_s <= slowest_of_optimal(costs, plan, in_flight, limit, total) * (1 + 1e-9)
        ends.append("found")
    assert ends.count("found") > 60
    assert ends.count("refused") > 10


def test_least_bottleneck_of_uneven_forward_and_backward() -> None:
    """The bottleneck is on the sum of both, whatever the replay would rather have."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, p = int(rng.integers(4, 9)), int(rng.integers(2, 5))
        forward, backward = rng.uniform(0, 1, n).tolist(), rng.uniform(0, 2, n).tolist()
        costs = layers(forward, backward=backward, held=[1.0] * n)
        limit = float(n - p)
        least, _, memory = best_partition(costs, p, 4, [1] * p, limit)
        if memory > limit:
            continue
        found = partition_layers(costs, p, 4, memory_limit_bytes=limit)
        assert found.bottleneck_s == pytest.approx(least, abs=1e-9)


def check_numbers(
    costs: LayerCosts,
    found: StageAssignment,
    plan: Schedule,
    in_flight: list[int],
    limit: float,
) -> None:
    """What an assignment says of itself is what the definition says of its bounds and points."""
    trains = plan.trains
    numbers = [
        stage_numbers(costs, bounds, point, in_flight[stage], trains)
        for stage, (bounds, point) in enumerate(zip(found.bounds, found.points))
    ]
    assert found.bottleneck_s == pytest.approx(max(t for t, _, _ in numbers))
    assert found.memory_bytes == pytest.approx([need for _, _, need in numbers])
    assert max(found.memory_bytes) <= limit
    assert found.step_s == pytest.approx(replayed_step(costs, found.bounds, found.points, plan))


def replayed_step(
    costs: LayerCosts,
    bounds: Sequence[tuple[int, int]],
    points: Sequence[int],
    plan: Schedule,
) -> float:
    """Seconds of a step: the replay, then on each stage what runs once."""
    runs = [(point, slice(*b)) for point, b in zip(points, bounds)]
    timeline = replay(
        plan,
        [costs.forward_s[run].sum() for run in runs],
        [costs.backward_s[run].sum() for run in runs],
        [costs.send_s[last - 1] for _, last in bounds[:-1]],
    )
    once = [costs.step_s[run].sum() if plan.trains else 0.0 for run in runs]
    return max(end + own for end, own in zip(timeline.finish_s, once))


def slowest_of_optimal(
    costs: LayerCosts, plan: Schedule, in_flight: list[int], limit: float, total: float
) -> float:
    """The slowest replay among the partitions whose sum + (m - 1) * bottleneck is least.

    The dynamic program may meet any of them, and takes a better replay if it sees one.
    """
    m, slowest = plan.num_microbatches, 0.0
    for bounds in partitions(costs.num_layers, plan.num_stages):
        times, points = [], []
        for stage, b in enumerate(bounds):
            options = []
            for point in range(costs.num_points):
                t, once, need = stage_numbers(costs, b, point, in_flight[stage], plan.trains)
                if need <= limit:
                    options.append((t + once / m, point))
            best = min(options, default=(np.inf, -1))
            times.append(best[0])
            points.append(best[1])
        if sum(times) + (m - 1) * max(times) <= total * (1 + 1e-9):
            slowest = max(slowest, replayed_step(costs, bounds, points, plan))
    return slowest


@pytest.mark.parametrize("field", ["backward_s", "held_bytes", "send_s"])
def test_arrays_that_do_not_fit_are_refused(field: str) -> None:
    costs = layers([1.0] * 3)
    fields = {name: getattr(costs, name) for name in LayerCosts.__slots__}
    with pytest.raises(ValueError, match=field):
        partition_layers(LayerCosts(**{**fields, field: np.zeros((1, 4))}), 2, 4)
    with pytest.raises(ValueError, match=field):
        partition_layers(LayerCosts(**{**fields, field: getattr(costs, field) - 1.0}), 2, 4)
