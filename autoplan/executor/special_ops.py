# SPDX-License-Identifier: Apache-2.0
"""Local forms that are more than the op on local sizes, each with its reason.

A masked look-up, class-split losses, synchronised statistics, random streams, attention over split
queries. `SPECIAL_OPS` maps targets to the functions that make their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autoplan.executor.local_op import Call, LocalOp
from autoplan.executor.meshes import Ranks
from autoplan.graph import Ref
from autoplan.placements import Shard, ShardingSpec

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """When a body runs: its microbatch and the step's random seed."""

    microbatch: int
    num_microbatches: int
    seed: int


def rows(x: Tensor, moment: Moment, dim: int, blocks: int) -> Tensor:
    """One microbatch's rows of a tensor of the whole batch."""
    opened = x if blocks == 1 else x.unflatten(dim, (blocks, -1))
    at = dim if blocks == 1 else dim + 1
    part = opened.shape[at] // moment.num_microbatches
    taken = opened.narrow(at, moment.microbatch * part, part)
    return taken if blocks == 1 else taken.flatten(dim, dim + 1)


def _rows(local: LocalOp, ranks: Ranks) -> Call:
    return Call(
        _Rows(int(local.op.arguments["dim"]), int(local.op.arguments["blocks"])),
        (Ref(0),),
        {},
        needs_moment=True,
    )  # type: ignore[call-overload]


class _Rows(nn.Module):
    def __init__(self, dim: int, blocks: int) -> None:
        super().__init__()
        self.dim, self.blocks = dim, blocks

    def forward(self, moment: Moment, x: Tensor) -> Tensor:
        return rows(x, moment, self.dim, self.blocks)


def stream_seed(seed: int, *parts: int) -> int:
    """One 63-bit seed out of several numbers (splitmix64 steps; Steele, Lea, Flood, OOPSLA
    2014).
    """
    state = seed & 0xFFFFFFFFFFFFFFFF
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + part) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class Dropout(nn.Module):
    """Dropout whose mask depends on the seed, the op, the microbatch and the shard.

    Ranks that hold the same part draw the same mask, ranks that hold different parts draw different
    ones, and a recomputed forward draws the first one again, because the stream is a function of
    these numbers and of nothing else.
    """

    def __init__(self, p: float, index: int, shard: int, over_time: bool) -> None:
        super().__init__()
        self.p, self.index, self.shard, self.over_time = p, index, shard, over_time

    def forward(self, moment: Moment, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        return x * self.mask(moment, x.shape, x.device).to(x.dtype).mul_(1.0 / (1.0 - self.p))

    def mask(self, moment: Moment, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The elements that stay."""
        generator = torch.Generator(device)
        generator.manual_seed(
            stream_seed(
                moment.seed, self.index, moment.microbatch if self.over_time else 0, self.shard
            )
        )
        return torch.rand(shape, generator=generator, device=device) >= self.p


def _shard_number(spec: ShardingSpec, ranks: Ranks) -> int:
    number = 0
    for placement, size, at in zip(spec, ranks.axis_sizes, ranks.coordinates):
        if isinstance(placement, Shard):
            number = number * size + at
    return number


def _dropout(local: LocalOp, ranks: Ranks) -> Call:
    module = Dropout(
        float(local.op.arguments["p"]),
        local.index,
        _shard_number(local.outputs[0].value, ranks),
        local.over_time,
    )  # type: ignore[arg-type]
    return Call(module, (Ref(0),), {}, needs_moment=True)


class VocabularyEmbedding(nn.Module):
    """Look-up in a part of the vocabulary: zero for the tokens that other ranks hold; the sum over
    ranks is the look-up.
    """

    def __init__(self, start: int, padding_idx: int) -> None:
        super().__init__()
        self.start, self.padding_idx = start, padding_idx

    def forward(self, weight: Tensor, indices: Tensor) -> Tensor:
        here = indices - self.start
        held = (here >= 0) & (here < weight.shape[0])
        own = (
            self.padding_idx - self.start
            if 0 <= self.padding_idx - self.start < weight.shape[0] and self.padding_idx >= 0
            else None
        )
        found = nn.functional.embedding(here.clamp(0, weight.shape[0] - 1), weight, padding_idx=own)
        return found.masked_fill(~held.unsqueeze(-1), 0.0)


def _first_row(spec: ShardingSpec, dim: int, whole: int, ranks: Ranks) -> int:
    """Index of this rank's first element along a dim that is split plainly."""
    start, size = 0, whole
    for placement, parts, at in zip(spec, ranks.axis_sizes, ranks.coordinates):
        if isinstance(placement, Shard) and placement.dim == dim:
            size //= parts
            start += at * size
    return start


def _embedding(local: LocalOp, ranks: Ranks) -> Call:
    weight = local.inputs[0].value
    padding = local.op.arguments.get("padding_idx", -1)
    assert isinstance(padding, int), "padding_idx is a number"
    if not weight.axes_of(0):
        by_frequency, sparse = (
            bool(local.op.arguments.get("scale_grad_by_freq")),
            bool(local.op.arguments.get("sparse")),
        )
        return Call(
            torch.ops.aten.embedding.default, (Ref(0), Ref(1), padding, by_frequency, sparse), {}
        )
    start = _first_row(weight, 0, local.global_inputs[0].shape[0], ranks)
    return Call(VocabularyEmbedding(start, padding), (Ref(0), Ref(1)), {})


class _SumOverAxes(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced too: every rank's loss depends on every rank's
    part.
    """

    @staticmethod
    def forward(ctx, x, groups):  # type: ignore[no-untyped-def, override]
        ctx.groups = groups
        out = x.clone()
        for group in groups:
            dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
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
    # type: ignore[no-untyped-def, override]
    def forward(ctx, logits, target, start, groups, smoothing, num_classes):
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
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
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
        groups: tuple[dist.ProcessGroup, ...],
    ) -> None:
        super().__init__()
        self.reduction, self.ignore_index, self.smoothing, self.log_probs = (
            reduction,
            ignore_index,
            smoothing,
            log_probs,
        )
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
        per_row: Tensor = _ClassSplitLoss.apply(
            logits, safe, self.start, self.groups, self.smoothing, self.num_classes
        )  # type: ignore[no-untyped-call]
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
        int(given["ignore_index"]),  # type: ignore[call-overload]
        float(given["label_smoothing"]),  # type: ignore[arg-type]
        bool(given["log_probs"]),
        _first_row(logits, dim, num_classes, ranks),
        num_classes,
        groups,
    )
    return Call(module, tuple(Ref(i) for i in range(len(local.op.inputs))), {})


class LabelCount(nn.Module):
    """How many labels count, as the denominator of a mean: not ignored, each with its class
    weight.
    """

    def __init__(self, ignore_index: int, dtype: torch.dtype, rows_only: bool) -> None:
        super().__init__()
        self.ignore_index, self.dtype, self.rows_only = ignore_index, dtype, rows_only

    def forward(self, target: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.rows_only:
            return torch.tensor(
                target.numel() // (target.shape[1] if target.dim() > 1 else target.numel()),
                dtype=self.dtype,
                device=target.device,
            )
        counted = target != self.ignore_index
        if weight is None:
            return counted.sum().to(self.dtype)
        return (
            weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum().to(self.dtype)
        )


def _label_count(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    module = LabelCount(
        int(given["ignore_index"]),
        getattr(torch, str(given["dtype"])),
        bool(given["probabilities"]),
    )  # type: ignore[call-overload]
    return Call(module, tuple(Ref(i) for i in range(len(local.op.inputs))), {})


class BatchNorm(nn.Module):
    """Batch norm over (batch, positions); where these are split, the statistics are sums over all
    ranks, as on one device.

    Gives (output, new running mean, new running variance).
    """

    def __init__(
        self,
        training: bool,
        momentum: float,
        eps: float,
        present: tuple[bool, ...],
        groups: tuple[dist.ProcessGroup, ...],
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
        summed: Tensor = _SumOverAxes.apply(x, self.groups)  # type: ignore[no-untyped-call]
        return summed


def _batch_norm(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    spec = local.inputs[0].value
    axes = [a for a, p in enumerate(spec) if isinstance(p, Shard) and p.dim != 1]
    present = tuple(
        isinstance(given[k], Ref) for k in ("weight", "bias", "running_mean", "running_var")
    )
    groups = tuple(ranks.group(a) for a in axes)
    module = BatchNorm(
        bool(given["training"]), float(given["momentum"]), float(given["eps"]), present, groups
    )  # type: ignore[arg-type]
    return Call(module, tuple(Ref(i) for i in range(len(local.op.inputs))), {})


class AlignedIndex(nn.Module):
    """Advanced indexing where an index runs over a whole dim of the source: on a shard both start
    at the same row.
    """

    def __init__(self, indices: tuple[object, ...], aligned: tuple[int, ...]) -> None:
        super().__init__()
        self.indices, self.aligned = indices, aligned

    def forward(self, source: Tensor, *given: Tensor) -> Tensor:
        taken: list[Tensor | None] = []
        for dim, ref in enumerate(self.indices):
            index = given[ref.index - 1] if isinstance(ref, Ref) else None
            taken.append(
                index - index.flatten()[0] if index is not None and dim in self.aligned else index
            )
        result: Tensor = torch.ops.aten.index.Tensor(source, taken)
        return result


def _index(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    aligned = tuple(d for d, _ in given["aligned"])  # type: ignore[attr-defined]
    module = AlignedIndex(given["indices"], aligned)  # type: ignore[arg-type]
    return Call(module, tuple(Ref(i) for i in range(len(local.op.inputs))), {})


class Attention(nn.Module):
    """Scaled dot-product attention on this rank's batch rows, heads and query positions.

    Queries split along the sequence see the causal mask of their own positions; dropout draws from
    the op's stream.
    """

    def __init__(
        self,
        is_causal: bool,
        scale: float | None,
        gqa: bool,
        first_query: int,
        num_queries: int,
        dropout: Dropout | None,
    ) -> None:
        super().__init__()
        self.is_causal, self.scale, self.gqa = is_causal, scale, gqa
        self.first_query, self.num_queries, self.dropout = first_query, num_queries, dropout

    def forward(
        self, moment: Moment, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        split = query.shape[-2] != self.num_queries
        if self.is_causal and (split or self._drops()):
            rows_ = torch.arange(
                self.first_query, self.first_query + query.shape[-2], device=query.device
            )
            mask = rows_.unsqueeze(1) >= torch.arange(key.shape[-2], device=query.device)
        if not self._drops():
            return nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                mask,
                0.0,
                self.is_causal and not split,
                scale=self.scale,
                enable_gqa=self.gqa,
            )
        assert self.dropout is not None, "only attention with dropout gets here"
        if self.gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scores = (
            query
            @ key.transpose(-2, -1)
            * (self.scale if self.scale is not None else query.shape[-1] ** -0.5)
        )
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            )
        return self.dropout(moment, scores.softmax(-1)) @ value

    def _drops(self) -> bool:
        return self.training and self.dropout is not None


def _attention(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    spec, shape = local.inputs[0].value, local.global_inputs[0].shape
    p = float(given.get("dropout_p") or 0.0)  # type: ignore[arg-type]
    dropout = Dropout(p, local.index, _shard_number(spec, ranks), local.over_time) if p else None
    first = _first_row(spec, len(shape) - 2, shape[-2], ranks)
    gqa = shape[-3] != local.global_inputs[1].shape[-3]
    scale = given.get("scale")
    module = Attention(
        bool(given.get("is_causal")),
        None if scale is None else float(scale),
        gqa,
        first,
        shape[-2],
        dropout,
    )  # type: ignore[arg-type]
    return Call(module, tuple(Ref(i) for i in range(len(local.op.inputs))), {}, needs_moment=True)


SPECIAL_OPS: dict[str, Callable[[LocalOp, Ranks], Call]] = {
    "autoplan.microbatch": _rows,
    "autoplan.dropout": _dropout,
    "aten.embedding.default": _embedding,
    "autoplan.cross_entropy": _cross_entropy,
    "autoplan.cross_entropy_sum": _cross_entropy,
    "autoplan.cross_entropy_count": _label_count,
    "autoplan.batch_norm": _batch_norm,
    "autoplan.index": _index,
    "aten.scaled_dot_product_attention.default": _attention,
}
