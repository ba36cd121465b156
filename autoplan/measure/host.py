# SPDX-License-Identifier: Apache-2.0
"""The host's part: what Python, dispatcher and autograd take for each op, each change of layout,
each parameter and each microbatch of a pipeline, at next to no work.

On a CPU it adds to the kernels (`device.HostTimes`); on a GPU the host runs ahead, and nothing of
it is written down.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate

from autoplan.measure.clock import Row, Timing, from_walls, summarize, time_call

Tensor = torch.Tensor
ATEN = torch.ops.aten
CHAIN = 32  # ops one after the other, so that what one backward call costs is seen apart
PARAMETERS = 16
MICROBATCHES = 8


@dataclass(frozen=True, slots=True)
class Both:
    """Seconds forward and backward."""

    forward_s: float
    backward_s: float


@dataclass
class HostTimings:
    """What was measured of the host.

    Attributes:
        op: Of one op that computes nothing.
        engine_s: Of one call of autograd's engine, which a training step makes once.
        conversion: Of one autograd function written in Python, beside its op.
        parameter_s: Of one parameter's optimizer step.
        microbatch_s: Of one action of the pipeline's runtime; 0 with one process.
        rows: For the report.
    """

    op: Both
    engine_s: float
    conversion: Both
    parameter_s: float = 0.0
    microbatch_s: float = 0.0
    rows: list[Row] = field(default_factory=list)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Passing(nn.Module):
    """As the executor's Conversion, moving nothing."""

    def forward(self, x: Tensor) -> Tensor:
        passed: Tensor = _Pass.apply(x, self)  # type: ignore[no-untyped-call] # torch's
        return passed


def measure_host(device: torch.device, *, batch_s: float = 0.02) -> HostTimings:
    """Times the host's part; every process of the launch calls it, after the process group.

    Args:
        device: Where the tensors of the ops are.
        batch_s: Seconds of each batch.
    """
    x = torch.randn(8, 8, device=device, requires_grad=True)

    def views() -> Tensor:
        out = x
        for _ in range(CHAIN):
            out = ATEN.view.default(out, [8, 8])
        return out

    passing = _Passing()

    def passes() -> Tensor:
        out = x
        for _ in range(CHAIN):
            out = passing(out)
        return out

    def timed(out: Tensor) -> Timing:
        gradient = torch.ones_like(out)
        return time_call(
            lambda: torch.autograd.grad(out, x, gradient, retain_graph=True), device, batch_s
        )

    one = timed(ATEN.view.default(x, [8, 8]))
    ahead, back = time_call(views, device, batch_s), timed(views())
    op = Both(ahead.best_s / CHAIN, max(back.best_s - one.best_s, 0.0) / (CHAIN - 1))
    rows = [summarize("host: op, forward and backward of 32", [ahead, back])]
    ahead, back = time_call(passes, device, batch_s), timed(passes())
    conversion = Both(
        max(ahead.best_s / CHAIN, 0.0), max(back.best_s - one.best_s, 0.0) / (CHAIN - 1)
    )
    rows.append(summarize("host: conversion, forward and backward of 32", [ahead, back]))
    engine_s = max(one.best_s - op.backward_s, 0.0)
    host = HostTimings(op, engine_s, conversion, rows=rows)
    optimizer = _optimizer(device, batch_s)
    host.parameter_s = optimizer.best_s / PARAMETERS
    host.rows.append(summarize(f"host: AdamW of {PARAMETERS} parameters", [optimizer]))
    if dist.is_initialized() and dist.get_world_size() > 1:
        pipeline = _pipeline(device)
        host.microbatch_s = pipeline.best_s
        host.rows.append(summarize("host: microbatch of a pipeline, one way", [pipeline]))
    return host


def _optimizer(device: torch.device, batch_s: float) -> Timing:
    """Seconds of a step of AdamW on PARAMETERS DTensors of one element."""
    parameters = []
    mesh = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = DeviceMesh(device.type, list(range(dist.get_world_size())))
    for _ in range(PARAMETERS):
        local = torch.ones(1, device=device)
        if mesh is None:
            parameter = nn.Parameter(local)
            parameter.grad = torch.ones_like(local)
        else:
            whole = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
            parameter = nn.Parameter(whole)
            parameter.grad = DTensor.from_local(
                torch.ones_like(local), mesh, [Replicate()], run_check=False
            )
        parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters)
    return time_call(optimizer.step, device, batch_s)


def _pipeline(device: torch.device, rounds: int = 4) -> Timing:
    """Seconds that the process computes in one action of a pipeline of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = torch.empty(1, 8, device="meta", requires_grad=rank > 0)
    made = torch.empty(1, 8, device="meta", requires_grad=True)
    stage = PipelineStage(
        nn.Linear(8, 8).to(device),
        rank,
        world,
        device,
        input_args=(shape,),
        output_args=(made,),
    )
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=lambda out, _: out.sum())
    batch = torch.ones(MICROBATCHES, 8, device=device)
    numbers = torch.arange(MICROBATCHES)
    each = []
    for _ in range(rounds + 1):
        began = time.process_time()
        if rank == 0:
            schedule.step(batch, return_outputs=False)
        elif rank == world - 1:
            schedule.step(target=numbers, losses=[], return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        each.append((time.process_time() - began) / (2 * MICROBATCHES))
    return from_walls(each[1:], rounds * MICROBATCHES)
