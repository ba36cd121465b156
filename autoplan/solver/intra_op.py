# SPDX-License-Identifier: Apache-2.0
"""Intra-op: one strategy per op, of least seconds within a device's memory, as an integer program.

x[v,s]: op v takes strategy s; e[p,q]: an edge converts layout p into q; y[g,p,q]: group g pays.

    minimise  sum cost[v,s] x[v,s] + sum cost[g,p,q] y[g,p,q] + price (held + T)
    1  sum_s x[v,s] = 1, x binary                      for each op               add_nodes
    2  sum_q e[p,q] = sum_{s: produced[s] = p} x[u,s]  for each edge (u, v), p   add_edge
    3  sum_p e[p,q] = sum_{s: consumed[s] = q} x[v,s]  for each edge (u, v), q   add_edge
    4  y[g,p,q] >= e[p,q]                              for each edge of group g  add_groups
    5  held = sum bytes[v,s] x[v,s] + sum bytes[g,p,q] y[g,p,q], held + T <= limit,
       T >= sum_s transient[v,s] x[v,s]                for each op               add_memory

The equalities 2 and 3 make the linear relaxation tight, mostly integral: it is solved first. Arrays
come in, choices go out; nothing here knows what a strategy is. The rows are built in program.py.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2  # type: ignore[import-untyped]  # has no stubs
from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]

from autoplan.errors import AutoplanError, InfeasibleError
from autoplan.solver.program import (
    Draft,
    Floats,
    Ints,
    Objective,
    add_edge,
    add_groups,
    add_memory,
    add_nodes,
)
from autoplan.units import format_bytes

# HiGHS works to 1e-7 (primal and dual) and 1e-6 (integrality) on numbers scaled to about 1.
_INTEGRALITY = 1e-6
# Share of the memory limit that a solve gives up after rounding has overstepped the limit.
_MEMORY_SLACK = 2e-6
# A solution this near its bound, relative, counts as proven.
_PROVEN_GAP = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A tensor goes from one op to another.

    Attributes:
        producer: Index of the op that makes it.
        consumer: Index of the op that uses it.
        produced: (strategies of the producer,) layout p each gives, a row of the group's matrices.
        consumed: (strategies of the consumer,) layout q each takes, a column of the matrices.
        group: Edges of one group share their conversions: each (p, q) is made once. All of them
            have one producer.
    """

    producer: int
    consumer: int
    produced: Ints
    consumed: Ints
    group: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IntraOpProblem:
    """Ops with strategies, tensors with layouts, and the memory of one device.

    Attributes:
        node_cost_s: Per op (strategies,) seconds; np.inf forbids a strategy.
        node_bytes: Per op (strategies,) bytes held through the step.
        node_transient_bytes: Per op (strategies,) bytes needed only while the op runs.
        edges: Who uses whose tensors.
        conversion_cost_s: Per group [p, q] seconds, np.inf where impossible.
        conversion_bytes: Per group [p, q] bytes held through the step by the converted copy.
        memory_limit_bytes: Most bytes for what is held plus the largest transient; None: no limit.
    """

    node_cost_s: tuple[Floats, ...]
    node_bytes: tuple[Floats, ...]
    node_transient_bytes: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    conversion_cost_s: tuple[Floats, ...]
    conversion_bytes: tuple[Floats, ...]
    memory_limit_bytes: float | None = None

    def verify(self) -> None:
        """Checks that lengths and indices fit and that numbers are numbers.

        Raises:
            ValueError: An array does not fit; the message names the op, the edge or the group.
        """
        per_node = zip(self.node_cost_s, self.node_bytes, self.node_transient_bytes, strict=True)
        for node, (cost, held, transient) in enumerate(per_node):
            if not (cost.shape == held.shape == transient.shape == (cost.size,) and cost.size):
                raise ValueError(
                    f"op {node} has {cost.shape} costs, {held.shape} bytes, {transient.shape} "
                    "transients; give one of each per strategy, and at least one strategy"
                )
            _check_numbers(f"op {node}", cost, held, transient)
        per_group = zip(self.conversion_cost_s, self.conversion_bytes, strict=True)
        for group, (cost, held) in enumerate(per_group):
            if cost.shape != held.shape or cost.ndim != 2:
                raise ValueError(
                    f"group {group} has {cost.shape} costs and {held.shape} bytes; "
                    "give matrices [p, q] of one shape"
                )
            _check_numbers(f"group {group}", cost, held)
        producers: dict[int, int] = {}
        for index, edge in enumerate(self.edges):
            self._verify_edge(index, edge)
            if producers.setdefault(edge.group, edge.producer) != edge.producer:
                raise ValueError(
                    f"edge {index} of group {edge.group} comes from op {edge.producer}, others of "
                    f"the group from op {producers[edge.group]}; a group has one producer"
                )

    def _verify_edge(self, index: int, edge: Edge) -> None:
        """Raises ValueError unless an edge's arrays fit its ops and its group's matrices."""
        shape = self.conversion_cost_s[edge.group].shape
        ends = (
            ("producer", edge.producer, edge.produced, shape[0]),
            ("consumer", edge.consumer, edge.consumed, shape[1]),
        )
        for name, node, layouts, bound in ends:
            size = self.node_cost_s[node].size
            if layouts.shape != (size,) or layouts.min() < 0 or layouts.max() >= bound:
                raise ValueError(
                    f"edge {index}: layouts {layouts.tolist()} of its {name}, op {node}, do not "
                    f"fit; give {size} indices below {bound}, the size of group {edge.group}"
                )


def _check_numbers(name: str, cost_s: Floats, *sizes_bytes: Floats) -> None:
    """Raises ValueError unless costs are numbers or inf, sizes finite, and none negative."""
    if not (cost_s >= 0.0).all() or any(
        not ((size >= 0.0) & np.isfinite(size)).all() for size in sizes_bytes
    ):
        raise ValueError(
            f"{name} has a negative or undefined cost or size; "
            "costs must be >= 0 or inf, sizes >= 0 and finite"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraOpSolution:
    """One strategy per op.

    Attributes:
        choices: Strategy index per op.
        objective_s: What was minimised: time_s + price * (held_bytes + transient_bytes).
        bound_s: No choice has a smaller objective.
        optimal: Proven: objective and bound agree to one part in a million.
        time_s: Seconds of ops and conversions.
        held_bytes: Bytes held through the step.
        transient_bytes: The largest transient.
    """

    choices: tuple[int, ...]
    objective_s: float
    bound_s: float
    optimal: bool
    time_s: float
    held_bytes: float
    transient_bytes: float


def evaluate(problem: IntraOpProblem, choices: tuple[int, ...]) -> tuple[float, float, float]:
    """Seconds, held bytes and largest transient bytes of given choices, from the problem alone.

    Seconds are infinite where the choices need an impossible conversion.
    """
    time_s = float(sum(cost[s] for cost, s in zip(problem.node_cost_s, choices)))
    held_bytes = float(sum(held[s] for held, s in zip(problem.node_bytes, choices)))
    transient_bytes = float(
        max((need[s] for need, s in zip(problem.node_transient_bytes, choices)), default=0.0)
    )
    conversions = {
        (e.group, int(e.produced[choices[e.producer]]), int(e.consumed[choices[e.consumer]]))
        for e in problem.edges
    }
    for group, p, q in sorted(conversions):
        time_s += float(problem.conversion_cost_s[group][p, q])
        held_bytes += float(problem.conversion_bytes[group][p, q])
    return time_s, held_bytes, transient_bytes


def solve_intra_op(
    problem: IntraOpProblem,
    *,
    byte_price_s_per_byte: float = 0.0,
    time_limit_s: float = 10.0,
) -> IntraOpSolution:
    """The choices of least seconds plus price times bytes, within the memory limit.

    The price is on held bytes and on the largest transient alike, as the memory limit is: solving
    under several prices gives points of the (seconds, bytes) Pareto front.

    Args:
        problem: What to choose from.
        byte_price_s_per_byte: Seconds that a byte is worth.
        time_limit_s: Seconds for the solver; the proven gap is in the solution.

    Raises:
        ValueError: The problem's arrays do not fit together.
        InfeasibleError: Nothing fits the memory limit (`required_bytes` is the least possible
            need), or no choice avoids impossible conversions (the message names the groups).
        AutoplanError: The time limit passed before any solution was found.
    """
    problem.verify()
    price = byte_price_s_per_byte
    objective = Objective(
        tuple(c + price * b for c, b in zip(problem.node_cost_s, problem.node_bytes)),
        tuple(c + price * b for c, b in zip(problem.conversion_cost_s, problem.conversion_bytes)),
        price,
    )
    choices, bound_s = _fit(problem, objective, time.monotonic() + time_limit_s)
    time_s, held_bytes, transient_bytes = evaluate(problem, choices)
    if not np.isfinite(time_s):
        raise AutoplanError(
            f"the solver's choices {choices} need an impossible conversion; "
            "this is a fault of autoplan, please report it with the problem"
        )
    objective_s = time_s + price * (held_bytes + transient_bytes)
    bound_s = min(bound_s, objective_s)
    return IntraOpSolution(
        choices=choices,
        objective_s=objective_s,
        bound_s=bound_s,
        optimal=objective_s - bound_s <= _PROVEN_GAP * abs(objective_s),
        time_s=time_s,
        held_bytes=held_bytes,
        transient_bytes=transient_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Choices, and a bound that no choices can be below, in the objective's unit."""

    choices: tuple[int, ...]
    bound: float


def _fit(
    problem: IntraOpProblem, objective: Objective, deadline: float
) -> tuple[tuple[int, ...], float]:
    """The best choices that keep the memory limit to the byte, and the proven bound.

    The solver keeps the limit to its tolerance only. Where its answer oversteps, it is asked again
    with a little less, and at last for the least bytes.
    """
    limit = problem.memory_limit_bytes
    outcome = _optimise(problem, objective, limit, deadline)
    bound = outcome.bound if outcome else 0.0
    if limit is None:
        if outcome is None:
            raise _impossible(problem, deadline)
        return outcome.choices, bound
    for attempt in (1, 2):
        if outcome is None or sum(evaluate(problem, outcome.choices)[1:]) <= limit:
            break
        outcome = _optimise(problem, objective, limit * (1 - attempt * _MEMORY_SLACK), deadline)
    if outcome is not None and sum(evaluate(problem, outcome.choices)[1:]) <= limit:
        return outcome.choices, bound
    sizes = Objective(
        _where_finite(problem.node_cost_s, problem.node_bytes),
        _where_finite(problem.conversion_cost_s, problem.conversion_bytes),
        1.0,
    )
    least = _optimise(problem, sizes, None, deadline)
    if least is None:
        raise _impossible(problem, deadline)
    _, held_bytes, transient_bytes = evaluate(problem, least.choices)
    required_bytes = held_bytes + transient_bytes
    if required_bytes <= limit:
        return least.choices, bound
    raise InfeasibleError(
        f"the ops need at least {format_bytes(required_bytes)} on each device "
        f"({format_bytes(held_bytes)} held, {format_bytes(transient_bytes)} transient), "
        f"{format_bytes(limit)} are available. Use more devices, smaller microbatches or "
        "recomputation.",
        required_bytes=required_bytes,
        available_bytes=limit,
    )


def _where_finite(costs: tuple[Floats, ...], sizes: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """The sizes, inf where the cost is."""
    return tuple(np.where(np.isfinite(c), size, np.inf) for c, size in zip(costs, sizes))


def _impossible(problem: IntraOpProblem, deadline: float) -> InfeasibleError:
    """Names the fewest ops and conversions of infinite cost that any choice needs."""
    missing = Objective(
        tuple(np.where(np.isfinite(c), 0.0, 1.0) for c in problem.node_cost_s),
        tuple(np.where(np.isfinite(c), 0.0, 1.0) for c in problem.conversion_cost_s),
        0.0,
    )
    outcome = _optimise(problem, missing, None, deadline)
    assert outcome is not None, "with every cost finite and no limit, any choice is possible"
    chosen = outcome.choices
    where = [
        f"op {v} (strategy {s})"
        for v, s in enumerate(chosen)
        if not np.isfinite(problem.node_cost_s[v][s])
    ]
    for edge in problem.edges:
        p, q = edge.produced[chosen[edge.producer]], edge.consumed[chosen[edge.consumer]]
        if not np.isfinite(problem.conversion_cost_s[edge.group][p, q]):
            where.append(
                f"group {edge.group} from op {edge.producer} to op {edge.consumer} "
                f"(layout {p} to {q})"
            )
    return InfeasibleError(
        "every choice of strategies needs something impossible; the least is: "
        f"{', '.join(where)}. Allow that, or loosen the pins on these ops."
    )


def _optimise(
    problem: IntraOpProblem, objective: Objective, limit: float | None, deadline: float
) -> _Outcome | None:
    """The choices of least objective, or None where that is proven impossible.

    Raises:
        AutoplanError: The deadline passed before any choices were found.
    """
    draft = add_nodes(problem, objective, limit is not None)
    if draft is None:
        return None
    num_choices = draft.program.num_columns
    seen: set[tuple[int, int, bytes]] = set()
    for edge in problem.edges:
        # A tensor that an op takes twice in the same layout is converted once: one edge says it.
        key = (edge.group, edge.consumer, edge.consumed.tobytes())
        if key not in seen:
            seen.add(key)
            add_edge(draft, edge)
    add_groups(draft)
    offset = objective.transient * add_memory(draft, limit)
    costs = draft.total(draft.costs)
    upper = np.full(draft.program.num_columns, np.inf)
    upper[:num_choices] = 1.0
    for columns in draft.forbidden:
        upper[columns] = 0.0
    scale = _scale(draft, costs)
    for num_integers in (0, num_choices):
        proto = draft.program.to_proto(costs / scale, upper, num_integers)
        solved = _call_solver(proto, deadline, limit is not None)
        if solved is None:
            return None
        values, bound = solved
        if len(values) and np.abs(values - np.round(values))[:num_choices].max() <= _INTEGRALITY:
            break
    choices = tuple(
        int(kept[np.argmax(values[columns])]) for kept, columns in zip(draft.kept, draft.columns)
    )
    return _Outcome(choices, bound * scale + offset)


def _scale(draft: Draft, costs: Floats) -> float:
    """What to divide the objective by: the dearest op's cheapest strategy, so optima are about 1.

    The largest cost would drown the others: a strategy never taken may cost a million times more.
    """
    typical = max((float(costs[columns].min()) for columns in draft.columns), default=0.0)
    return max(typical, float(costs.max(initial=0.0)) * 1e-5) or 1.0


def _solve_with_retries(
    model: mathopt.Model, parameters: mathopt.SolveParameters
) -> mathopt.SolveResult:
    """HiGHS's result; where it gives up on numbers, asked again by another way through them.

    HiGHS 1.12 ends some of these programs in the status Unknown. OR-Tools 9.15 raises on that, and
    its own conversion of the error then fails with AttributeError.

    Raises:
        AutoplanError: Every way failed.
    """
    ways: tuple[dict[str, object], ...] = (
        {},
        {"random_seed": 7, "scaling": mathopt.Emphasis.HIGH},
        {"random_seed": 3, "lp_algorithm": mathopt.LPAlgorithm.BARRIER},
        {"random_seed": 5, "presolve": mathopt.Emphasis.LOW},
    )
    failure: Exception | None = None
    for way in ways:
        for name, value in way.items():
            setattr(parameters, name, value)
        try:
            return mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        except (AttributeError, RuntimeError, ValueError) as error:
            failure = error
    raise AutoplanError(
        f"the solver failed on the integer program in {len(ways)} ways ({failure}). Please report "
        "it with the model and cluster; pins on tp, pp and dp lead to other programs."
    ) from failure


def _call_solver(
    proto: model_pb2.ModelProto, deadline: float, limited: bool
) -> tuple[Floats, float] | None:
    """Values of the columns and the proven bound; None where the program is infeasible.

    Without presolve, which saves no time here and in HiGHS 1.12 can loop forever on these programs,
    deaf to the time limit. The heuristics that presolve a smaller program are kept only for a
    memory limit, where they are worth a factor of five.

    Raises:
        AutoplanError: The deadline passed without a solution, or the solver failed.
    """
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.05)),
        presolve=mathopt.Emphasis.OFF,
        random_seed=1,
        relative_gap_tolerance=1e-7,
        absolute_gap_tolerance=1e-8,
    )
    parameters.highs.string_options["parallel"] = "off"
    if not limited:
        for name in ("rins", "rens", "root_reduced_cost"):
            parameters.highs.bool_options[f"mip_heuristic_run_{name}"] = False
    result = _solve_with_retries(mathopt.Model.from_model_proto(proto), parameters)
    reason = result.termination.reason
    if reason in (
        mathopt.TerminationReason.INFEASIBLE,
        mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED,
    ):
        return None
    if not result.has_primal_feasible_solution():
        raise AutoplanError(
            f"the solver found no choice of strategies in its time limit ({reason.name}: "
            f"{result.termination.detail or 'no detail'}). Give it more time_limit_s."
        )
    values = np.array(list(result.variable_values().values()))
    return values, float(result.termination.objective_bounds.dual_bound)
