# SPDX-License-Identifier: Apache-2.0
"""T03: two key-value heads under tensor parallel degrees of 2, 4 and 8: exact, and never a
fraction of a head."""

from __future__ import annotations

import math

import pytest
import torch
from cases.catalog import build
from cases.models import GroupedQuery
from cases.running import TOLERANCE, plain_cluster, plan_case, run, train

import autoplan
from autoplan.placements import Shard, parse_layout, parse_spec
from autoplan.plan import Plan

HEADS = {"q.weight": "RS(0)", "o.weight": "RS(1)"}
COLUMNS = {**HEADS, "k.weight": "RS(0)", "v.weight": "RS(0)"}
REPLICATED = {**HEADS, "k.weight": "RR", "v.weight": "RR"}


def _forced(degree: int, placements: dict[str, str]) -> Plan:
    return plan_case("grouped_query", degree, tp=degree, dp=1, pp=1, placements=placements)


def _views(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """(op, local shape) of the views in heads: query, key, value."""
    whole = {"view": (2, 5, 8, 16), "view_1": (2, 5, 2, 16), "view_2": (2, 5, 2, 16)}
    sizes = (plan.layout.dp, plan.layout.tp)
    found = []
    for name, shape in whole.items():
        layout = parse_layout(plan.strategies[plan.op_strategies[name]].outputs[0])
        found.append((name, layout.value.local_shape(shape, sizes)))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("degree", "placements"),
    [(2, COLUMNS), (4, COLUMNS), (4, REPLICATED), (2, REPLICATED)],
    ids=["2-heads", "4-columns", "4-replicated", "2-replicated"],
)
def test_output_and_gradients_equal_one_device(degree: int, placements: dict[str, str]) -> None:
    """The gradients of k and v, summed over the query heads that share them, included."""
    plan = _forced(degree, placements)
    outcomes = run(degree, train, plan.to_json(), "grouped_query", 2)
    assert max(o.worst for o in outcomes) < TOLERANCE
    for outcome in outcomes:
        assert {"q.weight", "k.weight", "v.weight", "o.weight"} <= set(outcome.gradients)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("placements", [COLUMNS, REPLICATED], ids=["columns", "replicated"])
def test_heads_are_never_cut(degree: int, placements: dict[str, str]) -> None:
    """Every rank sees whole heads of 16, whatever the parameters' storage; queries are split by
    heads."""
    views = dict(_views(_forced(degree, placements)))
    assert all(shape[-1] == 16 and shape[2] >= 1 for shape in views.values())
    assert views["view_1"][2] in (1, 2)
    if degree == 2:
        assert views["view"][2] == 4
    if degree > 2:
        assert views["view_1"][2] == 2, "two heads do not divide by more than two ranks"


def test_two_ranks_split_by_heads_alone() -> None:
    """Four query heads and one key-value head a rank; the only collective is that of the row-split
    output."""
    plan = _forced(2, COLUMNS)
    assert dict(_views(plan)) == {
        "view": (2, 5, 4, 16),
        "view_1": (2, 5, 1, 16),
        "view_2": (2, 5, 1, 16),
    }
    assert plan.unruled_ops == ()
    assert [c.value for c in plan.conversions] == ["linear_3"]


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_weights_are_charged_as_they_are_held(degree: int) -> None:
    """Replicated key and value weights count whole on every rank."""
    plan = _forced(degree, REPLICATED if degree > 1 else {})
    sizes = (plan.layout.dp, plan.layout.tp)
    held = sum(
        math.prod(parse_spec(p.spec).local_shape(p.shape, sizes)) for p in plan.parameters.values()
    )
    assert plan.stages[0].estimate.memory.parameters == 8 * held
    if degree == 4:
        assert held == 2 * 128 * 128 // 4 + 2 * 32 * 128


@pytest.mark.parametrize("num_devices", [4, 8])
def test_searched_plans_use_degrees_that_run(num_devices: int) -> None:
    """A big batch on slow devices makes every device worth it; whatever is chosen divides."""
    torch.manual_seed(0)
    model = GroupedQuery()
    inputs = {"x": torch.randn(16, 512, 128)}
    plan = autoplan.optimize(
        model,
        plain_cluster(num_devices, bytes_per_s=1e12),
        inputs,
        loss_fn=build("grouped_query")[2],
    )
    sizes = (plan.layout.dp, plan.layout.tp)
    for entry in plan.parameters.values():
        parse_spec(entry.spec).local_shape(
            entry.shape, sizes
        )  # raises where a split does not divide
    assert 8 % plan.layout.tp == 0


@pytest.mark.distributed
def test_searched_plan_with_tensor_parallelism_runs() -> None:
    """Only tp is pinned, on fast links: the search splits by itself, and the run is exact."""
    model, inputs, loss_fn = build("grouped_query")
    plan = autoplan.optimize(
        model,
        plain_cluster(4, bytes_per_s=1e15),
        inputs,
        loss_fn=loss_fn,
        pins=autoplan.Pins(tp=4, dp=1, pp=1, placements={"q.weight": "RS(0)"}),
    )
    spec = parse_spec(plan.parameters["q.weight"].used.partition("~")[0])
    assert isinstance(spec[1], Shard)
    outcomes = run(4, train, plan.to_json(), "grouped_query", 1)
    assert max(o.worst for o in outcomes) < TOLERANCE
