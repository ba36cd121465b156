# SPDX-License-Identifier: Apache-2.0
"""T08: tensors that skip stages, integers and booleans across them, outputs from the middle and
outputs nobody trains."""

from __future__ import annotations

import pytest
from cases.running import TOLERANCE, plan_case, run, train

import autoplan
from autoplan.plan import Plan

STAGES = (1, 1, 1, 4)  # [e1] [e2] [mid] [d2, d1, table, aux]


def _forced(name: str, microbatches: int, schedule: str) -> Plan:
    return plan_case(
        name,
        4,
        pp=4,
        tp=1,
        dp=1,
        num_microbatches=microbatches,
        schedule=schedule,
        stage_layers=STAGES,
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("microbatches", "schedule"), [(2, "gpipe"), (4, "gpipe"), (4, "1f1b"), (8, "1f1b")]
)
def test_outputs_and_all_gradients_equal_one_device(microbatches: int, schedule: str) -> None:
    plan = _forced("skip", microbatches, schedule)
    outcomes = run(4, train, plan.to_json(), "skip", 2)
    assert max(o.worst for o in outcomes) < TOLERANCE
    gradients = [n for o in outcomes for n in o.gradients]
    assert len(gradients) == len(set(gradients)) == 13


@pytest.mark.distributed
@pytest.mark.parametrize(("microbatches", "schedule"), [(2, "gpipe"), (4, "1f1b")])
def test_output_without_a_gradient_does_no_harm(microbatches: int, schedule: str) -> None:
    plan = _forced("skip_first", microbatches, schedule)
    outcomes = run(4, train, plan.to_json(), "skip_first", 2)
    assert max(o.worst for o in outcomes) < TOLERANCE


def test_plan_lists_what_crosses_each_boundary() -> None:
    """x is an input, so cls is made again where it is used; a and b are carried past stages."""
    stages = _forced("skip", 4, "1f1b").stages
    assert [s.layers for s in stages] == [("e1",), ("e2",), ("mid",), ("d2", "d1", "table", "aux")]
    crossing = [[t.name for t in s.receives] for s in stages]
    assert crossing[:3] == [[], ["relu"], ["relu", "relu_1"]]
    assert crossing[3][:2] == ["relu", "relu_1"]
    for stage in stages[1:]:
        for tensor in stage.receives:
            assert tensor.dtype == "float64"
            assert tensor.shape[0] == 2  # rows of one of four microbatches of 8
            assert tensor.size_bytes == 8 * tensor.shape[0] * tensor.shape[1]
            assert tensor.from_stage < stage.index
    assert [t.from_stage for t in stages[3].receives[:2]] == [0, 1]
    assert stages[0].estimate.send_s > 0.0
    assert stages[1].estimate.send_s > stages[0].estimate.send_s, "carried copies are priced"


def test_last_boundary_carries_the_smallest_form() -> None:
    """cat(m, b) is twice as wide as m, and b crosses anyway: what crosses is m, b and a."""
    last = _forced("skip", 4, "1f1b").stages[3]
    assert sorted(t.name for t in last.receives) == ["relu", "relu_1", "relu_2"]


@pytest.mark.distributed
def test_integers_and_booleans_cross_as_they_are() -> None:
    """Made from a parameter's output, so that they cannot be made again: int64 and bool on every
    boundary."""
    plan = _forced("late_class", 4, "1f1b")
    for stage in plan.stages[2:]:  # the second stage may make them, where a arrives anyway
        dtypes = {t.name: (t.dtype, t.size_bytes) for t in stage.receives}
        assert dtypes["argmax"] == ("int64", 2 * 8)
        assert dtypes["lt"] == ("bool", 2 * 16)
    outcomes = run(4, train, plan.to_json(), "late_class", 2)
    assert max(o.worst for o in outcomes) < TOLERANCE


def test_schedule_that_cannot_run_is_refused_and_another_offered() -> None:
    """1F1B has no order for fewer microbatches than stages."""
    with pytest.raises(autoplan.InfeasibleError, match=r"1f1b.*gpipe|at least 4"):
        _forced("skip", 2, "1f1b")
