# SPDX-License-Identifier: Apache-2.0
"""T09: dropout draws equal masks where ranks hold the same part, different ones where they do not,
and the same ones again."""

from __future__ import annotations

import math
import random
from functools import lru_cache

import numpy as np
import pytest
import torch
from cases.catalog import build
from cases.running import TOLERANCE, error, plain_cluster, plan_case, run, whole
from torch import Tensor

import autoplan
from autoplan.plan import Plan

COLUMN_ROW = {"u.weight": "RS(0)", "w.weight": "RS(1)"}
PINS: dict[str, dict[str, object]] = {
    "tp": {"tp": 2, "dp": 1, "pp": 1, "placements": COLUMN_ROW},
    "dp": {"tp": 1, "dp": 2, "pp": 1, "zero": 0},
}


@lru_cache
def planned(layout: str) -> Plan:
    return plan_case("drops", 2, **PINS[layout])


def masks(rank: int, text: str, seed: int, training: bool = True) -> tuple[Tensor, Tensor]:
    """The hidden and the output tensor of one forward pass; the seed differs by rank unless it is
    rank 0's."""
    torch.manual_seed(seed + 1000 * rank)  # ranks take rank 0's
    model, inputs, loss_fn = build("drops")
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    parallel.train(training)
    hidden, output = parallel(**inputs)
    return hidden.detach(), output.detach()


def linearity(rank: int, text: str, seed: int) -> dict[str, tuple[float, float]]:
    """Loss, and the product of every weight with its gradient."""
    torch.manual_seed(seed)
    model, inputs, loss_fn = build("drop_blocks")
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    loss = float(parallel.forward_backward(**inputs).detach())
    found = {}
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is not None, "every weight has a gradient"
        product = (whole(parameter.detach()) * whole(parameter.grad)).sum()
        found[name] = (loss, float(product))
    return found


def two_steps(rank: int, text: str) -> list[float]:
    """The losses of two steps with one batch."""
    torch.manual_seed(3)
    model, inputs, loss_fn = build("drop_blocks")
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=loss_fn)
    return [float(parallel.forward_backward(**inputs).detach()) for _ in range(2)]


def _zeros(tensor: Tensor) -> Tensor:
    return tensor == 0.0


@pytest.mark.distributed
def test_hidden_mask_differs_between_the_parts_of_a_split_tensor() -> None:
    plan = planned("tp")
    outputs = [plan.strategies[i].outputs[0] for n, i in plan.op_strategies.items() if "drop" in n]
    assert outputs[0].startswith("RS(1)"), "the hidden tensor is split over tp"
    hidden, _ = run(2, masks, plan.to_json(), 1)[0]
    assert not torch.equal(_zeros(hidden[:, :128]), _zeros(hidden[:, 128:]))


@pytest.mark.distributed
def test_output_and_its_mask_are_the_same_on_all_tensor_parallel_ranks() -> None:
    (h0, y0), (h1, y1) = run(2, masks, planned("tp").to_json(), 1)
    assert torch.equal(y0, y1)
    assert torch.equal(h0, h1)
    assert 0 < int(_zeros(y0).sum()) < y0.numel()


@pytest.mark.distributed
def test_masks_differ_between_replicas() -> None:
    """Eight equal rows, four on each replica: the halves drop different elements."""
    hidden, output = run(2, masks, planned("dp").to_json(), 1)[0]
    for tensor in (hidden, output):
        assert not torch.equal(_zeros(tensor[:4]), _zeros(tensor[4:]))
        assert len({tuple(row.tolist()) for row in _zeros(tensor)}) == 8


@pytest.mark.distributed
@pytest.mark.parametrize("layout", PINS)
def test_keep_rate_seed_and_scale(layout: str) -> None:
    """A half stays, within four standard deviations; what stays is doubled; the seed decides
    all."""
    text = planned(layout).to_json()
    hidden, output = run(2, masks, text, 1)[0]
    again = run(2, masks, text, 1)[0]
    other = run(2, masks, text, 2)[0]
    for tensor in (hidden, output):
        kept = 1.0 - float(_zeros(tensor).double().mean())
        assert abs(kept - 0.5) < 4.0 * math.sqrt(0.25 / tensor.numel())
    assert torch.allclose(hidden[hidden != 0], torch.tensor(2.0 * 6.4, dtype=torch.float64))
    assert all(map(torch.equal, (hidden, output), again))
    assert not torch.equal(_zeros(hidden), _zeros(other[0]))
    assert not torch.equal(_zeros(output), _zeros(other[1]))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", PINS)
def test_evaluation_equals_one_device(layout: str) -> None:
    model, inputs, _ = build("drops")
    expected = model.eval()(**inputs)
    for found in run(2, masks, planned(layout).to_json(), 1, False):
        assert max(map(error, found, expected)) < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2, "dp": 1, "pp": 1, "placements": {"blocks.*.0.weight": "RS(0)"}},
        {"tp": 1, "dp": 2, "pp": 1},
        {"tp": 1, "dp": 1, "pp": 2},
    ],
    ids=["tp", "dp", "pp"],
)
def test_backward_uses_the_masks_of_the_forward_pass(
    pins: dict[str, object], recompute: bool
) -> None:
    """Biases are 0 and relu is positively homogeneous, so the loss is linear in each weight alone:
    loss = <weight, gradient>.

    A mask drawn anew in backward breaks the identity (Euler's theorem on homogeneous functions).
    """
    plan = plan_case("drop_blocks", 2, **pins, recompute=recompute, num_microbatches=2)
    assert any(s.recompute for s in plan.stages) == recompute
    for found in run(2, linearity, plan.to_json(), 7):
        weights = {n: v for n, v in found.items() if n.endswith("weight")}
        assert weights
        for loss, product in weights.values():
            assert abs(loss - product) < TOLERANCE * abs(loss)


@pytest.mark.distributed
def test_recomputation_changes_no_mask() -> None:
    """The same plan with and without it: equal losses and gradients."""
    pins = {"tp": 1, "dp": 2, "pp": 1, "num_microbatches": 2}
    found = [
        run(2, linearity, plan_case("drop_blocks", 2, **pins, recompute=r).to_json(), 7)[0]
        for r in (False, True)
    ]
    for name, figures in found[0].items():
        assert figures == pytest.approx(found[1][name], rel=TOLERANCE)


@pytest.mark.distributed
def test_every_step_draws_anew() -> None:
    """And both ranks agree on every step's loss."""
    plan = plan_case("drop_blocks", 2, tp=1, dp=2, pp=1, num_microbatches=2)
    first, second = run(2, two_steps, plan.to_json())
    assert first == second
    assert first[0] != first[1]


def test_planning_leaves_every_random_state_unchanged() -> None:
    model, inputs, loss_fn = build("drops")
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    autoplan.optimize(model, plain_cluster(2), inputs, loss_fn=loss_fn)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
