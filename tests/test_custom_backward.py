# SPDX-License-Identifier: Apache-2.0
"""Models with a `torch.autograd.Function`: its forward is the graph's where its backward is the
derivative of that, else it is kept whole or refused; and ops that draw random numbers besides
dropout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.running import plain_cluster
from parity import gradient_errors, norm_of_gradients
from torch import Tensor, nn

import autoplan
from autoplan.capture import capture


class Cube(torch.autograd.Function):
    """x^3 with its own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Clipped(Cube):
    """x^3 whose derivative is at most 100."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (3 * x**2).clamp(max=100.0) * grad


class Rounded(torch.autograd.Function):
    """Rounding with the gradient of the identity, in the form without ctx."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Angle(torch.autograd.Function):
    """acos, which has no value beyond 1, with the derivative of a line."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.acos(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Applies(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.fc = function, nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(self.fc(x)).square().mean()
        return result


def test_backward_that_is_the_derivative_is_kept() -> None:
    model, inputs = Applies(Cube), {"x": torch.randn(4, 12)}
    parallel = autoplan.parallelize(model, autoplan.optimize(model, plain_cluster(1), inputs))
    parallel.forward_backward(**inputs)
    model(**inputs).backward()
    ours = {n: p.grad for n, p in parallel.named_parameters()}
    assert all(torch.allclose(ours[n], p.grad) for n, p in model.named_parameters())


class Bent(nn.Module):
    """A function between two linears, as wide as they are deep."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(8, 12).double(), nn.Linear(12, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.function.apply(self.up(x))).square().mean()
        return result


def bent(function: type[torch.autograd.Function]) -> tuple[Bent, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Bent(function), {"x": 20 * torch.randn(4, 8, dtype=torch.float64)}


def bent_errors(rank: int, text: str, function: type[torch.autograd.Function]) -> float:
    """Largest relative error of the gradients of one rank's parameters."""
    model, inputs = bent(function)
    parallel = autoplan.parallelize(model, autoplan.Plan.from_json(text))
    loss = parallel.forward_backward(**inputs)
    wanted = model(**inputs)
    wanted.backward()
    named = dict(model.named_parameters())
    errors = gradient_errors(parallel, named, norm_of_gradients(named) * 1e-9)
    return max(float(abs(loss - wanted.detach()) / wanted.detach()), *errors.values())


@pytest.mark.parametrize("function", [Clipped, Rounded, Angle])
def test_another_backward_is_kept_whole(function: type[torch.autograd.Function]) -> None:
    """Where it is not the derivative, the function is one op that every rank runs itself."""
    model, inputs = bent(function)
    (op,) = (o for o in capture(model, inputs).graph.ops if o.target == "autoplan.function")
    assert op.arguments["function"] == f"{__name__}.{function.__name__}"
    plan = autoplan.optimize(model, plain_cluster(1), inputs)
    assert plan.unruled_ops == (op.name,)
    if function is not Angle:  # its loss has no value
        assert bent_errors(0, plan.to_json(), function) < 1e-9
    assert capture(model, inputs, mode="infer").graph.ops
    assert torch.autograd.Function.apply.__qualname__ == "Function.apply"


@pytest.mark.distributed
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=["tp", "pp", "dp"])
def test_a_whole_function_between_split_layers(degrees: dict[str, int]) -> None:
    from pool import run

    model, inputs = bent(Clipped)
    pins = autoplan.Pins(**{"tp": 1, "dp": 1, "pp": 1, "num_microbatches": 1, **degrees})
    plan = autoplan.optimize(model, plain_cluster(2), inputs, pins=pins)
    assert max(run(2, bent_errors, plan.to_json(), Clipped)) < 1e-9


class Dithered(Rounded):
    """Rounds a random number up or down."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x + torch.rand_like(x) - 0.5).round()


class Writing(Rounded):
    """Rounds what it is given."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        x.round_()
        return x.clone()


WEIGHT = torch.ones(12, dtype=torch.float64)


def reaching() -> type[torch.autograd.Function]:
    """A function with a tensor that is none of its arguments."""
    weight = WEIGHT

    class Reaching(Rounded):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return (x * weight).round()

    return Reaching


class Particular(Rounded):
    """Has a shape that it insists on."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        assert x.shape == (4, 12)
        return x.round()


HINDERED = [
    (Dithered, "it draws random numbers"),
    (Writing, "it writes into its arguments"),
    (reaching(), "it uses tensors that are none of its arguments"),
    (Particular, r"it cannot be tried on small random inputs \(AssertionError\)"),
]


@pytest.mark.parametrize(("function", "reason"), HINDERED)
def test_what_cannot_be_kept_whole_is_refused_by_name(
    function: type[torch.autograd.Function], reason: str
) -> None:
    model, inputs = bent(function)
    with pytest.raises(autoplan.CaptureError, match=reason) as refusal:
        autoplan.optimize(model, plain_cluster(2), inputs)
    message = str(refusal.value)
    assert function.__name__ in message
    assert "test_custom_backward.py:" in message


class Twice(Bent):
    """Two functions of one name, which a plan could not tell apart."""

    def __init__(self) -> None:
        super().__init__(Rounded)
        self.first, self.second = (
            type("Scaled", (Rounded,), {"forward": staticmethod(lambda x, k=k: (k * x).round())})
            for k in (2.0, 3.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second.apply(self.first.apply(self.up(x))).square().mean()
        return result


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(autoplan.CaptureError, match="another class of that name"):
        capture(Twice(), {"x": torch.randn(4, 8, dtype=torch.float64)})


class Blocked(nn.Module):
    """A scale and a copy of a weight that carry no gradient, one of them an output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.fc(x)
        with torch.no_grad():
            scale = h.abs().mean()
            frozen = 2 * self.other.weight
        y = self.other(h * scale) + x @ frozen
        return {"loss": y.square().mean(), "scale": scale}


def test_blocks_without_gradient_stay_so() -> None:
    """`torch.no_grad()` inside a forward: gradients are those of one device, none flows through."""
    model, inputs = Blocked().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
    parallel = autoplan.parallelize(model, autoplan.optimize(model, plain_cluster(1), inputs))
    parallel.forward_backward(**inputs)
    expected = model(**inputs)
    expected["loss"].backward()
    for name, parameter in parallel.named_parameters():
        wanted = model.get_parameter(name).grad
        assert torch.allclose(parameter.grad, wanted, rtol=1e-12), name
    assert torch.allclose(parallel(**inputs)["scale"], expected["scale"])


class Hooked(nn.Linear):
    """Halves the gradient of its result."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / 2)
        return h.square().mean()


@pytest.mark.parametrize("kind", ["tensor", "module", "parameter"])
def test_backward_hooks_are_refused(kind: str) -> None:
    inner: nn.Module = Hooked(8, 8) if kind == "tensor" else nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), inner)
    if kind == "module":
        inner.register_full_backward_hook(lambda module, given, made: None)
    if kind == "parameter":
        model[0].weight.register_hook(lambda gradient: gradient / 2)
    words = {
        "tensor": "test_custom_backward.py:",
        "module": "module '1'",
        "parameter": "'0.weight'",
    }
    with pytest.raises(autoplan.CaptureError, match="backward hook") as refusal:
        capture(
            model,
            {"input": torch.randn(4, 8)},
            loss_fn=lambda outputs, batch: outputs.square().mean(),
        )
    assert words[kind] in str(refusal.value)


class Noisy(nn.Module):
    """Adds noise to a parameter's product and a draw of its own to the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h + torch.rand_like(h) + torch.randn(16)
        return self.down(h).square().mean()


def draws(rank: int, text: str) -> list[float]:
    """Losses of three steps; every process has another random state of its own."""
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(4, 8)
    parallel = autoplan.parallelize(model, autoplan.Plan.from_json(text))
    torch.manual_seed(rank)
    return [float(parallel.forward_backward(x=x)) for _ in range(3)]


@pytest.mark.distributed
@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2}, {"pp": 2}], ids=["tp", "dp", "pp"])
def test_drawn_numbers_are_the_same_on_all_ranks_and_new_every_step(pins: dict[str, int]) -> None:
    from pool import run

    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 8)}
    degrees = {"tp": 1, "dp": 1, "pp": 1, **pins}
    plan = autoplan.optimize(Noisy(), plain_cluster(2), inputs, pins=autoplan.Pins(**degrees))
    first, second = run(2, draws, plan.to_json())
    alone = autoplan.optimize(Noisy(), plain_cluster(1), inputs)
    assert first == second
    assert len(set(first)) == 3
    assert first == pytest.approx(draws(0, alone.to_json()), rel=1e-5)
