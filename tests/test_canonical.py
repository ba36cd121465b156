# SPDX-License-Identifier: Apache-2.0
"""What capture makes of a model's ops: forms that have a rule and a derivative, on one device."""

from __future__ import annotations

import pytest
import torch
from cases.catalog import build
from cases.running import TOLERANCE, plain_cluster, plan_case, run, train
from torch import Tensor, nn

import autoplan
from autoplan.capture import capture


def test_assignments_are_their_sources() -> None:
    """`aten.copy` has no derivative, `type_as` and second names of ops no rule: none is left, and
    what is joined with an empty tensor is itself.
    """
    model, inputs, loss = build("assigned")
    graph = capture(model, inputs, loss_fn=loss).graph
    targets = {op.target for op in graph.ops}
    joined = [op for op in graph.ops if op.target == "aten.cat.default"]
    assert [len(op.inputs) for op in joined] == [2]
    assert not targets & {"aten.concat.default", "aten.multiply.Tensor"}
    assert not targets & {"aten.copy.default", "aten.type_as.default", "aten.min.other"}
    assert {"aten.expand.default", "aten._to_copy.default", "aten.minimum.default"} <= targets


@pytest.mark.parametrize(("name", "microbatches"), [("assigned", 1), ("positioned", 2)])
def test_rewritten_models_equal_themselves(name: str, microbatches: int) -> None:
    """With microbatches too: `positioned` counts its labels before the first one, by a table that
    every microbatch reads as well.
    """
    plan = plan_case(name, 1, num_microbatches=microbatches)
    assert plan.unruled_ops == ()
    assert train(0, plan.to_json(), name, 2).worst < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_memory_read_by_strides_is_what_it_was(dp: int, tp: int) -> None:
    """However a tensor lies in memory where it was captured, and wherever a plan splits it."""
    plan = plan_case("windows", dp * tp, dp=dp, tp=tp, pp=1)
    jobs = run(2, train, plan.to_json(), "windows", 2) if dp * tp > 1 else None
    for outcome in jobs or [train(0, plan.to_json(), "windows", 2)]:
        assert outcome.worst < TOLERANCE


class Diagonal(nn.Module):
    """Every ninth number of a transposed tensor's memory, or of a part of a tensor."""

    def __init__(self, part: bool) -> None:
        super().__init__()
        self.part, self.fc = part, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h = h[1:] if self.part else h.t()
        return h.as_strided((3,), (9,)).square().mean()


def test_memory_of_a_whole_tensor_is_read_and_of_a_part_refused() -> None:
    inputs = {"x": torch.randn(4, 8)}
    with pytest.raises(autoplan.CaptureError, match=r"as_strided.* a part of another one"):
        capture(Diagonal(part=True), inputs)
    model = Diagonal(part=False)
    parallel = autoplan.parallelize(model, autoplan.optimize(model, plain_cluster(1), inputs))
    assert torch.allclose(parallel.forward_backward(**inputs), model(**inputs))
