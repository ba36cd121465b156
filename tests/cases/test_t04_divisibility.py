# SPDX-License-Identifier: Apache-2.0
"""T04: head counts and odd device counts: searched plans always divide and run, refusals name
valid values and a way out."""

from __future__ import annotations

import math
import re

import pytest
import torch
from cases.catalog import build
from cases.models import Heads, mean_square
from cases.running import TOLERANCE, plain_cluster, run, train

import autoplan
from autoplan.plan import Plan


def _optimize(heads: int, num_devices: int, **pins: object) -> Plan:
    with torch.device("meta"):
        model, x = Heads(heads), torch.empty(840, 4, 8 * heads)
    return autoplan.optimize(
        model,
        plain_cluster(num_devices),
        {"x": x},
        loss_fn=mean_square,
        pins=autoplan.Pins(**pins),  # type: ignore[arg-type]  # checked by Pins itself
        time_limit_s=3.0,
    )


def _refusal(heads: int, num_devices: int, **pins: object) -> str:
    with pytest.raises(autoplan.InfeasibleError) as refusal:
        _optimize(heads, num_devices, **pins)
    return str(refusal.value)


def _way_out(message: str) -> int:
    """The number of devices of the layout that the refusal offers."""
    found = re.search(r"tp=(\d+), dp=(\d+), pp=(\d+) with \d+ microbatch", message)
    assert found is not None, message
    return math.prod(map(int, found.groups()))


@pytest.mark.parametrize(
    ("heads", "num_devices"),
    [(12, 5), (14, 7), (28, 3), (40, 6), (64, 2), (52, 4)],
)
def test_searched_plans_divide_and_use_every_device(heads: int, num_devices: int) -> None:
    plan = _optimize(heads, num_devices)
    layout = plan.layout
    assert heads % layout.tp == 0
    assert 840 % (layout.dp * plan.schedule.num_microbatches) == 0
    ranks = [r for s in plan.stages for r in s.ranks]
    assert len(ranks) == len(set(ranks)) == layout.dp * layout.tp * layout.pp
    assert plan.search.idle_devices == num_devices - len(ranks)
    assert plan.search.idle_devices == 0 or plan.search.idle_reason


@pytest.mark.distributed
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("heads", [12, 14, 28])
def test_searched_plans_run(heads: int, num_devices: int) -> None:
    """Devices of 10 MFLOP/s make every one of them worth using."""
    model, inputs, loss_fn = build(f"heads_{heads}")
    cluster = plain_cluster(num_devices, flop_per_s=1e7)
    plan = autoplan.optimize(model, cluster, inputs, loss_fn=loss_fn)
    assert plan.search.idle_devices == 0
    outcomes = run(num_devices, train, plan.to_json(), f"heads_{heads}", 1)
    assert max(o.worst for o in outcomes) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "num_devices", "degree", "valid"),
    [
        (52, 8, 8, "1, 2, 4"),
        (12, 8, 8, "1, 2, 3, 4, 6"),
        (28, 7, 6, "1, 2, 4, 7"),
        (40, 6, 3, "1, 2, 4, 5"),
    ],
)
def test_refusal_lists_valid_degrees_and_a_complete_layout(
    heads: int, num_devices: int, degree: int, valid: str
) -> None:
    message = _refusal(heads, num_devices, tp=degree)
    assert f"{heads} heads, which tp={degree} does not divide (valid tp: {valid})" in message
    assert _way_out(message) == num_devices


def test_refusal_names_the_module_once() -> None:
    """Eight equal blocks have one reason."""
    message = _refusal(28, 7, tp=6)
    assert message.count("blocks.") == 1


def test_two_broken_rules_are_told_together() -> None:
    message = _refusal(64, 6, tp=3, num_microbatches=11)
    assert "64 heads, which tp=3 does not divide (valid tp: 1, 2, 4)" in message
    assert "a batch of 840 does not divide into 11 microbatches" in message
    assert _way_out(message) == 6
