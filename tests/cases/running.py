# SPDX-License-Identifier: Apache-2.0
"""Planning a case and running it: the cluster of the public cases, plans by pins, and one job for
the ranks of a pool.

`train` trains a case under a plan beside the unmodified model on the same rank and gives the
relative errors of loss, outputs,
gradients and parameters. Nothing here knows a particular case.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pool
import torch
from cases.catalog import Inputs, Loss, build, tensors_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.cluster import Cluster, DeviceSpec, Link
from autoplan.plan import Plan

TOLERANCE = 1e-9
FLOP_PER_S = 1e13


def plain_cluster(
    num_devices: int,
    *,
    memory_bytes: float = 80e9,
    bytes_per_s: float = 1e10,
    num_hosts: int = 1,
    between_bytes_per_s: float = 1e9,
    flop_per_s: float = FLOP_PER_S,
    rank_hosts: tuple[int, ...] | None = None,
) -> Cluster:
    """The cases' cluster: 10 TFLOP/s a device, unlimited memory bandwidth, no launch cost, 10 us a
    message."""
    device = DeviceSpec(
        name="plain",
        memory_bytes=int(memory_bytes),
        memory_bytes_per_s=math.inf,
        peak_flop_per_s={"float64": flop_per_s, "float32": flop_per_s},
    )
    between = Link(latency_s=1e-5, bytes_per_s=between_bytes_per_s) if num_hosts > 1 else None
    return Cluster(
        num_hosts=num_hosts,
        devices_per_host=num_devices // num_hosts,
        device=device,
        intra_host=Link(latency_s=1e-5, bytes_per_s=bytes_per_s),
        inter_host=between,
        rank_hosts=rank_hosts,
    )


def plan_case(name: str, num_devices: int, **pins: object) -> Plan:
    """The plan of a case under pins, on the plain cluster."""
    model, inputs, loss = build(name)
    return autoplan.optimize(
        model,
        plain_cluster(num_devices),
        inputs,
        loss_fn=loss,
        pins=autoplan.Pins(**pins),  # type: ignore[arg-type]  # checked by Pins itself
    )


def run(world: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """`function(rank, *args)` on reused processes, results in rank order: `pool.run` for callers
    that know the results."""
    return pool.run(world, function, *args)


@dataclass(frozen=True)
class Outcome:
    """One rank's run beside one device.

    Attributes:
        loss, outputs, parameters: Largest relative errors: over steps, over output tensors, over
        parameters after all steps.
        gradients: Relative error per parameter this rank holds, after the first step.
        values: Parameter name -> digest of its whole value after all steps, bit for bit.
        keys: Names in this rank's state dict.
    """

    loss: float
    outputs: float
    parameters: float
    gradients: Mapping[str, float]
    values: Mapping[str, str]
    keys: tuple[str, ...]

    @property
    def worst(self) -> float:
        return max(self.loss, self.outputs, self.parameters, *self.gradients.values())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a DTensor; every rank of its mesh asks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Relative error; an absent tensor is zero."""
    if ours is None or theirs is None:
        return max(0.0 if t is None else float(t.detach().norm()) for t in (ours, theirs))
    return float((ours - theirs).detach().norm() / theirs.detach().norm().clamp_min(1e-12))


def reference(
    model: nn.Module, inputs: Inputs, loss_fn: Loss | None
) -> tuple[list[Tensor], Tensor]:
    """(output tensors, loss) on one device."""
    result = model(**inputs)
    loss = result.loss if loss_fn is None else loss_fn(result, inputs)
    return tensors_of(result), loss


def train(rank: int, text: str, name: str, steps: int = 1, optimizer: str = "adamw") -> Outcome:
    """Trains the case under the plan beside one device."""
    plan = Plan.from_json(text)
    model, inputs, loss_fn = build(name)
    parallel = autoplan.parallelize(model, plan, loss_fn=loss_fn)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    ours, theirs = kind(parallel.parameters(), lr=1e-2), kind(model.parameters(), lr=1e-2)
    named = dict(model.named_parameters())
    expected_outputs, _ = reference(model, inputs, loss_fn)
    given = tensors_of(parallel(**inputs))
    assert [t.shape for t in given] == [t.shape for t in expected_outputs], "same outputs, in order"
    assert [t.dtype for t in given] == [t.dtype for t in expected_outputs], "same dtypes"
    outputs = max(map(error, given, expected_outputs))
    loss_error, gradients = 0.0, {}
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        loss = parallel.forward_backward(**inputs)
        _, expected = reference(model, inputs, loss_fn)
        expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss_error = max(loss_error, error(loss, expected))
        if step == 0:
            for n, p in parallel.named_parameters():
                if n in named:
                    mine = None if p.grad is None else whole(p.grad)
                    gradients[n] = error(mine, named[n].grad)
        ours.step()
        theirs.step()
    held = {n: whole(p.detach()) for n, p in parallel.named_parameters() if n in named}
    return Outcome(
        loss_error,
        outputs,
        max((error(v, named[n]) for n, v in held.items()), default=0.0),
        gradients,
        {n: digest(v) for n, v in held.items()},
        tuple(sorted(parallel.state_dict())),
    )


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's bits."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
