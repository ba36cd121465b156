# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire: what one device of each stage sends along each mesh axis in a step.

In: a priced decision. Out: `Traffic` records, by axis and purpose, whose seconds are those of the
same tables that priced it. The collectives inside an op's own local form (a few numbers per row of
a class-split loss, or per channel of a synchronised norm) are priced with the op and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.costs.storage import gather_moves, gradient_moves, reduces_each
from autoplan.plan_estimates import Traffic
from autoplan.sharding.resharding import Move, transition
from autoplan.solver.candidate import Priced
from autoplan.solver.evaluate import CandidateSolver
from autoplan.solver.pricing import Pricing

AXES = ("dp", "tp")
Totals = dict[tuple[str, str], list[float]]  # (axis, purpose) -> [bytes, seconds] of one step


def stage_traffic(priced: Priced, solver: CandidateSolver) -> tuple[tuple[Traffic, ...], ...]:
    """Per stage, what one of its devices sends in a step; boundaries under the sending stage."""
    pricing = solver.pricing_of(priced)
    boundaries = pricing.boundary_bytes() if priced.candidate.pp > 1 else []
    by_class: dict[int, Totals] = {}
    stages = []
    for first, last in priced.assignment.bounds:
        totals: Totals = {}
        for layer in solver.layers.layers[first:last]:
            if layer.block_class not in by_class:
                by_class[layer.block_class] = _layer_totals(pricing, layer.ops)
            for key, (sent, seconds) in by_class[layer.block_class].items():
                _add(totals, key, sent, seconds)
        if last <= len(boundaries):
            _add_boundary(totals, priced, solver, last - 1, boundaries[last - 1])
        stages.append(
            tuple(
                Traffic(axis=axis, purpose=purpose, sent_bytes=round(sent), time_s=seconds)
                for (axis, purpose), (sent, seconds) in sorted(totals.items())
            )
        )
    return tuple(stages)


def ring_bytes(move: Move, size_bytes: float, num_ranks: int) -> float:
    """What each member of a group sends for one move of a tensor of `size_bytes` (whole).

    Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005; an all-reduce is a reduce-scatter and an
    all-gather.
    """
    if move.is_local:
        return 0.0
    passes = 2.0 if move.kind == "all_reduce" else 1.0
    return passes * (num_ranks - 1) / num_ranks * size_bytes * move.fraction


def _add(totals: Totals, key: tuple[str, str], sent: float, seconds: float) -> None:
    entry = totals.setdefault(key, [0.0, 0.0])
    entry[0] += sent
    entry[1] += seconds


def _layer_totals(pricing: Pricing, ops: tuple[str, ...]) -> Totals:
    """One layer's conversions of all microbatches, and its parameters once a step."""
    totals: Totals = {}
    work, mesh = pricing.work, pricing.tables.mesh
    count = work.candidate.num_microbatches
    done: set[tuple[str, int, int]] = set()
    parameters: dict[str, None] = {}
    for full_name in ops:
        name = pricing.folded.representative.get(full_name, full_name)
        for use in pricing.uses(name):
            value = use[0]
            if value in pricing.tables.parameters:
                parameters[value] = None
            if use in done:
                continue
            done.add(use)
            times = count * (work.forward_runs(name) + pricing.tables.values[value].again)
            for move, size, often in _passes(pricing, use, times, count):
                sent = ring_bytes(move, size, mesh.axis_sizes[move.axis])
                key = AXES[move.axis], "activations"
                _add(totals, key, often * sent, often * mesh.collective(move, size).time_s)
    for name in parameters:
        choice = pricing.tables.parameters[name].strategies[pricing.chosen[f"parameter:{name}"]]
        value_ = pricing.tables.parameters[name].value
        moves = [(1, *gathered) for gathered in gather_moves(value_, choice, mesh.axis_sizes)]
        if work.training:
            times = count if reduces_each(choice) else 1
            reduced = gradient_moves(value_, choice, mesh.axis_sizes)
            moves += [(times, *each) for each in reduced]
        for often, move, size in moves:
            sent = ring_bytes(move, size, mesh.axis_sizes[move.axis])
            key = AXES[move.axis], "parameters"
            _add(totals, key, often * sent, often * mesh.collective(move, size).time_s)
    return totals


def _passes(
    pricing: Pricing, use: tuple[str, int, int], ahead: float, back: float
) -> Iterator[tuple[Move, float, float]]:
    """(move, bytes of the whole tensor, times a step) of a value's conversion, both passes."""
    value, p, q = use
    table, sizes = pricing.tables.values[value], pricing.tables.mesh.axis_sizes
    source, target = table.made[p], table.wanted[q]
    entry = pricing.graph.values[value]
    for move in transition(source.value, target.value, sizes):
        yield move, entry.meta.size_bytes, ahead
    if entry.requires_grad and pricing.work.training:
        for move in transition(target.grad, source.grad, sizes):
            yield move, entry.meta.size_bytes, back


def _add_boundary(
    totals: Totals,
    priced: Priced,
    solver: CandidateSolver,
    layer: int,
    sizes: tuple[float, float],
) -> None:
    """The boundary behind a layer: forward what was made, backward its gradient."""
    sent, gathered = sizes
    passes = (2 if solver.training else 1) * priced.candidate.num_microbatches
    _add(totals, ("pp", "boundary"), passes * sent, passes * priced.send_s[layer])
    if gathered:  # what tensor parallel ranks put together again behind it: in send_s already
        tp = priced.candidate.tp
        _add(totals, ("tp", "boundary"), passes * gathered * (tp - 1) / tp, 0.0)
