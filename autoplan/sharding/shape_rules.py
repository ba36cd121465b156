# SPDX-License-Identifier: Apache-2.0
"""Rules that depend on an op's arguments: broadcasting, reductions, views, slices, attention, losses, normalisation.

Each resolver takes the op and the metas of its tensors and gives its `OpRule`, or None when it cannot say; the reason for
what is never split stands beside it. `RESOLVERS` maps op families to resolvers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autoplan.graph import Op, Ref, TensorMeta
from autoplan.sharding.factors import Atom, Dims, OpRule, plain

Metas = tuple[TensorMeta, ...]
Outs = tuple[TensorMeta | None, ...]
Resolver = Callable[[Op, Metas, Outs], OpRule | None]


def _int(value: object) -> int:
    assert isinstance(value, int), f"{value!r} is an int in the op's schema"
    return value


def _ints(value: object) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(_int(v) for v in value)  # type: ignore[attr-defined]


def _dim(value: object, rank: int) -> int:
    dim = _int(value)
    return dim + rank if dim < 0 else dim


def _letters(prefix: str, rank: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(rank))


def _frozen(meta: TensorMeta | None) -> Dims:
    return plain((None,) * len(meta.shape), meta) if meta else ()


def _slot(op: Op, name: str) -> int | None:
    """The input slot of a tensor argument, or None when it is absent or a number."""
    given = op.arguments.get(name)
    return given.index if isinstance(given, Ref) else None


# ---- pointwise -------------------------------------------------------------------------------------------------------


def pointwise(op: Op, inputs: Metas, outputs: Outs) -> OpRule | None:
    """Dims aligned from the right; a broadcast dim has no letter. Which operands pass a Partial is in `_linear_slots`."""
    result = next((m for m in outputs if m), None)
    if result is None:
        return None
    rank = len(result.shape)
    dims = []
    for meta in inputs:
        if len(meta.shape) > rank:
            return None
        dims.append(plain(_letters("d", rank)[rank - len(meta.shape) :], meta))
    outs = tuple(plain(_letters("d", rank), m) if m and m.shape == result.shape else _frozen(m) for m in outputs)
    return OpRule(tuple(dims), outs, linear=_linear_slots(op, inputs, result))


def _linear_slots(op: Op, inputs: Metas, result: TensorMeta) -> tuple[frozenset[int], ...]:
    family = op.target.split(".")[1]
    if not result.is_floating or not all(m.is_floating for m in inputs[:1]):
        return ()
    if family in ("add", "sub", "rsub") and len(inputs) == 2:
        return (frozenset({0, 1}),)  # a number added would be added once per part, so only tensors pass
    if family == "mul":
        return tuple(frozenset({i}) for i in range(len(inputs)))
    if family == "div" and op.arguments.get("rounding_mode") is None:
        return (frozenset({0}),) if isinstance(op.arguments["self"], Ref) else ()
    if family in ("neg", "_to_copy", "real", "imag", "conj", "zeros_like"):
        return (frozenset({0}),)
    if family == "masked_fill" and op.arguments.get("value") == 0:
        return (frozenset({0}),)
    if family == "where" and op.target == "aten.where.self":
        return (frozenset({1, 2}),)
    return ()


# ---- reductions ------------------------------------------------------------------------------------------------------


def _reduction(op: Op, inputs: Metas, outputs: Outs, *, summing: bool) -> OpRule:
    source = inputs[0]
    rank = len(source.shape)
    given = op.arguments.get("dim")
    reduced = {_dim(d, rank) for d in _ints(given)} if given not in (None, ()) else set(range(rank))
    letters = [None if d in reduced and not summing else f"d{d}" for d in range(rank)]
    keep = bool(op.arguments.get("keepdim", False))
    kept = [None if d in reduced else f"d{d}" for d in range(rank) if keep or d not in reduced]
    outs = tuple(plain(tuple(kept), m) if m and len(m.shape) == len(kept) else _frozen(m) for m in outputs)
    linear = (frozenset({0}),) if summing and source.is_floating else ()
    return OpRule((plain(tuple(letters), source), *map(_frozen, inputs[1:])), outs, linear=linear)


def summing_reduction(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """sum and mean: a split reduced dim leaves a Partial (the local mean is weighted by its share of the elements)."""
    return _reduction(op, inputs, outputs, summing=True)


def other_reduction(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """max, min, argmax, var, prod, any, all: their partial results do not add up, so reduced dims stay whole."""
    return _reduction(op, inputs, outputs, summing=False)


def along_dim(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """softmax, cumsum, sort, topk, flip, roll, diff: every dim but the one worked along."""
    source = inputs[0]
    rank = len(source.shape)
    given = op.arguments.get("dims", op.arguments.get("dim", -1))
    along = {_dim(d, rank) for d in _ints(given)} if given is not None and rank else set(range(rank))
    letters = tuple(None if d in along else f"d{d}" for d in range(rank))
    first = plain(letters, source)
    others = tuple(plain(letters, m) if len(m.shape) == rank else _frozen(m) for m in inputs[1:])
    outs = tuple(plain(letters, m) if m and len(m.shape) == rank else _frozen(m) for m in outputs)
    return OpRule((first, *others), outs)


def mean_loss(op: Op, inputs: Metas, outputs: Outs) -> OpRule | None:
    """mse_loss and kin: pointwise, then a mean or sum over everything (a Partial), or nothing."""
    rank = len(inputs[0].shape)
    if any(m.shape != inputs[0].shape for m in inputs[:2]):
        return None
    letters = _letters("d", rank)
    dims = tuple(plain(letters[rank - len(m.shape) :], m) for m in inputs)
    reduction = op.arguments.get("reduction", 1)
    return OpRule(dims, tuple(plain(letters if reduction == 0 else (), m) if m else () for m in outputs))


# ---- views -----------------------------------------------------------------------------------------------------------


def _view(inputs: Dims, outputs: tuple[Dims, ...]) -> OpRule:
    return OpRule((inputs,), outputs, linear=(frozenset({0}),))


def reshape(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Groups of dims with equal products; inside a group both sides share the factors that divide both."""
    assert outputs[0] is not None, "a reshape that nobody uses is dropped at capture"
    source, target = inputs[0].shape, outputs[0].shape
    in_dims: list[tuple[Atom, ...]] = [(Atom(None, 1),)] * len(source)
    out_dims: list[tuple[Atom, ...]] = [(Atom(None, 1),)] * len(target)
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


def _common_factors(source: tuple[int, ...], target: tuple[int, ...], number: int) -> tuple[list[Atom] | None, int]:
    """The coarsest factor list that cuts at every boundary of both sides, lettered from `number` on.

    Boundaries are products of the sizes to the right; where they do not nest (6x4 -> 8x3) there is no such list: None.
    """
    total = math.prod(source)
    bounds = {1, total}
    for side in (source, target):
        product = 1
        for size in reversed(side):
            product *= size
            bounds.add(product)
    ordered = sorted(bounds)
    if any(b % a for a, b in zip(ordered, ordered[1:])):
        return None, number
    sizes = [b // a for a, b in zip(ordered, ordered[1:])][::-1]
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
    letters = _letters("d", len(inputs[0].shape))
    named = tuple(letters[o] if o is not None else None for o in order)
    return _view(plain(letters, inputs[0]), tuple(plain(named, m) if m else () for m in outputs))


def permute(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """transpose, permute, t, movedim."""
    rank = len(inputs[0].shape)
    order = list(range(rank))
    if "dims" in op.arguments:
        order = [_dim(d, rank) for d in _ints(op.arguments["dims"])]
    elif rank >= 2:
        a, b = (_dim(op.arguments.get(k, default), rank) for k, default in (("dim0", 0), ("dim1", 1)))
        order[a], order[b] = order[b], order[a]
    return _rearranged(inputs, outputs, tuple(order))


def unsqueeze(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """A new dim of size 1."""
    order: list[int | None] = list(range(len(inputs[0].shape)))
    order.insert(_dim(op.arguments["dim"], len(order) + 1), None)
    return _rearranged(inputs, outputs, tuple(order))


def squeeze(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Dims of size 1 go."""
    shape = inputs[0].shape
    given = op.arguments.get("dim")
    chosen = {_dim(d, len(shape)) for d in _ints(given)} if given is not None else set(range(len(shape)))
    return _rearranged(inputs, outputs, tuple(d for d in range(len(shape)) if not (d in chosen and shape[d] == 1)))


def expand(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Broadcast dims exist in the output only; each may be split there."""
    assert outputs[0] is not None, "an expand that nobody uses is dropped at capture"
    letters = _letters("d", len(outputs[0].shape))
    return _view(plain(letters[len(letters) - len(inputs[0].shape) :], inputs[0]), (plain(letters, outputs[0]),))


def _in_blocks(size: int, part: int, letter: str) -> tuple[Atom, ...]:
    """A dim that is (blocks, part) with only the part splittable."""
    return (Atom(None, size // part), Atom(letter, part)) if part > 1 else (Atom(None, size),)


def slice_(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every dim but the sliced one; that one too, in blocks, when the slice is one or more of its equal aligned blocks."""
    source, target = inputs[0], outputs[0]
    assert target is not None, "a slice that nobody uses is dropped at capture"
    rank = len(source.shape)
    dim = _dim(op.arguments.get("dim", 0), rank)
    letters = _letters("d", rank)
    if source.shape == target.shape:
        return _view(plain(letters, source), (plain(letters, target),))
    size, part = source.shape[dim], target.shape[dim]
    start = _dim(op.arguments.get("start") or 0, size)
    aligned = op.arguments.get("step", 1) == 1 and part and size % part == 0 and start % part == 0
    named = tuple(None if d == dim else x for d, x in enumerate(letters))
    ins, outs = list(plain(named, source)), list(plain(named, target))
    if aligned:
        ins[dim], outs[dim] = _in_blocks(size, part, letters[dim]), plain((letters[dim],), TensorMeta((part,), "bool"))[0]
    return _view(tuple(ins), (tuple(outs),))


def select(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """One index of a dim; that dim stays whole."""
    rank = len(inputs[0].shape)
    dim = _dim(op.arguments["dim"], rank)
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    rest = tuple(x for d, x in enumerate(letters) if d != dim)
    return _view(plain(letters, inputs[0]), tuple(plain(rest, m) if m else () for m in outputs))


def split(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """split, chunk, split_with_sizes: equal parts are blocks of the dim, so each part can be split alike; unequal ones cannot."""
    source = inputs[0]
    rank = len(source.shape)
    dim = _dim(op.arguments.get("dim", 0), rank)
    sizes = op.arguments.get("split_sizes", op.arguments.get("split_size"))
    part = sizes if isinstance(sizes, int) else (_ints(sizes)[0] if len(set(_ints(sizes))) == 1 else 0)
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
    dim = _dim(op.arguments.get("dim", 0), rank)
    if any(len(m.shape) != rank for m in inputs):
        return OpRule(tuple(map(_frozen, inputs)), (_frozen(target),))
    equal = len({m.shape[dim] for m in inputs}) == 1
    letters = tuple(f"d{d}" if d != dim or equal else None for d in range(rank))
    outs = list(plain(letters, target))
    if equal:
        outs[dim] = _in_blocks(target.shape[dim], inputs[0].shape[dim], letters[dim] or "")
    linear = (frozenset(range(len(inputs))),) if target.is_floating else ()
    return OpRule(tuple(plain(letters, m) for m in inputs), (tuple(outs),), linear=linear)


def repeat_interleave(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every element of a dim several times in a row: that dim is (source, repeats), and splits by the source. All dims with one number of repeats."""
    source, target = inputs[0], outputs[0]
    assert target is not None, "an op that nobody uses is dropped at capture"
    if op.arguments.get("dim") is None or len(inputs) > 1:  # flattens, or repeats by a tensor
        return OpRule(tuple(map(_frozen, inputs)), (_frozen(target),))
    dim = _dim(op.arguments["dim"], len(source.shape))
    letters = _letters("d", len(source.shape))
    dims = plain(letters, source)
    repeated = (*dims[dim], Atom(None, _int(op.arguments["repeats"])))
    linear = (frozenset({0}),) if target.is_floating else ()
    return OpRule((dims,), ((*dims[:dim], repeated, *dims[dim + 1 :]),), linear=linear)


def stack(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every dim but the new one."""
    target = outputs[0]
    assert target is not None, "a stack that nobody uses is dropped at capture"
    dim = _dim(op.arguments.get("dim", 0), len(target.shape))
    letters = list(_letters("d", len(inputs[0].shape)))
    named = [*letters[:dim], None, *letters[dim:]]
    linear = (frozenset(range(len(inputs))),) if target.is_floating else ()
    return OpRule(tuple(plain(tuple(letters), m) for m in inputs), (plain(tuple(named), target),), linear=linear)


def same_size_dims(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """pad, constant_pad, repeat, slice_scatter, select_scatter, copy: dims whose size does not change in any operand of full rank."""
    target = outputs[0]
    assert target is not None, "an op that nobody uses is dropped at capture"
    rank = len(target.shape)
    full = [m for m in inputs if len(m.shape) == rank]
    touched = {_dim(op.arguments["dim"], rank)} if isinstance(op.arguments.get("dim"), int) else set()
    same = [d not in touched and all(m.shape[d] == target.shape[d] for m in full) for d in range(rank)]
    letters = tuple(f"d{d}" if same[d] else None for d in range(rank))
    named = []
    for meta in inputs:
        if len(meta.shape) == rank:
            named.append(plain(letters, meta))
        elif len(meta.shape) == rank - 1 and "select" in op.target:
            named.append(plain(tuple(x for d, x in enumerate(letters) if d not in touched), meta))
        else:
            named.append(_frozen(meta))
    linear = (frozenset({0}),) if "pad" in op.target and target.is_floating and not op.arguments.get("value") else ()
    return OpRule(tuple(named), (plain(letters, target),), linear=linear)


def factory(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """zeros, ones, full, new_*: one value everywhere, so any dim may be made split; arange and random ones are made whole."""
    constant = any(word in op.target for word in ("zeros", "ones", "full", "empty"))
    outs = tuple(plain(_letters("d", len(m.shape)) if constant else (None,) * len(m.shape), m) if m else () for m in outputs)
    return OpRule(tuple(map(_frozen, inputs)), outs)


# ---- indexing --------------------------------------------------------------------------------------------------------


def index(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Advanced indexing: dims not indexed, dims of the indices, and (source dim, index) pairs that run along together."""
    target = outputs[0]
    assert target is not None, "an index that nobody uses is dropped at capture"
    indices = op.arguments["indices"]
    assert isinstance(indices, tuple), "indices are a tuple"
    first, rank = _int(op.arguments["first"]), _int(op.arguments["rank"])
    aligned = dict(op.arguments["aligned"])  # type: ignore[call-overload]
    indexed = {d for d, ref in enumerate(indices) if isinstance(ref, Ref)}
    source = inputs[0].shape
    kept = [d for d in range(len(source)) if d not in indexed]
    before = [d for d in kept if d < first] if kept else []
    names: list[str | None] = [f"s{d}" for d in before] + [f"i{k}" for k in range(rank)] + [f"s{d}" for d in kept if d not in before]
    dims: list[Dims] = [plain(tuple(f"s{d}" if d in kept else (names[aligned[d]] if d in aligned else None) for d in range(len(source))), inputs[0])]
    for slot in range(1, len(inputs)):
        meta = inputs[slot]
        dims.append(plain(tuple(f"i{k}" for k in range(rank - len(meta.shape), rank)), meta))
    boolean = any(m.dtype == "bool" for m in inputs[1:])
    if boolean:
        return OpRule(tuple(map(_frozen, inputs)), (_frozen(target),))
    return OpRule(tuple(dims), (plain(tuple(names), target),))


def gather(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """gather, take_along_dim, scatter: dims other than the indexed one that have one size in all operands."""
    rank = len(inputs[0].shape)
    dim = _dim(op.arguments["dim"], rank) if rank else 0
    full = [m for m in (*inputs, *(m for m in outputs if m)) if len(m.shape) == rank]
    letters = tuple(f"d{d}" if d != dim and len({m.shape[d] for m in full}) == 1 else None for d in range(rank))
    free = tuple(x if d != dim else "g" for d, x in enumerate(letters)) if op.target.startswith("aten.gather") else letters
    named = [plain(letters, inputs[0])]
    named += [plain(free, m) if len(m.shape) == rank else _frozen(m) for m in inputs[1:]]
    return OpRule(tuple(named), tuple(plain(free, m) if m else () for m in outputs))


def index_select(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Rows of a dim by a list: the other dims, and the list's own."""
    rank = len(inputs[0].shape)
    dim = _dim(op.arguments["dim"], rank)
    letters = tuple(None if d == dim else f"d{d}" for d in range(rank))
    outs = tuple(plain(tuple("g" if d == dim else x for d, x in enumerate(letters)), m) if m else () for m in outputs)
    return OpRule((plain(letters, inputs[0]), plain(("g",), inputs[1])), outs)


# ---- matrix products, attention, convolution -------------------------------------------------------------------------


def matmul(op: Op, inputs: Metas, outputs: Outs) -> OpRule | None:
    """torch.matmul with its broadcasting of batch dims."""
    a, b = (m.shape for m in inputs)
    if min(len(a), len(b)) == 0:
        return None
    batch = max(len(a), len(b)) - 2
    lead = _letters("b", max(batch, 0))
    left = ("k",) if len(a) == 1 else (*lead[len(lead) - (len(a) - 2) :], "m", "k")
    right = ("k",) if len(b) == 1 else (*lead[len(lead) - (len(b) - 2) :], "k", "n")
    result = (*lead, *(("m",) if len(a) > 1 else ()), *(("n",) if len(b) > 1 else ()))
    return OpRule((plain(left, inputs[0]), plain(right, inputs[1])), tuple(plain(result, m) if m else () for m in outputs))


def baddbmm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """beta * input + batch1 @ batch2, input broadcast."""
    letters = ("b", "m", "n")
    first = plain(letters[3 - len(inputs[0].shape) :], inputs[0])
    outs = tuple(plain(letters, m) if m else () for m in outputs)
    return OpRule((first, plain(("b", "m", "k"), inputs[1]), plain(("b", "k", "n"), inputs[2])), outs, additive=frozenset({0}))


def attention(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """q [b*, h, s, d], k and v [b*, g, t, d]: batch, heads (query heads in blocks of their key-value head) and query positions.

    Key positions stay whole: a softmax over a split dim would need its own collective per step of the kernel.
    """
    query, key = inputs[0].shape, inputs[1].shape
    lead = _letters("b", len(query) - 3)
    heads, groups = query[-3], key[-3]
    names = (*lead, "h", "s", None)
    q = list(plain(names, inputs[0]))
    kv_names = (*lead, "h", None, None)
    out = list(plain(names, outputs[0])) if outputs[0] else []
    if groups != heads:
        atoms = (Atom("h" if groups > 1 else None, groups), Atom(None, heads // groups))
        q[-3] = atoms
        if out:
            out[-3] = atoms
    operands: list[Dims] = [tuple(q), plain(kv_names, inputs[1]), plain(kv_names, inputs[2])]
    if len(inputs) > 3:
        rank = len(inputs[3].shape)
        mask_names = (*lead, "h" if groups == heads else None, "s", None)
        operands.append(plain(mask_names[len(mask_names) - rank :], inputs[3]))
    return OpRule(tuple(operands), (tuple(out),))


def grouped_convolution(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Convolution in groups: the groups are the leading factor of both channel dims; channels inside a group stay together."""
    groups = _int(op.arguments["groups"])
    source, weight, target = inputs[0], inputs[1], outputs[0]
    assert target is not None, "a convolution that nobody uses is dropped at capture"
    rank = len(source.shape)

    def channels(size: int) -> tuple[Atom, ...]:
        return (Atom("g", groups), Atom(None, size // groups)) if size > groups else (Atom("g", groups),)

    spatial = tuple((Atom(None, s),) for s in source.shape[2:])
    batch = plain(("n",), TensorMeta(source.shape[:1], "bool"))
    dims: list[Dims] = [(*batch, channels(source.shape[1]), *spatial)]
    dims.append((channels(weight.shape[0]), *((Atom(None, s),) for s in weight.shape[1:])))
    if len(inputs) > 2:
        dims.append((channels(inputs[2].shape[0]),))
    assert rank >= 3, "a convolution has a batch dim"
    return OpRule(tuple(dims), ((*batch, channels(target.shape[1]), *((Atom(None, s),) for s in target.shape[2:])),))


# ---- normalisation and losses ----------------------------------------------------------------------------------------


def batch_norm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """[n, c, *]: channels freely; batch and positions by summing the statistics over the split (the local form does it)."""
    rank = len(inputs[0].shape)
    letters = ("n", "c", *_letters("p", rank))[:rank]
    operands = [plain(letters, inputs[0]), *(plain(("c",), m) for m in inputs[1:])]
    outs = tuple(plain(letters if i == 0 else ("c",), m) if m else () for i, m in enumerate(outputs))
    return OpRule(tuple(operands), outs, completes=frozenset(letters) - {"c"})


def group_norm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Batch and whole groups of channels."""
    rank = len(inputs[0].shape)
    groups = _int(op.arguments.get("num_groups", op.arguments.get("group")))
    channels = inputs[0].shape[1]
    atoms = (Atom("g" if groups > 1 else None, groups), Atom(None, channels // groups))
    first = list(plain(("n", *(None,) * (rank - 1)), inputs[0]))
    first[1] = atoms
    outs = tuple(tuple(first) if m and m.shape == inputs[0].shape else _frozen(m) for m in outputs)
    return OpRule((tuple(first), *((atoms,) for _ in inputs[1:])), outs)


def rms_norm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Every dim but the normalised ones."""
    rank, normalized = len(inputs[0].shape), len(_ints(op.arguments["normalized_shape"]))
    letters = (*_letters("b", rank - normalized), *(None,) * normalized)
    outs = tuple(plain(letters, m) if m and len(m.shape) == rank else _frozen(m) for m in outputs)
    return OpRule((plain(letters, inputs[0]), *map(_frozen, inputs[1:])), outs)


def cross_entropy(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Logits [n, c, d*], labels [n, d*]: rows leave a Partial sum; classes by the local form's own reductions (DESIGN 2).

    Classes stay whole with class weights, class probabilities as labels, or log-probabilities as input: rare, and each would
    need its own local form.
    """
    rank = len(inputs[0].shape)
    rows = () if rank == 1 else ("n", *_letters("d", rank - 2))
    probabilities = inputs[1].is_floating
    weighted = _slot(op, "weight") is not None
    classes = None if probabilities or weighted or op.arguments["log_probs"] else "c"
    logits = (classes,) if rank == 1 else (rows[0], classes, *rows[1:])
    operands = [plain(logits, inputs[0]), plain(logits if probabilities else rows, inputs[1])]
    operands += [_frozen(m) for m in inputs[2:]]
    per_row = op.target == "autoplan.cross_entropy"
    return OpRule(tuple(operands), tuple(plain(rows if per_row else (), m) if m else () for m in outputs), completes=frozenset({"c"}))


def cross_entropy_count(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Labels that count: a Partial sum over rows; class probabilities count by row."""
    names = list(_letters("n", len(inputs[0].shape)))
    if op.arguments["probabilities"] and len(names) > 1:
        names[1] = ""
    letters = tuple(x or None for x in names)
    return OpRule((plain(letters, inputs[0]), *map(_frozen, inputs[1:])), tuple(_frozen(m) for m in outputs))


RESOLVERS: dict[str, Resolver] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "neg", "_to_copy", "real", "imag", "detach", "zeros_like", "isin", "native_dropout"), pointwise),
    **dict.fromkeys(("sum", "mean"), summing_reduction),
    **dict.fromkeys(("max", "min", "amax", "amin", "argmax", "argmin", "var", "std", "prod", "any", "all", "logsumexp", "var_mean", "norm",
                     "linalg_vector_norm", "median", "mode", "count_nonzero"), other_reduction),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "argsort", "flip", "roll",
                     "diff", "glu", "cummax", "logcumsumexp"), along_dim),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"), mean_loss),
    "reshape": reshape,
    **dict.fromkeys(("transpose", "permute", "t", "movedim", "swapaxes"), permute),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "slice": slice_,
    "narrow": slice_,
    "select": select,
    **dict.fromkeys(("split", "chunk", "split_with_sizes"), split),
    "unbind": unbind,
    "cat": cat,
    "stack": stack,
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("pad", "constant_pad_nd", "slice_scatter", "select_scatter", "copy", "repeat"), same_size_dims),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "arange", "scalar_tensor", "eye",
                     "linspace", "rand", "randn", "randint"), factory),
    "autoplan.index": index,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "take_along_dim"), gather),
    "index_select": index_select,
    "matmul": matmul,
    "baddbmm": baddbmm,
    "scaled_dot_product_attention": attention,
    "autoplan.batch_norm": batch_norm,
    **dict.fromkeys(("group_norm", "native_group_norm"), group_norm),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), rms_norm),
    **dict.fromkeys(("autoplan.cross_entropy", "autoplan.cross_entropy_sum"), cross_entropy),
    "autoplan.cross_entropy_count": cross_entropy_count,
}  # fmt: skip
