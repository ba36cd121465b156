# SPDX-License-Identifier: Apache-2.0
"""Moves of `sharding/resharding.py` as collectives on local tensors, and conversions.

`Conversion` is the node the rewritten graph shows: its name says what moves, forward and backward,
for its backward is the other direction. A split in blocks is a plain split of the dim seen as
(blocks, rest); everything here works on that view.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.executor.meshes import Ranks
from autoplan.placements import Layout, Shard, ShardingSpec
from autoplan.sharding.resharding import Move, transition

Tensor = torch.Tensor
AXIS_NAMES = ("dp", "tp")
# On gloo a sum of up to so many bytes is one exchange of whole tensors: about half the time of its
# all-reduce, which takes 2 (n - 1) rounds (torch 2.13, 2 and 4 processes on 2 cores, 2026-11-30).
ONE_SHOT_BYTES = 256 * 1024


def run_moves(x: Tensor, moves: tuple[Move, ...], ranks: Ranks) -> Tensor:
    """The local tensor after these moves. Never in place."""
    for move in moves:
        x = _MOVES[move.kind](x, move, ranks)
    return x


def _opened(x: Tensor, shard: Shard) -> tuple[Tensor, int]:
    """The tensor with its split dim seen as (blocks, rest), and where the rest is."""
    if shard.blocks == 1:
        return x, shard.dim
    return torch.unflatten(x, shard.dim, (shard.blocks, -1)), shard.dim + 1


def _closed(x: Tensor, shard: Shard) -> Tensor:
    return x if shard.blocks == 1 else x.flatten(shard.dim, shard.dim + 1)


def _shard(placement: object) -> Shard:
    assert isinstance(placement, Shard), f"{placement} is a split"
    return placement


def _all_reduce(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    group, size = ranks.group(move.axis), ranks.axis_sizes[move.axis]
    if ranks.device.type == "cpu" and x.numel() * x.element_size() <= ONE_SHOT_BYTES:
        every = x.expand(size, *x.shape).contiguous()
        return _exchanged_sum(every, group)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _exchanged_sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what every rank has for this one; parts: (ranks, ...), one for each.

    Added in rank order on every rank, so ranks that sum the same tensors get the same bits.
    """
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.sum(0, dtype=parts.dtype)


def _all_gather(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    shard, size = _shard(move.source), ranks.axis_sizes[move.axis]
    opened, dim = _opened(x, shard)
    front = opened.movedim(dim, 0).contiguous()
    out = front.new_empty((size * front.shape[0], *front.shape[1:]))
    if x.dtype == torch.bool:  # gloo has no bool
        dist.all_gather_single(
            out.view(torch.uint8), front.view(torch.uint8), group=ranks.group(move.axis)
        )
    else:
        dist.all_gather_single(out, front, group=ranks.group(move.axis))
    return _closed(out.movedim(0, dim), shard)


def _reduce_scatter(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    shard, size = _shard(move.target), ranks.axis_sizes[move.axis]
    opened, dim = _opened(x, shard)
    front = opened.movedim(dim, 0).contiguous()
    if ranks.device.type == "cpu":  # gloo reduces in rounds; one exchange moves the same bytes
        out = _exchanged_sum(front.view(size, -1, *front.shape[1:]), ranks.group(move.axis))
    else:
        out = front.new_empty((front.shape[0] // size, *front.shape[1:]))
        dist.reduce_scatter_single(out, front, group=ranks.group(move.axis))
    return _closed(out.movedim(0, dim), shard)


def _all_to_all(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    """Cuts the target dim, joins the source dim; both may be in blocks."""
    source, target, size = _shard(move.source), _shard(move.target), ranks.axis_sizes[move.axis]
    opened, cut = _opened(x, target)
    parts = torch.unflatten(opened, cut, (size, -1)).movedim(cut, 0).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=ranks.group(move.axis))
    # out: [from rank, ...local with the target dim cut]; the from-rank dim goes before the rest
    # of the source dim
    out = torch.stack([_closed(part, target) for part in out.unbind(0)])
    if source.blocks == 1:
        return out.movedim(0, source.dim).flatten(source.dim, source.dim + 1)
    inner = torch.unflatten(out, source.dim + 1, (source.blocks, -1)).movedim(0, source.dim + 1)
    return inner.flatten(source.dim, source.dim + 2)


def _slice(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    shard, size = _shard(move.target), ranks.axis_sizes[move.axis]
    opened, dim = _opened(x, shard)
    part = opened.shape[dim] // size
    return _closed(opened.narrow(dim, ranks.coordinates[move.axis] * part, part), shard)


def _pad(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    shard, size = _shard(move.source), ranks.axis_sizes[move.axis]
    opened, dim = _opened(x, shard)
    part = opened.shape[dim]
    out = opened.new_zeros((*opened.shape[:dim], size * part, *opened.shape[dim + 1 :]))
    out.narrow(dim, ranks.coordinates[move.axis] * part, part).copy_(opened)
    return _closed(out, shard)


def _keep(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    return x if ranks.coordinates[move.axis] == 0 else torch.zeros_like(x)


_MOVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "pad": _pad,
    "keep": _keep,
}


@dataclass(frozen=True, slots=True)
class _Packed:
    """What autograd keeps of a gathered parameter: the shard, and which view of the whole."""

    shard: Tensor
    conversion: Conversion
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regather:
    """Parameters gathered for use are not kept for backward, but gathered again there.

    A tensor that autograd saves is recognised by its memory while the gathered tensor is alive; it
    may be a view of it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor, Conversion]] = {}

    def note(self, gathered: Tensor, shard: Tensor, conversion: Conversion) -> None:
        """Remembers where a gathered tensor came from, while it lives."""
        pointer = gathered.untyped_storage().data_ptr()
        self._known[pointer] = (weakref.ref(gathered), shard.detach(), conversion)

    def hooks(self) -> contextlib.AbstractContextManager[object]:
        """Under it, autograd saves shards in place of gathered parameters."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> object:
        entry = self._known.get(tensor.untyped_storage().data_ptr())
        if entry is None or entry[0]() is None or (tensor.requires_grad and tensor.is_leaf):
            return tensor
        _, shard, conversion = entry
        offset = int(tensor.storage_offset())
        return _Packed(shard, conversion, tuple(tensor.size()), tensor.stride(), offset)

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert isinstance(packed, _Packed), "hooks unpack what they packed"
        conversion = packed.conversion
        with torch.no_grad():
            whole = run_moves(packed.shard, conversion.forward_moves, conversion.ranks)
            return whole.as_strided(packed.size, packed.stride, packed.offset)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conversion: Conversion) -> Tensor:
        ctx.conversion = conversion
        out = run_moves(x, conversion.forward_moves, conversion.ranks)
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        conversion: Conversion = ctx.conversion
        return run_moves(grad, conversion.backward_moves, conversion.ranks), None


class Conversion(nn.Module):
    """One tensor from the layout it was made in to the one it is used in; its gradient back.

    Attributes:
        forward_moves, backward_moves: What runs, in order.
        is_gather: Forward only gathers, so the result can be made again in backward instead of
            being kept.
    """

    def __init__(self, made: Layout, used: Layout, ranks: Ranks, *, carries_gradient: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.forward_moves = transition(made.value, used.value, ranks.axis_sizes)
        self.backward_moves = (
            transition(used.grad, made.grad, ranks.axis_sizes) if carries_gradient else ()
        )
        self.carries_gradient = carries_gradient
        self.is_gather = bool(self.forward_moves) and all(
            m.kind == "all_gather" for m in self.forward_moves
        )
        self.regather: Regather | None = None

    @property
    def is_nothing(self) -> bool:
        """Neither direction moves or changes anything."""
        return not self.forward_moves and not self.backward_moves

    def forward(self, x: Tensor) -> Tensor:
        """The converted local tensor."""
        if self.carries_gradient:
            converted: Tensor = _Convert.apply(x, self)  # type: ignore[no-untyped-call] # torch's
            if self.regather is not None and torch.is_grad_enabled():
                self.regather.note(converted, x, self)
            return converted
        return run_moves(x, self.forward_moves, self.ranks)

    def describe(self) -> str:
        """A name for the printed code, such as "all_reduce_tp".

        "none__backward_all_reduce_tp" when only backward moves.
        """
        ahead = "_".join(f"{m.kind}_{AXIS_NAMES[m.axis]}" for m in self.forward_moves) or "none"
        back = "_".join(f"{m.kind}_{AXIS_NAMES[m.axis]}" for m in self.backward_moves)
        return f"{ahead}__backward_{back}" if back else ahead


def convert_stored(x: Tensor, source: ShardingSpec, target: ShardingSpec, ranks: Ranks) -> Tensor:
    """A stored local tensor in another spec, outside of autograd."""
    return run_moves(x, transition(source, target, ranks.axis_sizes), ranks)
