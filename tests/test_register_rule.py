# SPDX-License-Identifier: Apache-2.0
"""`autoplan.register_rule`: a user's op gets a rule in one line, if the numbers bear it out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from parity_table import slow_cluster
from pool import RemoteError, run
from torch import Tensor, nn

import autoplan
from autoplan.sharding.rules import unregister


@torch.library.custom_op("autoplan_rules::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    """A product that torch knows nothing of."""
    return x @ weight


@project.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _project_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


project.register_autograd(
    _project_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("autoplan_rules::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    """Rows minus their mean: no split of a row is right."""
    return x - x.mean(-1, keepdim=True)


@center.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autoplan_rules::pick", mutates_args=())
def pick(x: Tensor, where: Tensor) -> Tensor:
    """Rows by number."""
    return x[where]


@pick.register_fake
def _(x: Tensor, where: Tensor) -> Tensor:
    return x.new_empty(where.shape[0], *x.shape[1:])


PROJECT = "b* k, k n -> b* n"


@pytest.fixture(autouse=True)
def _table_as_before() -> Iterator[None]:
    yield
    for name in ("project", "center", "pick"):
        unregister(f"autoplan_rules.{name}")


class Projected(nn.Module):
    """Most of its FLOPs are in the custom op."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.weight = nn.Parameter(torch.ones(64, 512))
        self.last = nn.Linear(512, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.ops.autoplan_rules.project(x, self.weight)
        return {"loss": self.last(y.relu()).square().mean() + self.first(x).square().mean()}


def plan() -> autoplan.Plan:
    with torch.device("meta"):
        model, batch = Projected(), {"x": torch.rand(64, 64)}
    pins = autoplan.Pins(tp=8, dp=1, pp=1)
    return autoplan.optimize(model, autoplan.Cluster.load("dgx-h100-1x8"), batch, pins=pins)


def test_an_op_that_is_not_cheap_needs_a_rule() -> None:
    with pytest.raises(autoplan.UnsupportedOpError, match="register_rule") as caught:
        plan()
    assert caught.value.target == "autoplan_rules.project.default"
    autoplan.register_rule("autoplan_rules::project", PROJECT)
    made = plan()
    assert made.unruled_ops == ()
    assert made.parameters["weight"].spec in ("RS(0)", "RS(1)"), "its matrix is split over tp"


def test_right_rules_are_taken() -> None:
    autoplan.register_rule("autoplan_rules::project", PROJECT)
    autoplan.register_rule("autoplan_rules::project", PROJECT)
    autoplan.register_rule("autoplan_rules::center", "b* k^ -> b* k^")
    rows = (torch.rand(4, 4), torch.tensor([3, 0, 1, 1]))
    autoplan.register_rule("autoplan_rules::pick", "n^ h, r -> r h", example=rows)


@pytest.mark.parametrize(
    ("op", "rule", "said"),
    [
        ("project", "b* k, n k -> b* n", r"does not hold: .*S\(0\).*fails"),
        ("project", "b* k^, k^ n -> b* n; linear(0 1)", r"result 0 is wrong.*one device"),
        ("center", "b* k -> b* k", r"\(k\).*result 0 is wrong at .*on one device"),
        ("center", "pointwise", r"cannot be tried"),
        ("project", "b* k, k n -> n", r"does not fit its tensors"),
        ("project", "b* k -> b* k", r"cannot be tried"),
        ("project", "b* k k n -> b* n", r"cannot be tried|does not fit"),
        ("project", "b* k, k n", r"is no rule"),
        ("project", "b* k, k n -> b* n; adds(1)", r"is no mark"),
        ("missing", PROJECT, r"there is no op"),
        ("pick", "n h, r -> r h", r"cannot be tried"),
    ],
)
def test_wrong_rules_are_refused_with_the_first_difference(op: str, rule: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        autoplan.register_rule(f"autoplan_rules::{op}", rule)
    with pytest.raises(autoplan.UnsupportedOpError):
        plan()


def test_what_has_a_rule_keeps_it() -> None:
    with pytest.raises(ValueError, match="has a rule already"):
        autoplan.register_rule("aten::mm", "m k, k n -> m n")
    with pytest.raises(ValueError, match="namespace::name"):
        autoplan.register_rule("mylib.op", PROJECT)


def _build() -> tuple[Projected, dict[str, Tensor]]:
    torch.manual_seed(3)
    model = Projected().double()
    nn.init.normal_(model.weight, std=0.1)
    return model, {"x": torch.rand(8, 64, dtype=torch.float64)}


def _gradients_differ(rank: int, plan: str, with_rule: bool) -> float:
    """Largest relative difference of loss and the custom op's gradient from one device's."""
    if with_rule:
        autoplan.register_rule("autoplan_rules::project", PROJECT)
    model, batch = _build()
    parallel = autoplan.parallelize(model, autoplan.Plan.from_json(plan))
    loss = parallel.forward_backward(**batch)
    whole, _ = _build()
    expected = whole(**batch)["loss"]
    expected.backward()
    found = dict(parallel.named_parameters())["weight"].grad.full_tensor()
    unregister("autoplan_rules.project")
    assert whole.weight.grad is not None
    norm = whole.weight.grad.norm()
    return max(
        float((loss - expected).abs() / expected), float((found - whole.weight.grad).norm() / norm)
    )


@pytest.mark.distributed
def test_a_plan_runs_where_its_rules_are_registered() -> None:
    autoplan.register_rule("autoplan_rules::project", PROJECT)
    model, batch = _build()
    pins = autoplan.Pins(tp=2, dp=1, pp=1)
    made = autoplan.optimize(model, slow_cluster(2), batch, pins=pins)
    assert made.parameters["weight"].spec != "RR"
    assert max(run(2, _gradients_differ, made.to_json(), True)) < 1e-9
    with pytest.raises(RemoteError, match="register_rule before planning and in every process"):
        run(2, _gradients_differ, made.to_json(), False)
