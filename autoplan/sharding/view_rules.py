# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that move elements without computing: views, slices, joins, factories, indexing.

Each resolver takes the op and the metas of its tensors and gives its `OpRule`; the reason for what
is never split stands beside it. `VIEW_RULES` maps op families to resolvers.
"""

from __future__ import annotations

import math
from itertools import pairwise

from autoplan.graph import Op, Ref, TensorMeta
from autoplan.sharding.arguments import (
    Metas,
    Outs,
    Resolver,
    as_dim,
    as_int,
    as_ints,
    frozen,
    letters_of,
)
from autoplan.sharding.factors import Atom, Dims, OpRule, plain


def _view(inputs: Dims, outputs: tuple[Dims, ...]) -> OpRule:
    return OpRule((inputs,), outputs, linear=(frozenset({0}),))


def reshape(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Groups of dims with equal products; inside a group both sides share the factors that divide
    both.
    """
    assert outputs[0] is not None, "a reshape that nobody uses is dropped at capture"
    source, target = inputs[0].shape, outputs[0].shape
    in_dims: list[tuple[Atom, ...]] = [(Atom(None, 1),)] * len(source)
    out_dims: list[tuple[Atom, ...]] = [(Atom(None, 1),)] * len(target)
    if 0 in source:  # an empty tensor has nothing to split
        return _view(
            plain((None,) * len(source), inputs[0]), (plain((None,) * len(target), outputs[0]),)
        )
    i = j = number = 0
    while i < len(source) or j < len(target):
        first_i, first_j = i, j
        left, right = 1, 1
        while (left != right or left == 1) and (i < len(source) or j < len(target)):
            if (left <= right and i < len(source)) or j >= len(target):
                left *= source[i]
                i += 1
            else:
                right *= target[j]
                j += 1
        factors, number = _common_factors(source[first_i:i], target[first_j:j], number)
        if factors is not None:
            for d, atoms in zip(range(first_i, i), _distribute(source[first_i:i], factors)):
                in_dims[d] = atoms
            for d, atoms in zip(range(first_j, j), _distribute(target[first_j:j], factors)):
                out_dims[d] = atoms
    return _view(tuple(in_dims), (tuple(out_dims),))


def _common_factors(
    source: tuple[int, ...], target: tuple[int, ...], number: int
) -> tuple[list[Atom] | None, int]:
    """The coarsest factor list that cuts at every boundary of both sides, lettered from `number`
    on.

    Boundaries are products of the sizes to the right; where they do not nest (6x4 -> 8x3) there is
    no such list: None.
    """
    total = math.prod(source)
    bounds = {1, total}
    for side in (source, target):
        product = 1
        for size in reversed(side):
            product *= size
            bounds.add(product)
    ordered = sorted(bounds)
    if any(b % a for a, b in pairwise(ordered)):
        return None, number
    sizes = [b // a for a, b in pairwise(ordered)][::-1]
    atoms = [Atom(f"v{number + k}", size) for k, size in enumerate(sizes)]
    return atoms, number + len(atoms)


def _distribute(sizes: tuple[int, ...], factors: list[Atom]) -> list[tuple[Atom, ...]]:
    queue = list(factors)
    dims = []
    for size in sizes:
        atoms, product = [], 1
        while product < size:
            atoms.append(queue.pop(0))
            product *= atoms[-1].size
        dims.append(tuple(atoms) or (Atom(None, 1),))
    return dims


def _rearranged(inputs: Metas, outputs: Outs, order: tuple[int | None, ...]) -> OpRule:
    """Output dim d is input dim order[d]; None is a new dim."""
    letters = letters_of("d", len(inputs[0].shape))
    named = tuple(letters[o] if o is not None else None for o in order)
    return _view(plain(letters, inputs[0]), tuple(plain(named, m) if m else () for m in outputs))


def permute(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """transpose, swapaxes, permute, t."""
    rank = len(inputs[0].shape)
    order = list(range(rank))
    if "dims" in op.arguments:
        order = [as_dim(d, rank) for d in as_ints(op.arguments["dims"])]
    elif rank >= 2:
        given = op.arguments
        a = as_dim(given.get("dim0", given.get("axis0", 0)), rank)
        b = as_dim(given.get("dim1", given.get("axis1", 1)), rank)
        order[a], order[b] = order[b], order[a]
    return _rearranged(inputs, outputs, tuple(order))


def unsqueeze(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """A new dim of size 1."""
    order: list[int | None] = list(range(len(inputs[0].shape)))
    order.insert(as_dim(op.arguments["dim"], len(order) + 1), None)
    return _rearranged(inputs, outputs, tuple(order))


def expand(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Broadcast dims exist in the output only; each may be split there."""
    assert outputs[0] is not None, "an expand that nobody uses is dropped at capture"
    letters = letters_of("d", len(outputs[0].shape))
    return _view(
        plain(letters[len(letters) - len(inputs[0].shape) :], inputs[0]),
        (plain(letters, outputs[0]),),
    )


def _in_blocks(size: int, part: int, letter: str) -> tuple[Atom, ...]:
    """A dim that is (blocks, part) with only the part splittable."""
    return (Atom(None, size // part), Atom(letter, part)) if part > 1 else (Atom(None, size),)


def slice_(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every dim but the sliced one; that one too, in blocks, when the slice is one or more of its
    equal aligned blocks.
    """
    source, target = inputs[0], outputs[0]
    assert target is not None, "a slice that nobody uses is dropped at capture"
    rank = len(source.shape)
    dim = as_dim(op.arguments.get("dim", 0), rank)
    letters = letters_of("d", rank)
    if source.shape == target.shape:
        return _view(plain(letters, source), (plain(letters, target),))
    size, part = source.shape[dim], target.shape[dim]
    start = as_dim(op.arguments.get("start") or 0, size)
    aligned = op.arguments.get("step", 1) == 1 and part and size % part == 0 and start % part == 0
    named = tuple(None if d == dim else x for d, x in enumerate(letters))
    ins, outs = list(plain(named, source)), list(plain(named, target))
    if aligned:
        ins[dim], outs[dim] = (
            _in_blocks(size, part, letters[dim]),
            plain((letters[dim],), TensorMeta((part,), "bool"))[0],
        )
    return _view(tuple(ins), (tuple(outs),))


def select(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """One index of a dim; that dim stays whole."""
    rank = len(inputs[0].shape)
    dim = as_dim(op.arguments["dim"], rank)
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    rest = tuple(x for d, x in enumerate(letters) if d != dim)
    return _view(plain(letters, inputs[0]), tuple(plain(rest, m) if m else () for m in outputs))


def split(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """split, chunk, split_with_sizes: equal parts are blocks of the dim, so each part can be split
    alike; unequal ones cannot.
    """
    source = inputs[0]
    rank = len(source.shape)
    dim = as_dim(op.arguments.get("dim", 0), rank)
    sizes = op.arguments.get("split_sizes", op.arguments.get("split_size"))
    part = (
        sizes
        if isinstance(sizes, int)
        else (as_ints(sizes)[0] if len(set(as_ints(sizes))) == 1 else 0)
    )
    equal = part > 0 and source.shape[dim] % part == 0
    letters = tuple(f"d{d}" if d != dim or equal else None for d in range(rank))
    ins = list(plain(letters, source))
    if equal:
        ins[dim] = _in_blocks(source.shape[dim], part, letters[dim] or "")
    return _view(tuple(ins), tuple(plain(letters, m) if m else () for m in outputs))


def unbind(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """unbind: every dim but the one that goes."""
    return select(op, inputs, outputs)


def cat(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every dim but the joined one; that one too, in blocks, when all parts are equally long."""
    target = outputs[0]
    assert target is not None, "a cat that nobody uses is dropped at capture"
    rank = len(target.shape)
    dim = as_dim(op.arguments.get("dim", 0), rank)
    if any(len(m.shape) != rank for m in inputs):
        return OpRule(tuple(map(frozen, inputs)), (frozen(target),))
    equal = len({m.shape[dim] for m in inputs}) == 1
    letters = tuple(f"d{d}" if d != dim or equal else None for d in range(rank))
    outs = list(plain(letters, target))
    if equal:
        outs[dim] = _in_blocks(target.shape[dim], inputs[0].shape[dim], letters[dim] or "")
    linear = (frozenset(range(len(inputs))),) if target.is_floating else ()
    return OpRule(tuple(plain(letters, m) for m in inputs), (tuple(outs),), linear=linear)


def repeat_interleave(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every element of a dim several times in a row: that dim is (source, repeats), and splits by
    the source. All dims with one number of repeats.
    """
    source, target = inputs[0], outputs[0]
    assert target is not None, "an op that nobody uses is dropped at capture"
    if op.arguments.get("dim") is None or len(inputs) > 1:  # flattens, or repeats by a tensor
        return OpRule(tuple(map(frozen, inputs)), (frozen(target),))
    dim = as_dim(op.arguments["dim"], len(source.shape))
    letters = letters_of("d", len(source.shape))
    dims = plain(letters, source)
    repeated = (*dims[dim], Atom(None, as_int(op.arguments["repeats"])))
    linear = (frozenset({0}),) if target.is_floating else ()
    return OpRule((dims,), ((*dims[:dim], repeated, *dims[dim + 1 :]),), linear=linear)


def repeat(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """repeat, tile: a repeated dim is (repeats, source), and splits by the source in blocks."""
    source, target = inputs[0], outputs[0]
    assert target is not None, "an op that nobody uses is dropped at capture"
    new = len(target.shape) - len(source.shape)
    dims = plain(letters_of("d", len(source.shape)), source)
    outs: list[tuple[Atom, ...]] = [(Atom(None, size),) for size in target.shape[:new]]
    for atoms, before, after in zip(dims, source.shape, target.shape[new:]):
        outs.append((Atom(None, after // before), *atoms) if after > before > 0 else atoms)
    linear = (frozenset({0}),) if target.is_floating else ()
    return OpRule((dims,), (tuple(outs),), linear=linear)


def unfold(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Windows over one dim, a new last dim: every dim but that one."""
    rank = len(inputs[0].shape)
    dim = as_dim(op.arguments["dimension"], rank)
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    return _view(
        plain(letters, inputs[0]), tuple(plain((*letters, None), m) if m else () for m in outputs)
    )


def stack(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every dim but the new one."""
    target = outputs[0]
    assert target is not None, "a stack that nobody uses is dropped at capture"
    dim = as_dim(op.arguments.get("dim", 0), len(target.shape))
    letters = list(letters_of("d", len(inputs[0].shape)))
    named = [*letters[:dim], None, *letters[dim:]]
    linear = (frozenset(range(len(inputs))),) if target.is_floating else ()
    return OpRule(
        tuple(plain(tuple(letters), m) for m in inputs),
        (plain(tuple(named), target),),
        linear=linear,
    )


def same_size_dims(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """pad, slice_scatter, select_scatter, copy: dims whose size does not change in
    any operand of full rank.
    """
    target = outputs[0]
    assert target is not None, "an op that nobody uses is dropped at capture"
    rank = len(target.shape)
    full = [m for m in inputs if len(m.shape) == rank]
    touched = (
        {as_dim(op.arguments["dim"], rank)} if isinstance(op.arguments.get("dim"), int) else set()
    )
    same = [
        d not in touched and all(m.shape[d] == target.shape[d] for m in full) for d in range(rank)
    ]
    letters = tuple(f"d{d}" if same[d] else None for d in range(rank))
    named = []
    for meta in inputs:
        if len(meta.shape) == rank:
            named.append(plain(letters, meta))
        elif len(meta.shape) == rank - 1 and "select" in op.target:
            named.append(plain(tuple(x for d, x in enumerate(letters) if d not in touched), meta))
        else:
            named.append(frozen(meta))
    linear = (
        (frozenset({0}),)
        if "pad" in op.target and target.is_floating and not op.arguments.get("value")
        else ()
    )
    return OpRule(tuple(named), (plain(letters, target),), linear=linear)


def factory(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """zeros, ones, full: one value everywhere, so any dim may be made split; arange and
    random ones are made whole.
    """
    constant = any(word in op.target for word in ("zeros", "ones", "full", "empty"))
    outs = tuple(
        plain(letters_of("d", len(m.shape)) if constant else (None,) * len(m.shape), m) if m else ()
        for m in outputs
    )
    return OpRule(tuple(map(frozen, inputs)), outs)


def index(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Advanced indexing: dims not indexed, dims of the indices, and (source dim, index) pairs that
    run along together.
    """
    target = outputs[0]
    assert target is not None, "an index that nobody uses is dropped at capture"
    indices = op.arguments["indices"]
    assert isinstance(indices, tuple), "indices are a tuple"
    first, rank = as_int(op.arguments["first"]), as_int(op.arguments["rank"])
    pairs = op.arguments["aligned"]
    assert isinstance(pairs, tuple), "aligned dims are a tuple of (source dim, result dim)"
    aligned: dict[int, int] = dict(pairs)
    indexed = {d for d, ref in enumerate(indices) if isinstance(ref, Ref)}
    source = inputs[0].shape
    kept = [d for d in range(len(source)) if d not in indexed]
    before = [d for d in kept if d < first] if kept else []
    names: list[str | None] = [
        *(f"s{d}" for d in before),
        *(f"i{k}" for k in range(rank)),
        *(f"s{d}" for d in kept if d not in before),
    ]
    dims: list[Dims] = [
        plain(
            tuple(
                f"s{d}" if d in kept else (names[aligned[d]] if d in aligned else None)
                for d in range(len(source))
            ),
            inputs[0],
        )
    ]
    for slot in range(1, len(inputs)):
        meta = inputs[slot]
        dims.append(plain(tuple(f"i{k}" for k in range(rank - len(meta.shape), rank)), meta))
    boolean = any(m.dtype == "bool" for m in inputs[1:])
    if boolean:
        return OpRule(tuple(map(frozen, inputs)), (frozen(target),))
    together = frozenset(x for d in aligned for x in (names[aligned[d]],) if x)
    return OpRule(tuple(dims), (plain(tuple(names), target),), contiguous=together)


def gather(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """gather, take_along_dim, scatter: dims other than the indexed one that have one size in all
    operands.
    """
    rank = len(inputs[0].shape)
    dim = as_dim(op.arguments["dim"], rank) if rank else 0
    full = [m for m in (*inputs, *(m for m in outputs if m)) if len(m.shape) == rank]
    letters = tuple(
        f"d{d}" if d != dim and len({m.shape[d] for m in full}) == 1 else None for d in range(rank)
    )
    free = (
        tuple(x if d != dim else "g" for d, x in enumerate(letters))
        if op.target.startswith("aten.gather")
        else letters
    )
    named = [plain(letters, inputs[0])]
    named += [plain(free, m) if len(m.shape) == rank else frozen(m) for m in inputs[1:]]
    return OpRule(tuple(named), tuple(plain(free, m) if m else () for m in outputs))


def index_select(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Rows of a dim by a list: the other dims, and the list's own."""
    rank = len(inputs[0].shape)
    dim = as_dim(op.arguments["dim"], rank)
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    outs = tuple(
        plain(tuple("g" if d == dim else x for d, x in enumerate(letters)), m) if m else ()
        for m in outputs
    )
    return OpRule((plain(letters, inputs[0]), plain(("g",), inputs[1])), outs)


VIEW_RULES: dict[str, Resolver] = {
    "reshape": reshape,
    **dict.fromkeys(("transpose", "permute", "t", "swapaxes"), permute),
    "unsqueeze": unsqueeze,
    "expand": expand,
    "slice": slice_,
    "select": select,
    **dict.fromkeys(("split", "split_with_sizes"), split),
    "unbind": unbind,
    "cat": cat,
    "stack": stack,
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("repeat", "tile"), repeat),
    "unfold": unfold,
    **dict.fromkeys(
        (
            "pad", "constant_pad_nd", "slice_scatter", "select_scatter", "copy",
        ),
        same_size_dims,
    ),
    **dict.fromkeys(
        (
            "zeros", "ones", "full", "empty", "arange", "scalar_tensor", "eye", "linspace", "rand",
            "randn", "randint",
        ),
        factory,
    ),
    "autoplan.index": index,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "take_along_dim"), gather),
    "index_select": index_select,
}  # fmt: skip
