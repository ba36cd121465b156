# SPDX-License-Identifier: Apache-2.0
"""What capture makes of a model's ops: forms that have a rule and a derivative, on one device."""

from __future__ import annotations

import pytest
from cases.catalog import build
from cases.running import TOLERANCE, plan_case, train

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
