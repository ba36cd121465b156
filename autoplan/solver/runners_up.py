# SPDX-License-Identifier: Apache-2.0
"""What the next best choice would have cost: per parameter another layout, per stage another cut.

In: a finished search. Out: the records that a plan keeps of its runners-up, each one solved and
replayed like the plan itself, with everything else chosen anew around it.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.errors import AutoplanError, InfeasibleError
from autoplan.plan_estimates import CutRunnerUp, ParameterRunnerUp
from autoplan.solver.candidate import Priced
from autoplan.solver.evaluate import CandidateSolver

MOST_PARAMETERS = 48  # the largest of the distinct ones; each takes one program


def parameter_runners_up(best: Priced, solver: CandidateSolver) -> dict[str, ParameterRunnerUp]:
    """Representative parameter -> its runner-up, for those that have one."""
    tables, count = solver.tables.parameters, solver.folded.count
    largest = sorted(tables, key=lambda n: (-count[n] * tables[n].value.meta.numel, n))[
        :MOST_PARAMETERS
    ]
    found = {}
    for name in largest:
        try:
            other = solver.runner_up(best, name)
        except AutoplanError:  # no other layout, or none that fits
            continue
        chosen, mine, theirs = other.parameters[name], best.terms, other.terms
        found[name] = ParameterRunnerUp(
            spec=str(chosen.spec),
            used=str(chosen.used),
            zero=chosen.zero,
            step_time_s=other.step_s - best.step_s,
            compute_s=theirs["compute"] - mine["compute"],
            communication_s=theirs["communication"] - mine["communication"],
            peak_memory_bytes=round(other.peak_bytes - best.peak_bytes),
        )
    return found


def cut_runners_up(best: Priced, solver: CandidateSolver) -> dict[int, CutRunnerUp]:
    """Stage -> the best of the cuts in which it gives one layer to a neighbour or takes one."""
    counts = [last - first for first, last in best.assignment.bounds]
    tried: dict[tuple[int, ...], CutRunnerUp] = {}
    found: dict[int, CutRunnerUp] = {}
    for stage in range(len(counts)):
        options = []
        for moved in _neighbours(counts, stage):
            if moved not in tried:
                tried[moved] = _cut(best, solver, moved)
            options.append(tried[moved])
        if options:
            found[stage] = min(
                options, key=lambda c: (c.step_time_s is None, c.step_time_s or 0.0, c.stage_layers)
            )
    return found


def _neighbours(counts: list[int], stage: int) -> Iterator[tuple[int, ...]]:
    """Layer counts in which one layer crosses one boundary of this stage."""
    for other in (stage - 1, stage + 1):
        if not 0 <= other < len(counts):
            continue
        for giver, taker in ((stage, other), (other, stage)):
            if counts[giver] > 1:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)


def _cut(best: Priced, solver: CandidateSolver, stage_layers: tuple[int, ...]) -> CutRunnerUp:
    try:
        assignment = solver.recut(best, stage_layers)
    except InfeasibleError as error:
        return CutRunnerUp(
            stage_layers=stage_layers, step_time_s=None, peak_memory_bytes=None, reason=str(error)
        )
    return CutRunnerUp(
        stage_layers=stage_layers,
        step_time_s=assignment.step_s - best.step_s,
        peak_memory_bytes=round(max(assignment.memory_bytes) - best.peak_bytes),
        reason="",
    )
