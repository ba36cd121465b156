# SPDX-License-Identifier: Apache-2.0
"""Brute-force solvers: slow, short, and sharing no code with the package, so they can disagree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any


def intra_op_value(problem: Any, choices: Sequence[int]) -> tuple[float, float, float]:
    """Seconds, held bytes and largest transient of choices, read off the definition."""
    time_s = held = transient = 0.0
    for node, s in enumerate(choices):
        time_s += problem.node_cost_s[node][s]
        held += problem.node_bytes[node][s]
        transient = max(transient, problem.node_transient_bytes[node][s])
    paid = []
    for edge in problem.edges:
        p = edge.produced[choices[edge.producer]]
        q = edge.consumed[choices[edge.consumer]]
        if (edge.group, p, q) not in paid:
            paid.append((edge.group, p, q))
            time_s += problem.conversion_cost_s[edge.group][p][q]
            held += problem.conversion_bytes[edge.group][p][q]
    return float(time_s), float(held), float(transient)


def best_intra_op(problem: Any, price: float) -> tuple[float, float]:
    """Least objective within the memory limit, and the least bytes of any possible choice.

    Either is inf where there is none.
    """
    best = least = math.inf
    limit = math.inf if problem.memory_limit_bytes is None else problem.memory_limit_bytes
    for choices in itertools.product(*(range(len(cost)) for cost in problem.node_cost_s)):
        time_s, held, transient = intra_op_value(problem, choices)
        if math.isinf(time_s):
            continue
        least = min(least, held + transient)
        if held + transient <= limit:
            best = min(best, time_s + price * (held + transient))
    return best, least


def partitions(num_layers: int, num_stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to cut layers into contiguous stages that are not empty, earliest cuts first."""
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield tuple(itertools.pairwise(edges))


def stage_numbers(
    costs: Any, bounds: tuple[int, int], point: int, in_flight: int, trains: bool
) -> tuple[float, float, float]:
    """Seconds per microbatch with transfers, seconds once per step, and bytes of one stage."""
    first, last = bounds
    layers = range(first, last)
    time_s = sum(costs.forward_s[point][i] for i in layers)
    if trains:
        time_s += sum(costs.backward_s[point][i] for i in layers)
    if first > 0:
        time_s += costs.send_s[first - 1]
    if trains and last < len(costs.forward_s[point]):
        time_s += costs.send_s[last - 1]
    once_s = sum(costs.step_s[point][i] for i in layers) if trains else 0.0
    memory = sum(
        costs.held_bytes[point][i] + in_flight * costs.activation_bytes[point][i] for i in layers
    )
    memory += max(costs.transient_bytes[point][i] for i in layers)
    for owners, size_bytes in costs.shared:
        users = sum(1 for i in layers if i in owners)
        memory -= size_bytes * max(users - 1, 0)
    return float(time_s), float(once_s), float(memory)


def best_partition(
    costs: Any,
    num_stages: int,
    num_microbatches: int,
    in_flight: Sequence[int],
    limit: float,
    trains: bool = True,
) -> tuple[float, float, float]:
    """Least bottleneck, least sum + (m - 1) * bottleneck, and least worst-stage bytes, each alone.

    A stage's seconds include its share of what runs once per step.
    """
    bottleneck = total = memory = math.inf
    num_points, num_layers = len(costs.forward_s), len(costs.forward_s[0])
    for bounds in partitions(num_layers, num_stages):
        times, needs = [], []
        for stage, (first, last) in enumerate(bounds):
            fastest = smallest = math.inf
            for point in range(num_points):
                t, once, need = stage_numbers(costs, (first, last), point, in_flight[stage], trains)
                t += once / num_microbatches
                if t < math.inf:
                    smallest = min(smallest, need)
                if need <= limit:
                    fastest = min(fastest, t)
            times.append(fastest)
            needs.append(smallest)
        memory = min(memory, max(needs))
        if max(times) < math.inf:
            bottleneck = min(bottleneck, max(times))
            total = min(total, sum(times) + (num_microbatches - 1) * max(times))
    return bottleneck, total, memory
