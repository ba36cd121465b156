# SPDX-License-Identifier: Apache-2.0
"""The integer program of intra_op.py, gathered column by column and row by row.

In comes an IntraOpProblem and an objective, out goes MathOpt's ModelProto, filled from numpy
arrays: building a model expression by expression takes longer than solving it. Strategies that
another one beats in everything get no column. The program is written out at the head of
intra_op.py, whose numbers the functions here carry; solving it is there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from ortools.math_opt import model_pb2  # type: ignore[import-untyped]  # has no stubs

if TYPE_CHECKING:
    from autoplan.solver.intra_op import Edge, IntraOpProblem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """What to minimise: a number per strategy, conversion (inf: forbidden) and transient byte."""

    nodes: tuple[Floats, ...]
    conversions: tuple[Floats, ...]
    transient: float


class Program:
    """A mixed-integer program gathered in columns, rows and entries, all as arrays."""

    def __init__(self) -> None:
        self.num_columns = 0
        self.num_rows = 0
        self._bounds: list[tuple[float, float]] = []
        self._row_parts: list[Ints] = []
        self._column_parts: list[Ints] = []
        self._value_parts: list[Floats] = []

    def add_rows(self, count: int, lower: float, upper: float) -> Ints:
        """Indices of `count` new rows with the same bounds."""
        self._bounds += [(lower, upper)] * count
        self.num_rows += count
        return np.arange(self.num_rows - count, self.num_rows)

    def add_columns(self, count: int) -> Ints:
        """Indices of `count` new columns."""
        self.num_columns += count
        return np.arange(self.num_columns - count, self.num_columns)

    def add(self, rows: Ints, columns: Ints, values: float | Floats) -> None:
        """Adds entries; no (row, column) may come twice."""
        self._row_parts.append(rows)
        self._column_parts.append(columns)
        self._value_parts.append(np.broadcast_to(np.asarray(values, dtype=float), rows.shape))

    def to_proto(self, objective: Floats, upper: Floats, num_integers: int) -> model_pb2.ModelProto:
        """The program for MathOpt: minimise, columns from 0 to `upper`, the first ones integer."""
        proto = model_pb2.ModelProto()
        variables = proto.variables
        variables.ids.extend(range(self.num_columns))
        variables.lower_bounds.extend([0.0] * self.num_columns)
        variables.upper_bounds.extend(upper.tolist())
        variables.integers.extend(i < num_integers for i in range(self.num_columns))
        used = np.flatnonzero(objective)
        proto.objective.linear_coefficients.ids.extend(used.tolist())
        proto.objective.linear_coefficients.values.extend(objective[used].tolist())
        proto.linear_constraints.ids.extend(range(self.num_rows))
        proto.linear_constraints.lower_bounds.extend(lower for lower, _ in self._bounds)
        proto.linear_constraints.upper_bounds.extend(upper for _, upper in self._bounds)
        if self._row_parts:
            rows = np.concatenate(self._row_parts)
            columns = np.concatenate(self._column_parts)
            values = np.concatenate(self._value_parts)
            order = np.lexsort((columns, rows))
            order = order[values[order] != 0.0]
            matrix = proto.linear_constraint_matrix
            matrix.row_ids.extend(rows[order].tolist())
            matrix.column_ids.extend(columns[order].tolist())
            matrix.coefficients.extend(values[order].tolist())
        return proto


@dataclass(slots=True, eq=False)
class Draft:
    """A program under construction, with what its parts need from each other.

    Attributes:
        kept: Per op, the strategies that are worth a column.
        columns: Per op, the columns of those.
        costs: (columns, objective) parts, summed by column at the end.
        sizes: (columns, bytes) parts, likewise.
        forbidden: Columns fixed at 0.
        usage: Per group, per edge: (columns, pairs), e[p,q] being the sum of its pair's columns.
    """

    problem: IntraOpProblem
    objective: Objective
    program: Program
    kept: list[Ints]
    columns: list[Ints]
    costs: list[tuple[Ints, Floats]]
    sizes: list[tuple[Ints, Floats]]
    forbidden: list[Ints]
    usage: dict[int, list[tuple[Ints, Ints]]]

    def total(self, parts: list[tuple[Ints, Floats]]) -> Floats:
        """Parts summed by column."""
        total = np.zeros(self.program.num_columns)
        for columns, values in parts:
            np.add.at(total, columns, values)
        return total


def _worth_keeping(draft_edges: list[Ints], cost: Floats, sizes: tuple[Floats, ...]) -> Ints:
    """Strategies of an op not dominated by one of equal layouts, no dearer and no larger.

    Args:
        draft_edges: Per edge end at this op, (strategies,) its layouts.
        cost: (strategies,) objective.
        sizes: Further (strategies,) numbers of which less is better.
    """
    alive = np.flatnonzero(np.isfinite(cost))
    if len(alive) <= 1:
        return alive
    keys = list(zip(*(layouts[alive].tolist() for layouts in draft_edges))) or [()] * len(alive)
    numbers = list(zip(*(values[alive].tolist() for values in (cost, *sizes))))
    best: dict[tuple[int, ...], list[int]] = {}
    for at in sorted(range(len(alive)), key=lambda i: (numbers[i], i)):
        rivals = best.setdefault(keys[at], [])
        if not any(all(x <= y for x, y in zip(numbers[r], numbers[at])) for r in rivals):
            rivals.append(at)
    return alive[sorted(at for rivals in best.values() for at in rivals)]


def add_nodes(problem: IntraOpProblem, objective: Objective, limited: bool) -> Draft | None:
    """Columns x and row 1 of every op; None where an op has no strategy of finite cost."""
    ends: list[list[Ints]] = [[] for _ in problem.node_cost_s]
    for edge in problem.edges:
        ends[edge.producer].append(edge.produced)
        ends[edge.consumer].append(edge.consumed)
    program = Program()
    draft = Draft(problem, objective, program, [], [], [], [], [], {})
    for node, cost in enumerate(objective.nodes):
        held, transient = problem.node_bytes[node], problem.node_transient_bytes[node]
        sizes = (held, transient) if limited else ((transient,) if objective.transient else ())
        kept = _worth_keeping(ends[node], cost, sizes)
        if not len(kept):
            return None
        columns = program.add_columns(len(kept))
        program.add(np.repeat(program.add_rows(1, 1.0, 1.0), len(kept)), columns, 1.0)
        draft.kept.append(kept)
        draft.columns.append(columns)
        draft.costs.append((columns, cost[kept]))
        draft.sizes.append((columns, held[kept]))
    return draft


def add_edge(draft: Draft, edge: Edge) -> None:
    """Columns e and rows 2 and 3 of an edge; where one end has one layout, x itself says e."""
    matrix = draft.objective.conversions[edge.group]
    produced = edge.produced[draft.kept[edge.producer]]
    consumed = edge.consumed[draft.kept[edge.consumer]]
    layouts_p, layouts_q = np.unique(produced), np.unique(consumed)
    if len(layouts_p) == 1 or len(layouts_q) == 1:
        if len(layouts_p) == 1:
            columns = draft.columns[edge.consumer]
            pairs = layouts_p[0] * matrix.shape[1] + consumed
        else:
            columns = draft.columns[edge.producer]
            pairs = produced * matrix.shape[1] + layouts_q[0]
        possible = np.isfinite(matrix.ravel()[pairs])
        draft.forbidden.append(columns[~possible])
        draft.usage.setdefault(edge.group, []).append((columns[possible], pairs[possible]))
        return
    program = draft.program
    at_p, at_q = np.nonzero(np.isfinite(matrix[np.ix_(layouts_p, layouts_q)]))
    columns = program.add_columns(len(at_p))
    for at, layouts, own, node in (
        (at_p, layouts_p, produced, edge.producer),
        (at_q, layouts_q, consumed, edge.consumer),
    ):
        rows = program.add_rows(len(layouts), 0.0, 0.0)
        program.add(rows[at], columns, 1.0)
        program.add(rows[np.searchsorted(layouts, own)], draft.columns[node], -1.0)
    pairs = layouts_p[at_p] * matrix.shape[1] + layouts_q[at_q]
    draft.usage.setdefault(edge.group, []).append((columns, pairs))


def add_groups(draft: Draft) -> None:
    """What conversions cost and hold: on e where one edge can use a pair, else on y with rows 4."""
    program = draft.program
    for group, edges in draft.usage.items():
        costs = draft.objective.conversions[group].ravel()
        sizes = draft.problem.conversion_bytes[group].ravel()
        priced = np.isfinite(costs) & ((costs != 0.0) | (sizes != 0.0))
        users = np.zeros(len(costs), dtype=np.int64)
        for _, pairs in edges:
            users[np.unique(pairs)] += 1
        shared = np.flatnonzero(priced & (users > 1))
        y = np.full(len(costs), -1, dtype=np.int64)
        y[shared] = program.add_columns(len(shared))
        draft.costs.append((y[shared], costs[shared]))
        draft.sizes.append((y[shared], sizes[shared]))
        for columns, pairs in edges:
            alone = priced[pairs] & (users[pairs] == 1)
            draft.costs.append((columns[alone], costs[pairs[alone]]))
            draft.sizes.append((columns[alone], sizes[pairs[alone]]))
            columns, pairs = columns[y[pairs] >= 0], pairs[y[pairs] >= 0]
            distinct = np.unique(pairs)
            rows = program.add_rows(len(distinct), 0.0, np.inf)
            program.add(rows, y[distinct], 1.0)
            program.add(rows[np.searchsorted(distinct, pairs)], columns, -1.0)


def add_memory(draft: Draft, limit: float | None) -> float:
    """Column T and rows 5. T counts from the least that any choice needs, which is returned."""
    problem, program = draft.problem, draft.program
    needs = [problem.node_transient_bytes[v][kept] for v, kept in enumerate(draft.kept)]
    least = max((float(need.min()) for need in needs), default=0.0)
    if limit is None and not draft.objective.transient:
        return least
    held = draft.total(draft.sizes)
    scale = max(limit or 0.0, float(held.max(initial=0.0)), least, 1.0)
    extra = program.add_columns(1)
    draft.costs.append((extra, np.array([draft.objective.transient * scale])))
    for columns, need in zip(draft.columns, needs):
        above = np.flatnonzero(need > least)
        if len(above):
            row = program.add_rows(1, 0.0, np.inf)
            program.add(row, extra, 1.0)
            program.add(np.repeat(row, len(above)), columns[above], (least - need[above]) / scale)
    if limit is not None:
        row = program.add_rows(1, -np.inf, (limit - least) / scale)
        used = np.flatnonzero(held)
        program.add(np.repeat(row, len(used)), used, held[used] / scale)
        program.add(row, extra, 1.0)
    return least
