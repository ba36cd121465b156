# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that compute and whose factors depend on arguments: pointwise, reductions, products,
attention, norms, losses.

Each resolver takes the op and the metas of its tensors and gives its `OpRule`, or None when it
cannot say; the reason for what is never split stands beside it. `COMPUTE_RULES` maps op families to
resolvers.
"""

from __future__ import annotations

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
    slot_of,
)
from autoplan.sharding.factors import Atom, Dims, OpRule, plain
from autoplan.units import DTYPE_BYTES


def pointwise(op: Op, inputs: Metas, outputs: Outs) -> OpRule | None:
    """Dims aligned from the right; a broadcast dim has no letter. Which operands pass a Partial is
    in `_linear_slots`.
    """
    result = next((m for m in outputs if m), None)
    if result is None:
        return None
    rank = len(result.shape)
    dims = []
    for meta in inputs:
        if len(meta.shape) > rank:
            return None
        dims.append(plain(letters_of("d", rank)[rank - len(meta.shape) :], meta))
    outs = tuple(
        plain(letters_of("d", rank), m) if m and m.shape == result.shape else frozen(m)
        for m in outputs
    )
    return OpRule(tuple(dims), outs, linear=_linear_slots(op, inputs, result))


def _linear_slots(op: Op, inputs: Metas, result: TensorMeta) -> tuple[frozenset[int], ...]:
    family = op.target.split(".")[1]
    if not result.is_floating or not all(m.is_floating for m in inputs[:1]):
        return ()
    if family in ("add", "sub", "rsub") and len(inputs) == 2:
        return (
            frozenset({0, 1}),
        )  # a number added would be added once per part, so only tensors pass
    if family == "mul":
        return tuple(frozenset({i}) for i in range(len(inputs)))
    if family == "div" and op.arguments.get("rounding_mode") is None:
        return (frozenset({0}),) if isinstance(op.arguments["self"], Ref) else ()
    if family == "_to_copy":  # up only: rounding the parts of a sum is not rounding the sum
        return (
            (frozenset({0}),) if DTYPE_BYTES[result.dtype] >= DTYPE_BYTES[inputs[0].dtype] else ()
        )
    if family in ("neg", "real", "imag", "conj", "zeros_like"):
        return (frozenset({0}),)
    if family == "masked_fill" and op.arguments.get("value") == 0:
        return (frozenset({0}),)
    if family == "where" and op.target == "aten.where.self":
        return (frozenset({1, 2}),)
    return ()


def _reduction(op: Op, inputs: Metas, outputs: Outs, *, summing: bool) -> OpRule:
    source = inputs[0]
    rank = len(source.shape)
    given = op.arguments.get("dim")
    reduced = (
        {as_dim(d, rank) for d in as_ints(given)} if given not in (None, ()) else set(range(rank))
    )
    letters = [None if d in reduced and not summing else f"d{d}" for d in range(rank)]
    keep = bool(op.arguments.get("keepdim", False))
    kept = [None if d in reduced else f"d{d}" for d in range(rank) if keep or d not in reduced]
    outs = tuple(
        plain(tuple(kept), m) if m and len(m.shape) == len(kept) else frozen(m) for m in outputs
    )
    linear = (frozenset({0}),) if summing and source.is_floating else ()
    return OpRule((plain(tuple(letters), source), *map(frozen, inputs[1:])), outs, linear=linear)


def summing_reduction(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """sum and mean: a split reduced dim leaves a Partial (the local mean is weighted by its share
    of the elements).
    """
    return _reduction(op, inputs, outputs, summing=True)


def other_reduction(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """max, min, argmax, var, prod, any, all: their partial results do not add up, so reduced dims
    stay whole.
    """
    return _reduction(op, inputs, outputs, summing=False)


def along_dim(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """softmax, cumsum, sort, topk, flip, roll, diff: every dim but the one worked along."""
    source = inputs[0]
    rank = len(source.shape)
    given = op.arguments.get("dims", op.arguments.get("dim", -1))
    along = (
        {as_dim(d, rank) for d in as_ints(given)}
        if given not in (None, ()) and rank
        else set(range(rank))
    )
    letters = tuple(None if d in along else f"d{d}" for d in range(rank))
    first = plain(letters, source)
    others = tuple(plain(letters, m) if len(m.shape) == rank else frozen(m) for m in inputs[1:])
    outs = tuple(plain(letters, m) if m and len(m.shape) == rank else frozen(m) for m in outputs)
    return OpRule((first, *others), outs)


def mean_loss(op: Op, inputs: Metas, outputs: Outs) -> OpRule | None:
    """mse_loss and kin: pointwise, then a mean or sum over everything (a Partial), or nothing."""
    rank = len(inputs[0].shape)
    if any(m.shape != inputs[0].shape for m in inputs[:2]):
        return None
    letters = letters_of("d", rank)
    dims = tuple(plain(letters[rank - len(m.shape) :], m) for m in inputs)
    reduction = op.arguments.get("reduction", 1)
    return OpRule(
        dims, tuple(plain(letters if reduction == 0 else (), m) if m else () for m in outputs)
    )


def matmul(op: Op, inputs: Metas, outputs: Outs) -> OpRule | None:
    """torch.matmul with its broadcasting of batch dims."""
    a, b = (m.shape for m in inputs)
    if min(len(a), len(b)) == 0:
        return None
    batch = max(len(a), len(b)) - 2
    lead = letters_of("b", max(batch, 0))
    left = ("k",) if len(a) == 1 else (*lead[len(lead) - (len(a) - 2) :], "m", "k")
    right = ("k",) if len(b) == 1 else (*lead[len(lead) - (len(b) - 2) :], "k", "n")
    result = (*lead, *(("m",) if len(a) > 1 else ()), *(("n",) if len(b) > 1 else ()))
    return OpRule(
        (plain(left, inputs[0]), plain(right, inputs[1])),
        tuple(plain(result, m) if m else () for m in outputs),
    )


def baddbmm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """beta * input + batch1 @ batch2, input broadcast."""
    letters = ("b", "m", "n")
    first = plain(letters[3 - len(inputs[0].shape) :], inputs[0])
    outs = tuple(plain(letters, m) if m else () for m in outputs)
    return OpRule(
        (first, plain(("b", "m", "k"), inputs[1]), plain(("b", "k", "n"), inputs[2])),
        outs,
        additive=frozenset({0}),
    )


def attention(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """q [b*, h, s, d], k and v [b*, g, t, d]: batch, heads (query heads in blocks of their
    key-value head) and query positions.

    Key positions stay whole: a softmax over a split dim would need its own collective per step of
    the kernel.
    """
    query, key = inputs[0].shape, inputs[1].shape
    lead = letters_of("b", len(query) - 3)
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
        mask = list(plain((*lead, "h", "s", None)[len(query) - rank :], inputs[3]))
        if rank >= 3 and inputs[3].shape[-3] == heads:
            mask[-3] = q[-3]
        operands.append(tuple(mask))
    return OpRule(tuple(operands), (tuple(out),), contiguous=frozenset({"s"}))


def grouped_convolution(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Convolution in groups: the groups are the leading factor of both channel dims; channels
    inside a group stay together.
    """
    groups = as_int(op.arguments["groups"])
    source, weight, target = inputs[0], inputs[1], outputs[0]
    assert target is not None, "a convolution that nobody uses is dropped at capture"
    rank = len(source.shape)

    def channels(size: int) -> tuple[Atom, ...]:
        return (
            (Atom("g", groups), Atom(None, size // groups))
            if size > groups
            else (Atom("g", groups),)
        )

    spatial = tuple((Atom(None, s),) for s in source.shape[2:])
    batch = plain(("n",), TensorMeta(source.shape[:1], "bool"))
    dims: list[Dims] = [(*batch, channels(source.shape[1]), *spatial)]
    dims.append((channels(weight.shape[0]), *((Atom(None, s),) for s in weight.shape[1:])))
    if len(inputs) > 2:
        dims.append((channels(inputs[2].shape[0]),))
    assert rank >= 3, "a convolution has a batch dim"
    return OpRule(
        tuple(dims),
        ((*batch, channels(target.shape[1]), *((Atom(None, s),) for s in target.shape[2:])),),
    )


def batch_norm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """[n, c, *]: channels freely; batch and positions by summing the statistics over the split (the
    local form does it).
    """
    rank = len(inputs[0].shape)
    letters = ("n", "c", *letters_of("p", rank))[:rank]
    operands = [plain(letters, inputs[0]), *(plain(("c",), m) for m in inputs[1:])]
    outs = tuple(
        plain(letters if i == 0 else ("c",), m) if m else () for i, m in enumerate(outputs)
    )
    return OpRule(tuple(operands), outs, completes=frozenset(letters) - {"c"})


def group_norm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Batch and whole groups of channels."""
    rank = len(inputs[0].shape)
    groups = as_int(op.arguments.get("num_groups", op.arguments.get("group")))
    channels = inputs[0].shape[1]
    atoms = (Atom("g" if groups > 1 else None, groups), Atom(None, channels // groups))
    first = list(plain(("n", *(None,) * (rank - 1)), inputs[0]))
    first[1] = atoms
    statistics = (
        "n",
        "g" if groups > 1 else None,
    )  # mean and rstd of native_group_norm: [n, groups]
    outs = tuple(
        tuple(first) if m and m.shape == inputs[0].shape else plain(statistics, m) if m else ()
        for m in outputs
    )
    return OpRule((tuple(first), *((atoms,) for _ in inputs[1:])), outs)


def rms_norm(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """rms_norm, layer_norm: every dim but the normalised ones."""
    rank, normalized = len(inputs[0].shape), len(as_ints(op.arguments["normalized_shape"]))
    letters = (*letters_of("b", rank - normalized), *(None,) * normalized)
    outs = tuple(plain(letters, m) if m and len(m.shape) == rank else frozen(m) for m in outputs)
    return OpRule((plain(letters, inputs[0]), *map(frozen, inputs[1:])), outs)


def embedding(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """weight [v, h], indices [b*]: a vocabulary split looks up what it has and zero elsewhere, the
    sum is the look-up.

    With gradients scaled by frequency the whole batch must be counted, so nothing is split.
    """
    if op.arguments.get("scale_grad_by_freq") or op.arguments.get("sparse"):
        return OpRule(tuple(map(frozen, inputs)), tuple(map(frozen, outputs)))
    rows = letters_of("b", len(inputs[1].shape))
    outs = tuple(plain((*rows, "h"), m) if m else () for m in outputs)
    return OpRule(
        (plain(("v", "h"), inputs[0]), plain(rows, inputs[1])), outs, contiguous=frozenset({"v"})
    )


def einsum(op: Op, inputs: Metas, outputs: Outs) -> OpRule | None:
    """The equation is the rule; without an ellipsis and without a letter twice in one operand."""
    equation = str(op.arguments["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if (
        not arrow
        or "." in equation
        or any(len(set(x)) < len(x) for x in operands)
        or len(operands) != len(inputs)
    ):
        return None
    return OpRule(
        tuple(plain(tuple(x), m) for x, m in zip(operands, inputs)),
        tuple(plain(tuple(right), m) if m else () for m in outputs),
    )


def triangle(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """triu, tril: every dim but the last two."""
    rank = len(inputs[0].shape)
    letters = tuple(None if d >= rank - 2 else f"d{d}" for d in range(rank))
    return OpRule(
        (plain(letters, inputs[0]),),
        tuple(plain(letters, m) if m else () for m in outputs),
        linear=(frozenset({0}),) if inputs[0].is_floating else (),
    )


def cross_entropy(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Logits [n, c, d*], labels [n, d*]: rows leave a Partial sum; classes by the local form's own
    reductions (DESIGN 2).

    Classes stay whole with class weights, class probabilities as labels, or log-probabilities as
    input: rare, and each would need its own local form.
    """
    rank = len(inputs[0].shape)
    rows = () if rank == 1 else ("n", *letters_of("d", rank - 2))
    probabilities = inputs[1].is_floating
    weighted = slot_of(op, "weight") is not None
    classes = None if probabilities or weighted or op.arguments["log_probs"] else "c"
    logits = (classes,) if rank == 1 else (rows[0], classes, *rows[1:])
    operands = [plain(logits, inputs[0]), plain(logits if probabilities else rows, inputs[1])]
    operands += [frozen(m) for m in inputs[2:]]
    per_row = op.target == "autoplan.cross_entropy"
    outs = tuple(plain(rows if per_row else (), m) if m else () for m in outputs)
    return OpRule(tuple(operands), outs, completes=frozenset({"c"}), contiguous=frozenset({"c"}))


def cross_entropy_count(op: Op, inputs: Metas, outputs: Outs) -> OpRule:
    """Labels that count: a Partial sum over rows; class probabilities count by row."""
    names = list(letters_of("n", len(inputs[0].shape)))
    if op.arguments["probabilities"] and len(names) > 1:
        names[1] = ""
    letters = tuple(x or None for x in names)
    return OpRule(
        (plain(letters, inputs[0]), *map(frozen, inputs[1:])), tuple(frozen(m) for m in outputs)
    )


COMPUTE_RULES: dict[str, Resolver] = {
    **dict.fromkeys(
        (
            "add", "sub", "mul", "div", "neg", "_to_copy", "real", "imag", "detach", "zeros_like",
            "isin", "native_dropout",
        ),
        pointwise,
    ),
    **dict.fromkeys(("sum", "mean"), summing_reduction),
    **dict.fromkeys(
        (
            "max", "min", "amax", "amin", "argmax", "argmin", "var", "std", "prod", "any", "all",
            "logsumexp", "var_mean", "norm", "linalg_vector_norm", "median", "mode",
            "count_nonzero",
        ),
        other_reduction,
    ),
    **dict.fromkeys(
        (
            "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "sort",
            "topk", "argsort", "flip", "roll", "diff", "glu", "cummax", "logcumsumexp",
        ),
        along_dim,
    ),
    **dict.fromkeys(
        (
            "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
        ),
        mean_loss,
    ),
    "matmul": matmul,
    "baddbmm": baddbmm,
    "scaled_dot_product_attention": attention,
    "autoplan.batch_norm": batch_norm,
    **dict.fromkeys(("group_norm", "native_group_norm"), group_norm),
    **dict.fromkeys(("layer_norm", "rms_norm", "_fused_rms_norm"), rms_norm),
    "embedding": embedding,
    "einsum": einsum,
    **dict.fromkeys(("triu", "tril"), triangle),
    **dict.fromkeys(("autoplan.cross_entropy", "autoplan.cross_entropy_sum"), cross_entropy),
    "autoplan.cross_entropy_count": cross_entropy_count,
}  # fmt: skip
