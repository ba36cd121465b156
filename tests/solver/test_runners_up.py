# SPDX-License-Identifier: Apache-2.0
"""Runners-up against the searches that a user could run instead: pins on a parameter, on a cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_search import search_of, slow_cluster

from autoplan.errors import InfeasibleError
from autoplan.placements import R, Shard, ShardingSpec
from autoplan.solver.pins import Pinned
from autoplan.solver.runners_up import cut_runners_up, parameter_runners_up
from autoplan.solver.search import Search

PINNED = Pinned(tp=2, dp=2, pp=1, num_microbatches=1, recompute=False)


def pinned_step(search: Search, name: str, spec: str) -> tuple[float, tuple[object, object]] | None:
    """Step and layout of a parameter with this pin on it; None where it is refused."""
    pinned = replace(search.pinned, placements=((name, spec),))
    try:
        best = search.like(pinned=pinned).run()
    except InfeasibleError:
        return None
    chosen = best.parameters[name]
    return best.step_s, (chosen.spec, chosen.used)


@pytest.mark.parametrize(("name", "most"), [("mlp", 6), ("gpt2", 6)])
def test_no_pin_on_a_parameter_is_faster_than_its_runner_up(name: str, most: int) -> None:
    search = search_of(name, slow_cluster(4, link=1e8), PINNED)
    best = search.best
    assert best is not None
    runners_up = parameter_runners_up(best, search.solver(best.candidate))
    assert runners_up
    specs = [R, Shard(0), Shard(1)]
    texts = [str(ShardingSpec((a, b))) for a in specs for b in specs]
    reached = 0
    for parameter in list(runners_up)[:most]:
        runner_up = runners_up[parameter]
        mine = best.parameters[parameter].spec, best.parameters[parameter].used
        assert runner_up.step_time_s >= -1e-9 * best.step_s
        assert (runner_up.spec, runner_up.used) != tuple(map(str, mine))
        for text in texts:
            found = pinned_step(search, parameter, text)
            if found is not None and found[1] != mine:
                extra_s = found[0] - best.step_s
                assert extra_s >= runner_up.step_time_s - 1e-9 * best.step_s, (parameter, text)
                reached += extra_s == pytest.approx(runner_up.step_time_s, abs=1e-9 * best.step_s)
    assert reached > 0  # some pin is the runner-up itself


def test_the_runner_up_of_a_cut_is_the_best_pin_of_layers_beside_it() -> None:
    pinned = Pinned(tp=1, dp=1, pp=2, num_microbatches=4, recompute=False, schedule="1f1b")
    search = search_of("gpt2", slow_cluster(2), pinned)
    best = search.best
    assert best is not None
    runners_up = cut_runners_up(best, search.solver(best.candidate))
    assert set(runners_up) == {0, 1}
    counts = [last - first for first, last in best.assignment.bounds]
    steps = {}
    for moved in (-1, 1):
        layers = (counts[0] + moved, counts[1] - moved)
        if min(layers) >= 1:
            found = search.like(pinned=replace(pinned, stage_layers=layers)).run()
            steps[layers] = found.step_s - best.step_s
    quickest = min(steps, key=lambda k: steps[k])
    assert runners_up[0].stage_layers == quickest
    assert runners_up[0].step_time_s == pytest.approx(steps[quickest], rel=1e-6)
    assert steps[quickest] >= 0
