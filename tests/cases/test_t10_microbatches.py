# SPDX-License-Identifier: Apache-2.0
"""T10: a step in microbatches is the step on the whole batch, and the batch must divide."""

from __future__ import annotations

import pytest
import torch
from cases.catalog import build
from cases.models import WithTarget, mean_error, small_stack, summed_error
from cases.running import TOLERANCE, error, plain_cluster, plan_case, run, train, whole
from torch import Tensor

import autoplan
from autoplan.plan import Plan

SPLIT = {"stack.0.weight": "RS(0)", "stack.2.weight": "RS(1)"}


def _halves() -> list[dict[str, Tensor]]:
    """Two calls' batches with the denominator of both together."""
    torch.manual_seed(3)
    count = torch.tensor(60.0, dtype=torch.float64)
    return [
        {
            "input": torch.randn(10, 8, dtype=torch.float64),
            "target": torch.randn(10, 3, dtype=torch.float64),
            "count": count,
        }
        for _ in range(2)
    ]


def accumulate(rank: int, text: str) -> float:
    """Two calls with a sum-type loss over a common denominator against one call on the joined
    batch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WithTarget(small_stack()).to(torch.float64)
        halves = _halves()
    parallel = autoplan.parallelize(model, Plan.from_json(text), loss_fn=summed_error)
    total = torch.stack([parallel.forward_backward(**half) for half in halves]).sum()
    joined = {k: torch.cat([h[k] for h in halves]) for k in ("input", "target")}
    expected = mean_error(model(joined["input"]), joined)
    expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    named = dict(model.named_parameters())
    held = {n: p for n, p in parallel.named_parameters() if n in named}
    gradients = {n: None if p.grad is None else whole(p.grad) for n, p in held.items()}
    return max([error(total, expected), *(error(g, named[n].grad) for n, g in gradients.items())])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins",
    [
        {"pp": 2, "dp": 1, "tp": 1, "num_microbatches": 2},
        {"pp": 2, "dp": 1, "tp": 1, "num_microbatches": 5},
        {"pp": 2, "dp": 1, "tp": 1, "num_microbatches": 10, "schedule": "gpipe"},
        {"tp": 2, "dp": 1, "pp": 1, "num_microbatches": 5, "placements": SPLIT},
        {"dp": 2, "tp": 1, "pp": 1, "num_microbatches": 5},
    ],
    ids=["pp-2", "pp-5", "pp-10-gpipe", "tp-5", "dp-5"],
)
def test_loss_and_gradients_equal_the_whole_batch(pins: dict[str, object]) -> None:
    """Every rank reports the whole batch's loss, not its stage's or a microbatch's."""
    plan = plan_case("microbatches", 2, **pins)
    assert plan.schedule.num_microbatches == pins["num_microbatches"]
    assert max(o.worst for o in run(2, train, plan.to_json(), "microbatches", 2)) < TOLERANCE


def test_batch_that_does_not_divide_is_refused_with_the_valid_counts() -> None:
    with pytest.raises(autoplan.InfeasibleError) as refusal:
        plan_case("microbatches", 2, pp=2, num_microbatches=4)
    assert "a batch of 10 does not divide into 4 microbatches" in str(refusal.value)
    assert "(valid counts: 1, 2, 5, 10)" in str(refusal.value)


def test_batch_that_does_not_divide_over_replicas_is_refused() -> None:
    with pytest.raises(autoplan.InfeasibleError, match=r"batch of 10 .* dp=4 \(valid dp: 1, 2\)"):
        plan_case("microbatches", 4, dp=4)


def test_replicas_hold_disjoint_rows() -> None:
    """Under dp=2 the first product runs on rows split over dp; with 5 microbatches on one row
    each."""
    plan = plan_case("microbatches", 2, dp=2, tp=1, pp=1, num_microbatches=5)
    first = plan.strategies[plan.op_strategies["linear"]]
    assert first.inputs[0].startswith("S(0)")
    assert first.outputs[0].startswith("S(0)")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins",
    [
        {"pp": 2, "dp": 1, "tp": 1},
        {"dp": 2, "tp": 1, "pp": 1},
    ],
    ids=["pp", "dp"],
)
def test_mean_over_labels_that_count_is_exact_over_microbatches(pins: dict[str, int]) -> None:
    """1, 6, 6 and 5 labels a row; a mean of the rows' means is another loss."""
    model, inputs, loss_fn = build("ignored")
    assert loss_fn is not None
    rows = [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(4)]
    means = torch.stack([loss_fn(model(r["input"]), r) for r in rows]).mean()
    right = loss_fn(model(inputs["input"]), inputs)
    assert error(means, right) > 1e-3, "the batch tells them apart"
    count = 4 if pins["dp"] == 1 else 2  # one row at a time in all
    plan = plan_case("ignored", 2, **pins, num_microbatches=count)
    assert max(o.worst for o in run(2, train, plan.to_json(), "ignored", 2)) < TOLERANCE


@pytest.mark.distributed
def test_accumulated_calls_equal_one_call_on_the_joined_batch() -> None:
    """The loss is a sum over a denominator given as an input, so that calls add up."""
    batch = _halves()[0]
    plan = autoplan.optimize(
        WithTarget(small_stack()).to(torch.float64),
        plain_cluster(2),
        batch,
        loss_fn=summed_error,
        pins=autoplan.Pins(pp=2, num_microbatches=2),
    )
    assert max(run(2, accumulate, plan.to_json())) < TOLERANCE
