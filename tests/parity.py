# SPDX-License-Identifier: Apache-2.0
"""One device against a plan on real processes: loss, every gradient, parameters after AdamW steps.

`compare(plan text, model name, ...)` runs on every rank of a pool and gives the largest relative
errors. The reference is the unmodified model on the same rank, whole batch, whole parameters.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(__file__))

import torch
from models import build
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.capture import capture
from autoplan.executor.module import ParallelModule
from autoplan.plan import Plan

LEARNING_RATE = 1e-2
# of the norm of all gradients: below it a gradient is rounding noise (a key bias under a softmax)
FLOOR = 1e-6


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of one run.

    Attributes:
        loss: |loss - reference| / |reference|, largest over steps.
        gradient: Over parameters, after the first step; each against its own norm or FLOOR of all
            gradients' norm.
        parameter: Over parameters, after all steps.
    """

    loss: float
    gradient: float
    parameter: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient, self.parameter)


def loss_in_float64(outputs: object, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Next-token loss in the logits' own dtype; the transformers classes round theirs to
    float32.
    """
    logits = outputs.logits  # type: ignore[attr-defined]
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


LOSSES = {"llama": loss_in_float64, "gpt2": loss_in_float64}


def reference_loss(name: str, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss on one device."""
    outputs = model(**inputs)
    loss: torch.Tensor = LOSSES[name](outputs, inputs) if name in LOSSES else outputs["loss"]
    return loss


def capture_named(name: str, seed: int = 0):  # type: ignore[no-untyped-def]
    """(model, inputs, captured) of one of the test models."""
    model, inputs = build(name, seed)
    return model, inputs, capture(model, inputs, loss_fn=LOSSES.get(name))


def norm_of_gradients(named: dict[str, nn.Parameter]) -> float:
    """The norm of all gradients of a model together."""
    norms = [p.grad.norm() for p in named.values() if p.grad is not None]
    return float(torch.stack(norms).norm())


def gradient_errors(
    parallel: ParallelModule, named: dict[str, nn.Parameter], floor: float
) -> dict[str, float]:
    """Relative error of every gradient that this rank's stage has, by parameter; each against its
    own norm, or `floor` if that is larger.
    """
    return {
        n: _gradient_error(p.grad, named[n].grad, floor)
        for n, p in parallel.named_parameters()
        if n in named
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(rank: int, text: str, name: str, steps: int = 3, seed: int = 0) -> Errors:
    """The largest relative errors between one device and the plan, over the parameters this rank's
    stage holds.
    """
    plan = Plan.from_json(text)
    model, inputs, captured = capture_named(name, seed)
    parallel = ParallelModule(model, captured, plan, {})
    ours = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
    theirs = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    named = dict(model.named_parameters())
    loss_error = gradient_error = 0.0
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        loss = parallel.forward_backward(**inputs)
        expected = reference_loss(name, model, inputs)
        expected.backward()  # type: ignore[no-untyped-call]
        loss_error = max(loss_error, float((loss - expected).abs() / expected.abs()))
        if step == 0:
            floor = FLOOR * norm_of_gradients(named)
            gradient_error = max(gradient_errors(parallel, named, floor).values(), default=0.0)
        _drop_noise(parallel, named, floor)
        ours.step()
        theirs.step()
    parameter_error = 0.0
    for n, p in parallel.named_parameters():
        if n in named:
            difference = _whole(p.detach()) - named[n].detach()
            parameter_error = max(
                parameter_error,
                float(difference.norm() / named[n].detach().norm().clamp_min(1e-12)),
            )
    return Errors(loss_error, gradient_error, parameter_error)


def _drop_noise(parallel: ParallelModule, named: dict[str, nn.Parameter], floor: float) -> None:
    """Zeroes gradients that are rounding noise on both sides: AdamW would turn their sign into a
    whole step.
    """
    for n, p in parallel.named_parameters():
        if (
            n in named
            and named[n].grad is not None
            and p.grad is not None
            and float(named[n].grad.norm()) < floor * 1e-3
        ):
            named[n].grad.zero_()
            p.grad.zero_()


def _gradient_error(ours: torch.Tensor | None, theirs: torch.Tensor | None, floor: float) -> float:
    if theirs is None or ours is None:
        left = 0.0 if ours is None else float(_whole(ours).norm())
        right = 0.0 if theirs is None else float(theirs.norm())
        return abs(left - right) / floor
    difference = float((_whole(ours) - theirs).norm())
    return difference / max(float(theirs.norm()), floor)
