# SPDX-License-Identifier: Apache-2.0
"""The integer program against full enumeration, on hundreds of small random problems."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from autoplan.errors import InfeasibleError
from autoplan.solver.intra_op import Edge, IntraOpProblem, evaluate, solve_intra_op
from tests.reference import best_intra_op, intra_op_value


def random_problem(
    seed: int,
    num_nodes: int | None = None,
    *,
    num_strategies: int = 3,
    limited: bool = False,
    blocked: float = 0.2,
    extra_edges: float = 1.0,
) -> IntraOpProblem:
    """A random graph whose groups have one or several edges, with integer sizes."""
    rng = np.random.default_rng(seed)
    n = num_nodes or int(rng.integers(1, 7))
    sizes = rng.integers(1, num_strategies + 1, n)
    costs = tuple(rng.choice([0.0, 1.0, 2.5, 4.0, 7.0], s) * 1e-3 for s in sizes)
    held = tuple(rng.integers(0, 20, s).astype(float) for s in sizes)
    transient = tuple(rng.integers(0, 12, s).astype(float) for s in sizes)
    edges: list[Edge] = []
    conversions: list[np.ndarray] = []
    copies: list[np.ndarray] = []
    groups: dict[int, list[tuple[int, np.ndarray]]] = {}
    pairs = [(int(rng.integers(0, v)), v) for v in range(1, n)]
    pairs += [
        tuple(sorted(rng.choice(n, 2, replace=False).tolist()))
        for _ in range(int(extra_edges * n) if n > 1 else 0)
    ]
    for producer, consumer in pairs:
        mine = groups.setdefault(producer, [])
        num_p, num_q = 3, 3
        if not mine or rng.random() < 0.4:
            mine.append((len(conversions), rng.integers(0, num_p, sizes[producer])))
            matrix = rng.choice([0.0, 0.5, 1.5, 3.0], (num_p, num_q)) * 1e-3
            matrix[rng.random((num_p, num_q)) < blocked] = np.inf
            conversions.append(matrix)
            copies.append(rng.integers(0, 6, (num_p, num_q)).astype(float))
        group, produced = mine[int(rng.integers(0, len(mine)))]
        consumed = rng.integers(0, num_q, sizes[consumer])
        edges.append(Edge(producer, consumer, produced, consumed, group))
    total = float(sum(h.max() for h in held))
    return IntraOpProblem(
        node_cost_s=costs,
        node_bytes=held,
        node_transient_bytes=transient,
        edges=tuple(edges),
        conversion_cost_s=tuple(conversions),
        conversion_bytes=tuple(copies),
        memory_limit_bytes=float(np.floor(rng.uniform(0.6, 2.0) * total)) if limited else None,
    )


def check_against_enumeration(problem: IntraOpProblem, price: float) -> str:
    """Solves both ways; says which way it ended."""
    best, least = best_intra_op(problem, price)
    if np.isinf(best):
        with pytest.raises(InfeasibleError) as caught:
            solve_intra_op(problem, byte_price_s_per_byte=price)
        if np.isinf(least):
            assert caught.value.required_bytes is None
            return "impossible"
        assert caught.value.required_bytes == pytest.approx(least, rel=1e-9)
        assert caught.value.available_bytes == problem.memory_limit_bytes
        return "too large"
    solution = solve_intra_op(problem, byte_price_s_per_byte=price)
    time_s, held, transient = intra_op_value(problem, solution.choices)
    assert (time_s, held, transient) == pytest.approx(
        (solution.time_s, solution.held_bytes, solution.transient_bytes)
    )
    assert solution.objective_s == pytest.approx(time_s + price * (held + transient))
    assert solution.objective_s == pytest.approx(best, rel=1e-6, abs=1e-12)
    assert solution.optimal
    assert solution.bound_s <= solution.objective_s
    if problem.memory_limit_bytes is not None:
        assert held + transient <= problem.memory_limit_bytes
    return "solved"


@pytest.mark.parametrize("price", [0.0, 1e-4, 1e-2])
def test_equals_enumeration_without_limit(price: float) -> None:
    ends = [check_against_enumeration(random_problem(seed), price) for seed in range(100)]
    assert ends.count("solved") > 70
    assert "impossible" in ends


@pytest.mark.parametrize("price", [0.0, 1e-4])
def test_equals_enumeration_within_memory(price: float) -> None:
    ends = [
        check_against_enumeration(random_problem(seed, limited=True), price)
        for seed in range(1000, 1150)
    ]
    assert ends.count("solved") > 70
    assert ends.count("too large") > 5


def test_equals_enumeration_where_much_is_impossible() -> None:
    ends = [
        check_against_enumeration(random_problem(seed, 4, blocked=0.45), 0.0) for seed in range(80)
    ]
    assert ends.count("impossible") > 10
    assert ends.count("solved") > 10


def two_ops(cost: list[list[float]], *, users: int, limit: float | None = None) -> IntraOpProblem:
    """One producer and `users` consumers of one group, two layouts each, conversions 10 bytes."""
    ones = np.zeros(2)
    layouts = np.array([0, 1])
    return IntraOpProblem(
        node_cost_s=(np.array([0.0, 9.0]), *(np.array([9.0, 0.0]) for _ in range(users))),
        node_bytes=(ones,) * (users + 1),
        node_transient_bytes=(ones,) * (users + 1),
        edges=tuple(Edge(0, 1 + i, layouts, layouts, 0) for i in range(users)),
        conversion_cost_s=(np.array(cost),),
        conversion_bytes=(np.array([[0.0, 10.0], [10.0, 0.0]]),),
        memory_limit_bytes=limit,
    )


@pytest.mark.parametrize("users", [1, 2, 3])
def test_group_pays_a_conversion_once(users: int) -> None:
    solution = solve_intra_op(two_ops([[0.0, 5.0], [5.0, 0.0]], users=users))
    assert solution.choices == (0,) + (1,) * users
    assert solution.time_s == pytest.approx(5.0)
    assert solution.held_bytes == 10.0


def test_separate_groups_pay_each() -> None:
    problem = two_ops([[0.0, 5.0], [5.0, 0.0]], users=2)
    layouts = np.array([0, 1])
    problem = dataclasses.replace(
        problem,
        edges=(Edge(0, 1, layouts, layouts, 0), Edge(0, 2, layouts, layouts, 1)),
        conversion_cost_s=problem.conversion_cost_s * 2,
        conversion_bytes=problem.conversion_bytes * 2,
    )
    solution = solve_intra_op(problem)
    assert solution.time_s == pytest.approx(9.0)
    assert solution.choices == (1, 1, 1)


def test_equal_layouts_may_cost() -> None:
    solution = solve_intra_op(two_ops([[2.0, 50.0], [50.0, 3.0]], users=1))
    assert solution.time_s == pytest.approx(11.0)


def test_copies_count_towards_memory() -> None:
    assert solve_intra_op(two_ops([[0.0, 5.0], [5.0, 0.0]], users=2, limit=10.0)).time_s == 5.0
    assert solve_intra_op(two_ops([[0.0, 5.0], [5.0, 0.0]], users=2, limit=9.9)).time_s == 9.0


def test_transient_is_the_largest_not_the_sum() -> None:
    problem = IntraOpProblem(
        node_cost_s=(np.array([0.0, 1.0]), np.array([0.0, 1.0])),
        node_bytes=(np.array([4.0, 4.0]), np.array([3.0, 3.0])),
        node_transient_bytes=(np.array([8.0, 0.0]), np.array([8.0, 0.0])),
        edges=(),
        conversion_cost_s=(),
        conversion_bytes=(),
        memory_limit_bytes=15.0,
    )
    solution = solve_intra_op(problem)
    assert (solution.time_s, solution.held_bytes, solution.transient_bytes) == (0.0, 7.0, 8.0)
    assert solve_intra_op(dataclasses.replace(problem, memory_limit_bytes=14.9)).time_s == 2.0


def test_edge_from_an_op_to_itself() -> None:
    problem = IntraOpProblem(
        node_cost_s=(np.array([0.0, 1.0]),),
        node_bytes=(np.zeros(2),),
        node_transient_bytes=(np.zeros(2),),
        edges=(Edge(0, 0, np.array([0, 1]), np.array([1, 1]), 0),),
        conversion_cost_s=(np.array([[0.0, 3.0], [3.0, 0.0]]),),
        conversion_bytes=(np.zeros((2, 2)),),
    )
    assert solve_intra_op(problem).choices == (1,)


def test_impossible_names_the_group() -> None:
    with pytest.raises(InfeasibleError, match="group 0 from op 0 to op 1") as caught:
        solve_intra_op(two_ops([[np.inf, np.inf], [np.inf, np.inf]], users=1))
    assert caught.value.required_bytes is None


def test_real_magnitudes_keep_the_limit_to_the_byte() -> None:
    """80 GiB devices: the solver's tolerance is kilobytes there, the answer's is none."""
    gib = 2.0**30
    problem = IntraOpProblem(
        node_cost_s=(np.array([1e-3, 2e-3]),) * 4,
        node_bytes=(np.array([20.0 * gib + 1.0, 20.0 * gib]),) * 4,
        node_transient_bytes=(np.zeros(2),) * 4,
        edges=(),
        conversion_cost_s=(),
        conversion_bytes=(),
        memory_limit_bytes=80.0 * gib,
    )
    solution = solve_intra_op(problem)
    assert solution.choices == (1, 1, 1, 1)
    with pytest.raises(InfeasibleError) as caught:
        solve_intra_op(dataclasses.replace(problem, memory_limit_bytes=80.0 * gib - 1.0))
    assert caught.value.required_bytes == 80.0 * gib


def test_price_walks_the_pareto_front() -> None:
    problem = random_problem(7, 12, num_strategies=6, blocked=0.0)
    points = [
        solve_intra_op(problem, byte_price_s_per_byte=price) for price in (0.0, 1e-5, 1e-4, 1e-3)
    ]
    sizes = [p.held_bytes + p.transient_bytes for p in points]
    times = [p.time_s for p in points]
    assert sizes == sorted(sizes, reverse=True)
    assert np.all(np.diff(times) >= -1e-12)
    assert sizes[0] > sizes[-1]


def test_same_answer_every_time() -> None:
    problem = random_problem(3, 40, num_strategies=6, limited=True, blocked=0.0)
    first = solve_intra_op(problem)
    assert all(solve_intra_op(problem) == first for _ in range(3))
    assert first.optimal
    assert evaluate(problem, first.choices)[0] == pytest.approx(first.time_s)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(node_bytes=(np.zeros(1), np.zeros(2))), "op 0"),
        (dict(node_cost_s=(np.array([-1.0, 0.0]), np.zeros(2))), "op 0"),
        (dict(edges=(Edge(0, 1, np.array([0, 2]), np.array([0, 1]), 0),)), "edge 0"),
        (dict(conversion_bytes=(np.zeros((2, 3)),)), "group 0"),
        (
            dict(
                edges=tuple(Edge(v, 1 - v, np.array([0, 1]), np.array([0, 1]), 0) for v in (0, 1))
            ),
            "one producer",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], match: str) -> None:
    problem = two_ops([[0.0, 5.0], [5.0, 0.0]], users=1)
    with pytest.raises(ValueError, match=match):
        solve_intra_op(dataclasses.replace(problem, **change))
