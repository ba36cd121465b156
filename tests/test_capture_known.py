# SPDX-License-Identifier: Apache-2.0
"""Branches on tensors: those that no batch can change are decided, the others refused.

Each model branches in a way of its own; the graph must hold the ops of the right branch only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from models import Checking
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.errors import CaptureError

Branch = Callable[[Tensor], Tensor]


class Branching(nn.Module):
    """A weight, and what `branch` makes of the product with it."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x * self.weight).sum()


def targets_of(branch: Branch, device: str = "cpu") -> set[str]:
    """The op families of the captured graph."""
    model = Branching(branch).to(device)
    batch = {"x": torch.rand(2, 4, device=device)}
    graph = capture(model, batch, loss_fn=lambda outputs, _: torch.as_tensor(outputs)).graph
    return {op.target.split(".")[1] for op in graph.ops}


def mask_of_ones(y: Tensor) -> Tensor:
    mask = torch.ones(y.shape, device=y.device)
    return y.sin() if (mask > 0).all() else y.cos()


def mask_written_to(y: Tensor) -> Tensor:
    mask = torch.zeros_like(y)
    mask[:, 0] = 1
    return y.sin() if bool(mask.any().item()) and not mask[:, 1:].any() else y.cos()


def drawn_below_zero(y: Tensor) -> Tensor:
    return y.cos() if torch.rand([]) < 0.0 else y.sin()


def drawn_below_one(y: Tensor) -> Tensor:
    return y.sin() if torch.rand([]) < 1.0 else y.cos()


def asserted(y: Tensor) -> Tensor:
    assert torch.all(y >= 0).item(), "no negative numbers"
    assert (y < 2).all()
    return y.sin()


def guarded(y: Tensor) -> Tensor:
    if not (y >= 0).all():
        raise ValueError("no negative numbers")
    if (y > 2).any():
        raise ValueError("too large")
    return y.sin()


def mapped(y: Tensor) -> Tensor:
    def allowed(row: Tensor, column: Tensor) -> Tensor:
        return (row >= 0) & (column >= row.new_zeros(()))

    rows, columns = torch.arange(2, device=y.device), torch.arange(4, device=y.device)
    inner = torch.vmap(allowed, in_dims=(None, 0))
    mask = torch.vmap(inner, in_dims=(0, None))(rows, columns)
    return (y * mask).sin()


DECIDED = [
    mapped,
    mask_of_ones,
    mask_written_to,
    drawn_below_zero,
    drawn_below_one,
    asserted,
    guarded,
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("branch", DECIDED, ids=lambda b: b.__name__)
def test_decided(branch: Branch, device: str) -> None:
    found = targets_of(branch, device)
    assert "sin" in found
    assert "cos" not in found


def on_data(y: Tensor) -> Tensor:
    return y.sin() if y.any() else y.cos()


def mask_overwritten_with_data(y: Tensor) -> Tensor:
    mask = torch.zeros(y.shape, device=y.device)
    view = mask[0]
    view.copy_(y[0])
    return y.sin() if mask.any() else y.cos()


def mask_assigned_data(y: Tensor) -> Tensor:
    mask = torch.zeros(y.shape, device=y.device)
    mask[1] = y[0]
    return y.sin() if mask.any() else y.cos()


def drawn_in_between(y: Tensor) -> Tensor:
    return y.cos() if torch.rand([]) < 0.5 else y.sin()


def drawn_and_scaled(y: Tensor) -> Tensor:
    return y.cos() if torch.rand([]) - 1 < 0.0 else y.sin()


REFUSED = [
    (on_data, "branches on the values"),
    (mask_overwritten_with_data, "branches on the values"),
    (mask_assigned_data, "branches on the values"),
    (drawn_in_between, "a random number decides"),
    (drawn_and_scaled, "branches on the values"),
]


@pytest.mark.parametrize(("branch", "reason"), REFUSED, ids=lambda b: getattr(b, "__name__", ""))
def test_refused(branch: Branch, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=rf"in {branch.__name__}.* {reason}"):
        targets_of(branch)
    assert capsys.readouterr().err == "", "the message says it all"


def test_what_a_model_writes_to_stderr_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    def talking(y: Tensor) -> Tensor:
        print("a model talks", file=sys.stderr)
        return y.sin()

    targets_of(talking)
    assert "a model talks" in capsys.readouterr().err


class HalfOnMeta(nn.Module):
    """A table that is made on the CPU whatever the default device is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.FloatTensor(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) @ self.table).sum()


def test_a_model_on_meta_in_part_is_captured() -> None:
    with torch.device("meta"):
        model, batch = HalfOnMeta(), {"x": torch.rand(2, 4)}
    assert {p.device.type for p in model.parameters()} == {"meta", "cpu"}
    graph = capture(model, batch, loss_fn=lambda outputs, _: torch.as_tensor(outputs)).graph
    assert graph.values["table"].requires_grad
    assert model.table.device.type == "cpu", "the model itself is as it was"


def test_a_number_that_only_a_check_reads_is_left_out() -> None:
    graph = capture(Checking(), {"x": torch.rand(2, 4)}, loss_fn=lambda out, _: out).graph
    assert {op.target for op in graph.ops} == {"aten.linear.default", "aten.sum.default"}


def counted(y: Tensor) -> Tensor:
    return y.sin() * (y > 0).sum().item()


def test_a_number_that_a_result_depends_on_is_not() -> None:
    with pytest.raises(CaptureError, match="a Python number that depends on data"):
        targets_of(counted)
