# SPDX-License-Identifier: Apache-2.0
"""Local forms that depend on where a rank stands and when it runs, each with its reason.

A microbatch's rows, random streams, a masked look-up, products by group, an index aligned with a
shard, attention over split queries. `SPECIAL_OPS` maps targets to the functions that make their
calls; those that reduce over ranks are in `reduced_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from autoplan.capture.hand_written import function_named
from autoplan.executor.local_op import Call, LocalOp, first_index, shard_number
from autoplan.executor.meshes import Ranks
from autoplan.graph import Ref

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """When a body runs: its microbatch and the step's random seed."""

    microbatch: int
    num_microbatches: int
    seed: int


def rows(x: Tensor, moment: Moment, dim: int, blocks: int) -> Tensor:
    """One microbatch's rows of a tensor of the whole batch."""
    opened = x if blocks == 1 else torch.unflatten(x, dim, (blocks, -1))
    at = dim if blocks == 1 else dim + 1
    part = opened.shape[at] // moment.num_microbatches
    taken = opened.narrow(at, moment.microbatch * part, part)
    return taken if blocks == 1 else taken.flatten(dim, dim + 1)


def _rows(local: LocalOp, ranks: Ranks) -> Call:
    module = _Rows(local.integer("dim"), local.integer("blocks"))
    return Call(module, (Ref(0),), {}, needs_moment=True)


class _Rows(nn.Module):
    def __init__(self, dim: int, blocks: int) -> None:
        super().__init__()
        self.dim, self.blocks = dim, blocks

    def forward(self, moment: Moment, x: Tensor) -> Tensor:
        return rows(x, moment, self.dim, self.blocks)


def stream_seed(seed: int, *parts: int) -> int:
    """One 63-bit seed out of several numbers.

    Source: splitmix64's steps; Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
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
        microbatch = moment.microbatch if self.over_time else 0
        generator.manual_seed(stream_seed(moment.seed, self.index, microbatch, self.shard))
        return torch.rand(shape, generator=generator, device=device) >= self.p


def _dropout(local: LocalOp, ranks: Ranks) -> Call:
    shard = shard_number(local.outputs[0].value, ranks)
    module = Dropout(local.number("p"), local.index, shard, local.over_time)
    return Call(module, (Ref(0),), {}, needs_moment=True)


class Drawn(nn.Module):
    """An op that draws random numbers as it is, from a stream of its own.

    No rule splits it, so all ranks hold the whole of it and draw the same; a recomputed forward
    draws the first numbers again.
    """

    def __init__(
        self, overload: torch._ops.OpOverload, index: int, over_time: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.overload, self.index, self.over_time = overload, index, over_time
        self.device = device

    def forward(self, moment: Moment, *args: object, **kwargs: object) -> object:
        microbatch = moment.microbatch if self.over_time else 0
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(stream_seed(moment.seed, self.index, microbatch, 0))
            # numbers fill memory in order: strides would decide which one goes where
            whole = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
            return self.overload(*whole, **kwargs)


class VocabularyEmbedding(nn.Module):
    """Look-up in a part of the vocabulary.

    Zero for the tokens that other ranks hold; the sum over ranks is the look-up.
    """

    def __init__(self, start: int, padding_idx: int) -> None:
        super().__init__()
        self.start, self.padding_idx = start, padding_idx

    def forward(self, weight: Tensor, indices: Tensor) -> Tensor:
        here = indices - self.start
        held = (here >= 0) & (here < weight.shape[0])
        padding = self.padding_idx - self.start
        own = padding if self.padding_idx >= 0 and 0 <= padding < weight.shape[0] else None
        found = nn.functional.embedding(here.clamp(0, weight.shape[0] - 1), weight, padding_idx=own)
        return found.masked_fill(~held.unsqueeze(-1), 0.0)


def _embedding(local: LocalOp, ranks: Ranks) -> Call:
    weight = local.inputs[0].value
    padding = local.op.arguments.get("padding_idx", -1)
    assert isinstance(padding, int), "padding_idx is a number"
    if not weight.axes_of(0):
        by_frequency = bool(local.op.arguments.get("scale_grad_by_freq"))
        sparse = bool(local.op.arguments.get("sparse"))
        args = (Ref(0), Ref(1), padding, by_frequency, sparse)
        return Call(torch.ops.aten.embedding.default, args, {})
    start = first_index(weight, 0, local.global_inputs[0].shape[0], ranks)
    return Call(VocabularyEmbedding(start, padding), (Ref(0), Ref(1)), {})


class AlignedIndex(nn.Module):
    """Advanced indexing where an index runs over a whole dim of the source.

    On a shard both start at the same row.
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
    indices, pairs = local.op.arguments["indices"], local.op.arguments["aligned"]
    assert isinstance(indices, tuple), "an index per dim"
    assert isinstance(pairs, tuple), "pairs of a dim and its size"
    module = AlignedIndex(indices, tuple(dim for dim, _ in pairs))
    return Call(module, local.refs, {})


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
            own = torch.arange(query.shape[-2], device=query.device) + self.first_query
            mask = own.unsqueeze(1) >= torch.arange(key.shape[-2], device=query.device)
        if not self._drops():
            causal = self.is_causal and not split
            attended: Tensor = nn.functional.scaled_dot_product_attention(
                query, key, value, mask, 0.0, causal, scale=self.scale, enable_gqa=self.gqa
            )
            return attended
        assert self.dropout is not None, "only attention with dropout gets here"
        if self.gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        scores = query @ key.transpose(-2, -1) * scale
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights: Tensor = self.dropout(moment, scores.softmax(-1))
        return weights @ value

    def _drops(self) -> bool:
        return self.training and self.dropout is not None


def _attention(local: LocalOp, ranks: Ranks) -> Call:
    given = local.op.arguments
    spec, shape = local.inputs[0].value, local.global_inputs[0].shape
    p = local.number("dropout_p") if given.get("dropout_p") else 0.0
    dropout = Dropout(p, local.index, shard_number(spec, ranks), local.over_time) if p else None
    first = first_index(spec, len(shape) - 2, shape[-2], ranks)
    gqa = shape[-3] != local.global_inputs[1].shape[-3]
    scale = local.number("scale") if given.get("scale") is not None else None
    module = Attention(bool(given.get("is_causal")), scale, gqa, first, shape[-2], dropout)
    return Call(module, local.refs, {}, needs_moment=True)


class GroupedProduct(nn.Module):
    """Each row times the matrix of its group; zero for the groups that other ranks hold.

    The sum over ranks is the product. Rows are sorted by group here, on the rank that has them, so
    that each group is one product; those of other ranks come last and are left out.
    """

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def forward(self, x: Tensor, weight: Tensor, group: Tensor) -> Tensor:
        num_groups = weight.shape[0]
        here = group.long() - self.start
        here = torch.where((here >= 0) & (here < num_groups), here, num_groups)
        counts = torch.bincount(here, minlength=num_groups + 1)[:num_groups].tolist()
        order = here.argsort(stable=True)[: sum(counts)]
        runs = torch.split(x.index_select(0, order), counts)
        products = [run @ matrix for run, matrix in zip(runs, weight.unbind(0))]
        result = x.new_zeros(x.shape[0], weight.shape[2])
        return result.index_copy(0, order, torch.cat(products))


def _grouped_mm(local: LocalOp, ranks: Ranks) -> Call:
    start = first_index(local.inputs[1].value, 0, local.global_inputs[1].shape[0], ranks)
    return Call(GroupedProduct(start), local.refs, {})


def _function(local: LocalOp, ranks: Ranks) -> Call:
    """A function with a backward of its own, on whole tensors, through its class."""
    name, args = local.op.arguments["function"], local.op.arguments["arguments"]
    assert isinstance(args, tuple), "as the capture writes it"
    return Call(_Applied(function_named(str(name))), args, {})


class _Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object) -> object:
        return self.function.apply(*args)  # type: ignore[no-untyped-call] # torch's


SPECIAL_OPS: dict[str, Callable[[LocalOp, Ranks], Call]] = {
    "autoplan.microbatch": _rows,
    "autoplan.function": _function,
    "autoplan.dropout": _dropout,
    "aten.embedding.default": _embedding,
    "autoplan.index": _index,
    "autoplan.grouped_mm": _grouped_mm,
    "aten.scaled_dot_product_attention.default": _attention,
}
