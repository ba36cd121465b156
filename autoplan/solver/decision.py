# SPDX-License-Identifier: Apache-2.0
"""From the best candidate to a decision on the whole graph, with its figures.

In: a `Search` that has found a plan. Out: the representatives' choices expanded to every op and
parameter, and the numbers that a plan reports. Nothing is chosen or priced here.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.cluster import Cluster
from autoplan.plan_estimates import SearchReport
from autoplan.solver.account import idle_reason
from autoplan.solver.assemble import Decision, Figures
from autoplan.solver.candidate import Priced
from autoplan.solver.evaluate import CandidateSolver
from autoplan.solver.figures import make_figures
from autoplan.solver.pricing import shares_boundaries
from autoplan.solver.runners_up import cut_runners_up, parameter_runners_up
from autoplan.solver.search import Search
from autoplan.solver.space import Space


def decide(search: Search) -> tuple[Decision, Figures]:
    """The best candidate as a decision on the whole graph, with its figures."""
    best = search.best
    assert best is not None, "a search that found nothing decides nothing"
    solver, used = search.solver(best.candidate), best.candidate.num_devices
    decision = expand(search.space, search.cluster, best, solver)
    idle = search.cluster.num_devices - used
    report = SearchReport(
        num_candidates=len(search.priced) + len(search.rejected),
        num_rejected=len(search.rejected),
        gap=round(best.gap, 9),
        optimal=best.optimal and search.exhaustive,
        idle_devices=idle,
        idle_reason=idle_reason(search, used) if idle else "",
    )
    figures = make_figures(
        search.space.graph, best, solver, search.limit_bytes, search.cluster, report
    )
    runners_up = parameter_runners_up(best, solver)
    representative = solver.folded.representative
    figures = replace(
        figures,
        cuts=cut_runners_up(best, solver),
        parameters={
            name: runners_up[of]
            for name in decision.parameters
            if (of := representative.get(name, name)) in runners_up
        },
    )
    return decision, figures


def expand(space: Space, cluster: Cluster, priced: Priced, solver: CandidateSolver) -> Decision:
    """The representatives' choices for every op and parameter of the graph."""
    candidate = priced.candidate
    representative = space.layers.representative
    graph = solver.graph
    strategies = {
        op.name: priced.strategies[representative.get(op.name, op.name)] for op in graph.ops
    }
    parameters = {
        v.name: priced.parameters[representative.get(v.name, v.name)]
        for v in graph.of_kind("parameter")
    }
    layers = space.layers.layers
    stages = [layers[a:b] for a, b in priced.assignment.bounds]
    count = candidate.dp * candidate.tp
    return Decision(
        dp=candidate.dp,
        tp=candidate.tp,
        pp=candidate.pp,
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
        strategies=strategies,
        parameters=parameters,
        bounds=tuple((stage[0].first_op, stage[-1].last_op) for stage in stages),
        layers=tuple(tuple(layer.label for layer in stage) for stage in stages),
        recompute=tuple(
            tuple(x.label for x in stage if x.is_block) if candidate.recompute else ()
            for stage in stages
        ),
        ranks=tuple(tuple(cluster.ranks[s * count : (s + 1) * count]) for s in range(candidate.pp)),
        share_boundaries=shares_boundaries(cluster, solver.work),
    )
