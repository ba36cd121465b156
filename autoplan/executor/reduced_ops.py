# SPDX-License-Identifier: Apache-2.0
"""Local forms that reduce over ranks themselves: losses over split classes, batch norm.

A rule that *completes* a letter (`sharding/rules.py`) names an op whose local form finishes the
reduction over it; the collectives of these ops are here. Also the count of labels that a mean is
taken over. `REDUCED_OPS` maps targets to the functions that make their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.executor.local_op import Call, LocalOp, first_index
from autoplan.executor.meshes import Ranks
from autoplan.graph import Ref
from autoplan.placements import Shard

Tensor = torch.Tensor
Groups = tuple[dist.ProcessGroup, ...]


class _SumOverAxes(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced too.

    Every rank's loss depends on every rank's part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        out = x.clone()
        for group in groups:
            dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.clone()
        for group in ctx.groups:
            dist.all_reduce(out, group=group)
        return out, None


class _ClassSplitLoss(torch.autograd.Function):
    """Cross entropy per row where each rank holds a part of the classes.

    Three reductions over rows forward (maximum, sum of exponentials, logit of the label), none
    backward. Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3. Label smoothing
    adds a sum of all logits to the third.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        start: int,
        groups: Groups,
        smoothing: float,
        num_classes: int,
    ) -> Tensor:
        peak = logits.amax(1)
        for group in groups:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak.unsqueeze(1)
        exponentials = shifted.exp()
        here = target - start
        held = (here >= 0) & (here < logits.shape[1])
        at = here.clamp(0, logits.shape[1] - 1).unsqueeze(1)
        own = shifted.gather(1, at).squeeze(1).masked_fill(~held, 0.0)
        sums = torch.stack((exponentials.sum(1), own, shifted.sum(1) if smoothing else own))
        for group in groups:
            dist.all_reduce(sums, group=group)
        total, label, every = sums.unbind(0)
        loss = total.log() - (1.0 - smoothing) * label - (smoothing / num_classes) * every
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), at, held)
        ctx.smoothing, ctx.num_classes = smoothing, num_classes
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, at, held = ctx.saved_tensors
        grad_logits = (
            softmax - ctx.smoothing / ctx.num_classes if ctx.smoothing else softmax.clone()
        )
        grad_logits.scatter_add_(
            1, at, -(1.0 - ctx.smoothing) * held.unsqueeze(1).to(softmax.dtype)
        )
        return grad_logits * grad.unsqueeze(1), None, None, None, None, None


class CrossEntropy(nn.Module):
    """Losses per row, or their sum, of the labels that are not ignored.

    Attributes:
        reduction: "none" or "sum".
        groups: The ranks that hold the other classes, one group per axis that splits them; empty
            when they are whole.
        start: This rank's first class.
    """

    def __init__(
        self,
        reduction: str,
        ignore_index: int,
        smoothing: float,
        log_probs: bool,
        start: int,
        num_classes: int,
        groups: Groups,
    ) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index
        self.smoothing, self.log_probs = smoothing, log_probs
        self.start, self.num_classes, self.groups = start, num_classes, groups

    def forward(self, logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        if not self.groups:
            if self.log_probs:
                loss: Tensor = nn.functional.nll_loss(
                    logits, target, weight, ignore_index=self.ignore_index, reduction=self.reduction
                )
                return loss
            return nn.functional.cross_entropy(
                logits,
                target,
                weight,
                ignore_index=self.ignore_index,
                reduction=self.reduction,
                label_smoothing=self.smoothing,
            )
        ignored = target == self.ignore_index
        safe = target.masked_fill(ignored, 0)
        given = (logits, safe, self.start, self.groups, self.smoothing, self.num_classes)
        per_row: Tensor = _ClassSplitLoss.apply(*given)  # type: ignore[no-untyped-call] # torch's
        per_row = per_row.masked_fill(ignored, 0.0)
        return per_row if self.reduction == "none" else per_row.sum()


def _cross_entropy(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    dim = 1 if len(local.global_inputs[0].shape) > 1 else 0
    logits = local.inputs[0].value
    groups = tuple(ranks.group(axis) for axis in logits.axes_of(dim))
    num_classes = local.global_inputs[0].shape[dim]
    module = CrossEntropy(
        "none" if local.op.target == "autoplan.cross_entropy" else "sum",
        local.integer("ignore_index"),
        local.number("label_smoothing"),
        bool(given["log_probs"]),
        first_index(logits, dim, num_classes, ranks),
        num_classes,
        groups,
    )
    return Call(module, local.refs, {})


class LabelCount(nn.Module):
    """How many labels count, as the denominator of a mean.

    Those that are not ignored, each with its class weight; of class probabilities the rows.
    """

    def __init__(self, ignore_index: int, dtype: torch.dtype, rows_only: bool) -> None:
        super().__init__()
        self.ignore_index, self.dtype, self.rows_only = ignore_index, dtype, rows_only

    def forward(self, target: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.rows_only:
            num_classes = target.shape[1] if target.dim() > 1 else target.numel()
            num_rows = target.numel() // num_classes
            return torch.tensor(num_rows, dtype=self.dtype, device=target.device)
        counted = target != self.ignore_index
        if weight is None:
            return counted.sum().to(self.dtype)
        weights = weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0)
        return weights.sum().to(self.dtype)


def _label_count(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    dtype = getattr(torch, str(given["dtype"]))
    module = LabelCount(local.integer("ignore_index"), dtype, bool(given["probabilities"]))
    return Call(module, local.refs, {})


class BatchNorm(nn.Module):
    """Batch norm over (batch, positions).

    Where these are split, the statistics are sums over all ranks, as on one device. Gives (output,
    new running mean, new running variance).
    """

    def __init__(
        self,
        training: bool,
        momentum: float,
        eps: float,
        present: tuple[bool, ...],
        groups: Groups,
    ) -> None:
        super().__init__()
        self.statistics_of_batch = training
        self.momentum, self.eps, self.present, self.groups = momentum, eps, present, groups

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        queue = iter(others)
        weight, bias, mean, var = (next(queue) if here else None for here in self.present)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        if not self.statistics_of_batch or (not self.training and mean is not None):
            out = nn.functional.batch_norm(
                x, mean, var, weight, bias, False, self.momentum, self.eps
            )
            return out, mean, var
        dims = [d for d in range(x.dim()) if d != 1]
        count = x.numel() // x.shape[1]
        total = torch.tensor(float(count), dtype=torch.float64)
        for group in self.groups:
            total = total * dist.get_world_size(group)
        n = float(total)
        batch_mean = self._sum(x.sum(dims)) / n
        centered = x - batch_mean.view(shape)
        batch_var = self._sum(centered.square().sum(dims)) / n
        out = centered * (batch_var + self.eps).rsqrt().view(shape)
        out = out * weight.view(shape) if weight is not None else out
        out = out + bias.view(shape) if bias is not None else out
        if mean is None or var is None:
            return out, None, None
        with torch.no_grad():
            new_mean = mean + self.momentum * (batch_mean - mean)
            new_var = var + self.momentum * (batch_var * (n / max(n - 1.0, 1.0)) - var)
        return out, new_mean.to(mean.dtype), new_var.to(var.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        if not self.groups:
            return x
        summed: Tensor = _SumOverAxes.apply(x, self.groups)  # type: ignore[no-untyped-call] # torch's
        return summed


def _batch_norm(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    spec = local.inputs[0].value
    axes = [a for a, p in enumerate(spec) if isinstance(p, Shard) and p.dim != 1]
    present = tuple(
        isinstance(given[k], Ref) for k in ("weight", "bias", "running_mean", "running_var")
    )
    groups = tuple(ranks.group(a) for a in axes)
    momentum, eps = local.number("momentum"), local.number("eps")
    module = BatchNorm(bool(given["training"]), momentum, eps, present, groups)
    return Call(module, local.refs, {})


REDUCED_OPS: dict[str, Callable[[LocalOp, Ranks], Call]] = {
    "autoplan.cross_entropy": _cross_entropy,
    "autoplan.cross_entropy_sum": _cross_entropy,
    "autoplan.cross_entropy_count": _label_count,
    "autoplan.batch_norm": _batch_norm,
}
