# SPDX-License-Identifier: Apache-2.0
"""Contracted problems have the same best value as the original ones, under limits and prices, and
give choices of it.
"""

from __future__ import annotations

import numpy as np
import pytest

from autoplan.errors import InfeasibleError
from autoplan.solver.contract import contract
from autoplan.solver.intra_op import Edge, IntraOpProblem, evaluate, solve_intra_op


def random_problem(seed: int, *, limited: bool) -> IntraOpProblem:
    """Up to 9 ops in a random graph with chains, forks, double edges and impossible conversions."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(2, 10))
    sizes = [int(rng.integers(1, 5)) for _ in range(num)]
    layouts = 3
    edges, costs, held = [], [], []
    for consumer in range(1, num):
        for producer in {int(rng.integers(0, consumer)) for _ in range(int(rng.integers(1, 3)))}:
            shared = [e for e in edges if e.producer == producer] if rng.random() < 0.4 else []
            group = shared[0].group if shared else len(costs)
            if not shared:
                matrix = rng.integers(0, 9, (layouts, layouts)).astype(float)
                matrix[rng.random((layouts, layouts)) < 0.15] = np.inf
                costs.append(matrix)
                held.append(rng.integers(0, 5, (layouts, layouts)).astype(float))
            produced = shared[0].produced if shared else rng.integers(0, layouts, sizes[producer])
            edges.append(
                Edge(producer, consumer, produced, rng.integers(0, layouts, sizes[consumer]), group)
            )
    node_bytes = tuple(rng.integers(0, 6, s).astype(float) for s in sizes)
    limit = float(sum(b.mean() for b in node_bytes) + 3) if limited else None
    return IntraOpProblem(
        node_cost_s=tuple(rng.integers(0, 9, s).astype(float) for s in sizes),
        node_bytes=node_bytes,
        node_transient_bytes=tuple(rng.integers(0, 4, s).astype(float) for s in sizes),
        edges=tuple(edges),
        conversion_cost_s=tuple(costs),
        conversion_bytes=tuple(held),
        memory_limit_bytes=limit,
    )


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_same_best_value(block: int, limited: bool) -> None:
    shrunk = 0
    for seed in range(block * 20, block * 20 + 20):
        problem = random_problem(seed, limited=limited)
        smaller, original = contract(problem)
        shrunk += len(problem.node_cost_s) - len(smaller.node_cost_s)
        try:
            expected = solve_intra_op(problem)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                solve_intra_op(smaller)
            continue
        found = solve_intra_op(smaller)
        assert found.time_s == pytest.approx(expected.time_s, rel=1e-9, abs=1e-9), seed
        time_s, held_bytes, transient_bytes = evaluate(problem, original(found.choices))
        assert time_s == pytest.approx(found.time_s, rel=1e-9, abs=1e-9)
        assert (held_bytes, transient_bytes) == pytest.approx(
            (found.held_bytes, found.transient_bytes)
        )
    assert shrunk > 0


def test_a_chain_becomes_one_op() -> None:
    """Ten ops in a row, each two layouts: one op remains, and its best strategy is the chain's."""
    rng = np.random.default_rng(0)
    problem = IntraOpProblem(
        node_cost_s=tuple(rng.random(2) for _ in range(10)),
        node_bytes=(np.zeros(2),) * 10,
        node_transient_bytes=(np.zeros(2),) * 10,
        edges=tuple(Edge(v, v + 1, np.arange(2), np.arange(2), v) for v in range(9)),
        conversion_cost_s=tuple(rng.random((2, 2)) for _ in range(9)),
        conversion_bytes=(np.zeros((2, 2)),) * 9,
    )
    smaller, original = contract(problem)
    assert len(smaller.node_cost_s) == 1
    assert not smaller.edges
    best = min(
        original((s,))
        for s in range(smaller.node_cost_s[0].size)
        if smaller.node_cost_s[0][s] == smaller.node_cost_s[0].min()
    )
    assert evaluate(problem, best)[0] == pytest.approx(solve_intra_op(problem).time_s)
