# SPDX-License-Identifier: Apache-2.0
"""Experts split over an axis, run on gloo processes: loss and gradients equal one device's."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers the grouped product
from parity_table import slow_cluster
from pool import run
from torch import Tensor, nn

import autoplan

EXPERTS = 4


class Experts(nn.Module):
    """A router and experts; one expert gets no row, another most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 16))
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        grouped_mm = torch.ops.transformers.grouped_mm_fallback
        rows = x.flatten(0, 1)
        bias = torch.tensor([4.0, 1.0, 0.0, -100.0], dtype=x.dtype)
        weight, expert = (self.router(rows) + bias).softmax(-1).topk(2)
        sorted_expert, order = expert.flatten().sort()
        counts = torch.histc(sorted_expert.float(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        y = grouped_mm(rows[order // 2], self.up, ends).relu()
        y = grouped_mm(y, self.down, ends) * weight.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        out = y[back].unflatten(0, (-1, 2)).sum(1)
        return {"loss": (out + rows).square().mean()}


def build() -> tuple[Experts, dict[str, Tensor]]:
    torch.manual_seed(5)
    model = Experts().double()
    return model, {"x": torch.randn(4, 4, 8, dtype=torch.float64)}


def largest_error(rank: int, plan: str) -> float:
    """Of loss and every gradient, relative to one device's."""
    model, batch = build()
    parallel = autoplan.parallelize(model, autoplan.Plan.from_json(plan))
    loss = parallel.forward_backward(**batch)
    whole, _ = build()
    expected = whole(**batch)["loss"]
    expected.backward()
    errors = [float((loss - expected).abs() / expected)]
    for name, found in parallel.named_parameters():
        wanted = whole.get_parameter(name).grad
        assert wanted is not None
        errors.append(float((found.grad.full_tensor() - wanted).norm() / wanted.norm()))
    return max(errors)


LAYOUTS = [
    pytest.param(dict(tp=2, dp=1), {"up": "RS(0)", "down": "RS(0)"}, id="experts"),
    pytest.param(dict(tp=2, dp=1), {"up": "RS(2)", "down": "RS(1)"}, id="inside-experts"),
    pytest.param(
        dict(tp=1, dp=2, num_microbatches=2), {"up": "RR", "down": "RR"}, id="rows-in-microbatches"
    ),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("degrees", "placements"), LAYOUTS)
def test_split_experts_equal_one_device(
    degrees: dict[str, int], placements: dict[str, str]
) -> None:
    model, batch = build()
    pins = autoplan.Pins(pp=1, zero=0, placements=placements, **degrees)  # type: ignore[arg-type]
    plan = autoplan.optimize(model, slow_cluster(2), batch, pins=pins)
    assert {n: plan.parameters[n].spec for n in placements} == placements
    assert plan.unruled_ops == ()
    assert max(run(2, largest_error, plan.to_json())) < 1e-9
