# SPDX-License-Identifier: Apache-2.0
"""Running a stage's bodies over all microbatches: alone, or as one stage of a pipeline.

Training pipelines run on `torch.distributed.pipelining`'s stage and schedule classes, with
boundaries given explicitly; forward-only passes send and receive in order. The loss is a value of
the last stage's graph, so a schedule's loss function only hands it over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from autoplan.executor.meshes import Ranks
from autoplan.executor.special_ops import Moment
from autoplan.executor.stage import Body, Returned, StageProgram
from autoplan.graph import TensorMeta

Tensor = torch.Tensor
_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass
class StageRun:
    """One step of one stage: what its bodies read, and what they give besides boundary tensors.

    Attributes:
        program: The stage.
        num_microbatches: Of the plan.
        seed: The step's random seed.
        values: Every fed value that is not a boundary tensor, by name.
    """

    program: StageProgram
    num_microbatches: int
    seed: int
    values: Mapping[str, Tensor]
    updates: dict[str, Tensor] = field(default_factory=dict)

    def run(self, body: Body, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One microbatch through a body; what it returns, by name."""
        moment = Moment(microbatch, self.num_microbatches, self.seed)
        feeds = [received[n] if n in received else self.values[n] for n in body.feeds[1:]]
        hooks = (
            self.program.regather.hooks()
            if self.program.regather is not None and torch.is_grad_enabled()
            else contextlib.nullcontext()
        )
        with hooks:
            results = body.module(moment, *feeds)
        return {r.name: x for r, x in zip(body.returns, results)}


class _StageModule(nn.Module):
    """A training body as torch.distributed.pipelining calls it.

    Boundary tensors in; boundary tensors, or on the last stage the loss, out.
    """

    def __init__(
        self,
        run: Callable[[int, Mapping[str, Tensor]], dict[str, Tensor]],
        receives: tuple[str, ...],
        sends: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.run, self.receives, self.sends = run, receives, sends

    def forward(self, *received: Tensor, microbatch: Tensor) -> tuple[Tensor, ...] | Tensor:
        inputs = [_contiguous_gradient(x) if x.requires_grad else x for x in received]
        results = self.run(int(microbatch), dict(zip(self.receives, inputs)))
        return tuple(results[n].contiguous() for n in self.sends) if self.sends else results["loss"]


class _ContiguousGradient(torch.autograd.Function):
    """The same tensor; its gradient is laid out as a send wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _contiguous_gradient(x: Tensor) -> Tensor:
    passed: Tensor = _ContiguousGradient.apply(x)  # type: ignore[no-untyped-call] # torch's
    return passed


def _hand_over(output: Tensor, target: Tensor) -> Tensor:
    return output


class Pipeline:
    """The stage of this rank in torch's pipeline runtime; made once, run every step."""

    def __init__(
        self,
        program: StageProgram,
        schedule: str,
        num_microbatches: int,
        num_stages: int,
        ranks: Ranks,
        loss: str | None,
    ) -> None:
        self.program, self.num_microbatches = program, num_microbatches
        self.ranks, self.loss = ranks, loss
        self.current: StageRun | None = None
        module = _StageModule(
            self._run,
            tuple(n for n, _, _ in program.receives),
            tuple(n for n, _, _ in program.sends),
        )
        is_last = ranks.stage == num_stages - 1
        outputs = [_example(m, g) for _, m, g in program.sends]
        if is_last:
            outputs = [_loss_example(program, loss)]
        stage = PipelineStage(
            module,
            ranks.stage,
            num_stages,
            ranks.device,
            input_args=tuple(_example(m, g) for _, m, g in program.receives),
            output_args=tuple(outputs),
            group=ranks.pipeline_group,
        )
        along_rows = TensorChunkSpec(0)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.schedule = _SCHEDULES[schedule](
            stage,
            num_microbatches,
            loss_fn=_hand_over,
            kwargs_chunk_spec={"microbatch": along_rows},
            scale_grads=False,
        )

    def _run(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self.current is not None, "a step is running"
        body = self.program.training
        results = self.current.run(body, microbatch, received)
        keep_updates(self.current, body, results)
        if self.loss in results:
            results["loss"] = results[self.loss]
        return results

    def step(self, run: StageRun) -> Tensor | None:
        """All microbatches forward and backward; the sum of their losses on the last stage."""
        self.current = run
        losses: list[Tensor] = []
        numbers = torch.arange(self.num_microbatches)
        self.schedule.step(target=numbers, losses=losses, return_outputs=False, microbatch=numbers)
        self.current = None
        return torch.stack([x.detach() for x in losses]).sum(0) if losses else None


def _example(meta: TensorMeta, carries_gradient: bool) -> Tensor:
    return torch.empty(
        meta.shape, dtype=getattr(torch, meta.dtype), device="meta", requires_grad=carries_gradient
    )


def _loss_example(program: StageProgram, loss: str | None) -> Tensor:
    meta = next((r for r in program.training.returns if r.name == loss), None)
    assert meta is not None, "the last stage makes the loss"
    return torch.empty((), device="meta", requires_grad=True)


def keep_updates(run: StageRun, body: Body, results: Mapping[str, Tensor]) -> None:
    """Notes the new values of buffers.

    They are the same in every microbatch, so the last one stands.
    """
    for returned in body.returns:
        if returned.over_time == "R" and not results[returned.name].requires_grad:
            run.updates[returned.name] = results[returned.name]


def train_alone(run: StageRun, loss: str) -> Tensor:
    """All microbatches forward and backward on a plan of one stage.

    Returns:
        The sum of their losses; a sum over ranks may still be open.
    """
    total: Tensor | None = None
    for microbatch in range(run.num_microbatches):
        results = run.run(run.program.training, microbatch, {})
        keep_updates(run, run.program.training, results)
        results[loss].backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        part = results[loss].detach()
        total = part if total is None else total + part
    assert total is not None, "a step has a microbatch"
    return total


def run_forward(run: StageRun, ranks: Ranks, num_stages: int) -> dict[str, Tensor]:
    """All microbatches forward; the outputs made on this stage, whole over microbatches."""
    parts: dict[str, list[Tensor]] = {}
    for microbatch in range(run.num_microbatches):
        received = {}
        for name, meta, _ in run.program.receives:
            buffer = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=ranks.device)
            dist.recv(buffer, group=ranks.pipeline_group, group_src=ranks.stage - 1)
            received[name] = buffer
        results = run.run(run.program.full, microbatch, received)
        for name, _, _ in run.program.sends:
            dist.send(
                results[name].contiguous(), group=ranks.pipeline_group, group_dst=ranks.stage + 1
            )
        for name, value in zip((r.name for r in run.program.full.returns), results.values()):
            parts.setdefault(name, []).append(value)
    sends = {n for n, _, _ in run.program.sends}
    final = {r.name: r for r in run.program.full.returns[len(sends) :]}
    return {name: _joined(parts[name], returned) for name, returned in final.items()}


def _joined(parts: list[Tensor], returned: Returned) -> Tensor:
    if returned.over_time == "S":
        if returned.blocks == 1 or len(parts) == 1:
            return torch.cat(parts, returned.dim) if len(parts) > 1 else parts[0]
        opened = [torch.unflatten(p, returned.dim, (returned.blocks, -1)) for p in parts]
        return torch.cat(opened, returned.dim + 1).flatten(returned.dim, returned.dim + 1)
    return torch.stack(parts).sum(0) if returned.over_time == "P" else parts[-1]
