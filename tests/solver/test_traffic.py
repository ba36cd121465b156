# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire of plans simple enough to count by hand."""

from __future__ import annotations

import pytest
from test_search import search_of, slow_cluster

from autoplan.solver.pins import Pinned
from autoplan.solver.traffic import stage_traffic


def test_data_parallel_gradients_are_reduced_once() -> None:
    pinned = Pinned(tp=1, dp=2, pp=1, num_microbatches=2, zero=0, recompute=False)
    search = search_of("mlp", slow_cluster(2), pinned)
    assert search.best is not None
    (stage,) = stage_traffic(search.best, search.solver(search.best.candidate))
    sent = {(t.axis, t.purpose): t.sent_bytes for t in stage}
    parameters = sum(v.meta.size_bytes for v in search.space.graph.of_kind("parameter"))
    # an all-reduce over two: each sends 2 (n - 1) / n = 1 times the gradients
    assert sent["dp", "parameters"] == parameters


def test_a_pipeline_sends_its_boundary_both_ways_for_every_microbatch() -> None:
    pinned = Pinned(tp=1, dp=1, pp=2, num_microbatches=4, recompute=False)
    search = search_of("mlp", slow_cluster(2), pinned)
    best = search.best
    assert best is not None
    solver = search.solver(best.candidate)
    first, last = stage_traffic(best, solver)
    (boundary,) = first
    assert (boundary.axis, boundary.purpose) == ("pp", "boundary")
    assert last == ()
    (_, cut), _ = best.assignment.bounds
    ops, layers = {op.name: op for op in solver.graph.ops}, solver.layers.layers
    made = {v for layer in layers[:cut] for n in layer.ops for v in ops[n].outputs}
    used = {v for layer in layers[cut:] for n in layer.ops for v in ops[n].inputs}
    crossing = [solver.graph.values[v].meta.size_bytes for v in made & used]
    assert boundary.sent_bytes == pytest.approx(2 * 4 * sum(crossing))


def test_the_seconds_are_those_that_the_layers_are_priced_with() -> None:
    for pinned in (
        Pinned(tp=2, dp=2, pp=1, num_microbatches=2, recompute=False),
        Pinned(tp=2, dp=2, pp=1, num_microbatches=2, recompute=True),
        Pinned(tp=1, dp=4, pp=1, num_microbatches=2, zero=3, recompute=False),
    ):
        search = search_of("gpt2", slow_cluster(4, link=1e8), pinned)
        best = search.best
        assert best is not None
        solver = search.solver(best.candidate)
        (stage,) = stage_traffic(best, solver)
        own_s = sum(  # collectives inside local forms, which are priced but not counted
            t.communication_s[t.strategies.index(best.strategies[n])]
            * solver.folded.count[n]
            * solver.work.forward_runs(n)
            for n, t in solver.tables.ops.items()
        )
        count = best.candidate.num_microbatches
        priced = sum(p.communication_s * count + p.step_s - p.optimizer_s for p in best.prices)
        counted = sum(t.time_s for t in stage) + count * own_s
        assert counted == pytest.approx(priced, rel=1e-9), pinned
