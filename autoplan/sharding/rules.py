# SPDX-License-Identifier: Apache-2.0
"""One dimension rule per op: the table. Legality only; a rule knows no seconds.

A rule names the dims of an op's tensors in einsum letters: dims with the same letter belong
together, so a mesh axis may be assigned one letter, and every layout of the op follows (DESIGN 2;
`strategies.py`). Marks in the table:

    k       a letter, used in order            x*      any number of leading dims, the same ones in
    every operand k^      never split                        n?      an operand that may be absent
    additive(i)    operand i is a summand of the contraction (a bias): it is taken once, not once
    per part linear(i j)    a Partial in operands i and j together passes through
    completes(c)   the op's local form itself finishes the reduction over c, with a collective of
    its own
    contiguous(e)  e is split in one block only: the local form needs to know where its part starts

A dim may be a product of factors, left to right, as in a reshape: `(b s) -> b s`. Splitting a
factor that is not leftmost is a split in blocks (`placements.Shard.blocks`). Ops whose factors
depend on their arguments are in `compute_rules.py` and `view_rules.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from autoplan.graph import Graph, Op, TensorMeta
from autoplan.sharding.arguments import Resolver
from autoplan.sharding.compute_rules import COMPUTE_RULES, grouped_convolution, pointwise
from autoplan.sharding.factors import Atom, Dims, OpRule, plain
from autoplan.sharding.view_rules import VIEW_RULES

_POINTWISE = """
abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil
celu clamp clamp_min clamp_max cos cosh elu eq erf erfc exp exp2 expm1 floor fmod ge gelu gt
hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log1p log2 log10
log_sigmoid logical_and logical_not logical_or logical_xor logaddexp lt masked_fill maximum
minimum mish nan_to_num ne pow reciprocal relu relu6 remainder round rsqrt selu sgn sigmoid sign
silu sin sinh softplus softshrink sqrt square tan tanh threshold trunc where xlogy __and__ __or__
__xor__ bitwise_left_shift bitwise_right_shift floor_divide addcmul addcdiv frac logit isneginf
isposinf rsub fill hardshrink copysign hypot zeros_like ones_like full_like empty_like complex
polar angle
""".split()

# op family (the name before the overload) -> rule text
_TABLE: dict[str, str] = {
    "linear": "b* k, n k, n? -> b* n; additive(2)",
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "addmm": "n, m k, k n -> m n; additive(0)",
    "mv": "m k, k -> m",
    "dot": "k, k ->",
    "outer": "m, n -> m n",
    # the next three are in the graphs that check/ writes of published runs: priced, never run
    "autoplan.expert_mm": "m k, e^ k n -> m n",
    "autoplan.exchange": "m h^ -> m h^; linear(0)",
    "autoplan.context": "b h s^ d^ -> b h t^ d^",
    "autoplan.dropout": "pointwise",
    "view_as_complex": "b* c^ -> b*; linear(0)",
    "view_as_real": "b* -> b* c^; linear(0)",
    # a row meets the matrix of its own group e; with e split, rows of other ranks' groups give zero
    "autoplan.grouped_mm": "r k, e k n, r -> r n; contiguous(e)",
    "conv1d": "n c l^, o c k^, o? -> n o m^; additive(2)",
    "conv2d": "n c h^ w^, o c k^ j^, o? -> n o y^ x^; additive(2)",
    "conv3d": "n c d^ h^ w^, o c i^ k^ j^, o? -> n o z^ y^ x^; additive(2)",
    "max_pool2d_with_indices": "n c h^ w^ -> n c y^ x^, n c y^ x^",
    "max_pool2d": "n c h^ w^ -> n c y^ x^",
    "avg_pool2d": "n c h^ w^ -> n c y^ x^; linear(0)",
    "adaptive_avg_pool2d": "n c h^ w^ -> n c y^ x^; linear(0)",
    "_adaptive_avg_pool2d": "n c h^ w^ -> n c y^ x^; linear(0)",
    "adaptive_avg_pool1d": "n c h^ -> n c y^; linear(0)",
    "avg_pool1d": "n c h^ -> n c y^; linear(0)",
    "upsample_nearest2d": "n c h^ w^ -> n c y^ x^; linear(0)",
    "upsample_bilinear2d": "n c h^ w^ -> n c y^ x^; linear(0)",
    "upsample_bicubic2d": "n c h^ w^ -> n c y^ x^; linear(0)",
}

RESOLVERS = {**COMPUTE_RULES, **VIEW_RULES}


# what users registered: family -> rule text
_REGISTERED: dict[str, str] = {}


def _family(target: str) -> str:
    """ "aten.linear.default" -> "linear"; "mylib.op.default" -> "mylib.op"."""
    namespace, name = target.split(".")[:2]
    return name if namespace == "aten" else f"{namespace}.{name}"


def register(target: str, text: str) -> None:
    """Adds a line to the table, for this process.

    Args:
        target: "namespace.name" of an op that has no rule yet.
        text: The rule, in the table's notation.

    Raises:
        ValueError: The op has a rule, or the text is no rule.
    """
    family = _family(target)
    known = {**_TABLE, **RESOLVERS}
    if family in known or family in _POINTWISE or _REGISTERED.get(family, text) != text:
        raise ValueError(f"{target} has a rule already; only what has none can be given one")
    if text != "pointwise":
        _parse(text)
    _REGISTERED[family] = text


def unregister(target: str) -> None:
    """Takes back what `register` added."""
    _REGISTERED.pop(_family(target), None)


def example_shapes(text: str, size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of operands that fit a rule, every dim of one size; a `b*` stands for two dims."""
    if text == "pointwise":
        return ((size, size),) * 2
    return tuple(
        (size,) * sum(2 if letter.endswith("*") else 1 for letter in letters)
        for letters in _parse(text).inputs
    )


def contracted_flop(op: Op, inputs: tuple[TensorMeta, ...]) -> float | None:
    """2 x the product of all letters' sizes, of a registered op that contracts a letter; None for
    any other.
    """
    text = _REGISTERED.get(_family(op.target))
    if text in (None, "pointwise"):
        return None
    parsed = _parse(text)
    sizes: dict[str, int] = {}
    for letters, meta in zip(parsed.inputs, inputs):
        spread = _spread(letters, meta)
        sizes.update(zip(spread, meta.shape) if spread else ())
    kept = {letter for letters in parsed.outputs for letter in letters}
    if all(letter in kept or letter.rstrip("0123456789") + "*" in kept for letter in sizes):
        return None
    return 2.0 * math.prod(sizes.values())


def find_rule(op: Op, graph: Graph) -> OpRule | None:
    """The op's rule at its own sizes, or None when the table has none for it (it can then only be
    kept whole).
    """
    inputs = tuple(graph.values[name].meta for name in op.inputs)
    outputs = tuple(graph.values[name].meta if name else None for name in op.outputs)
    return resolve(op, inputs, outputs)


def kept_whole(op: Op, graph: Graph) -> OpRule:
    """The rule of an op that nothing is known of: no dim may be split."""
    inputs = tuple(
        plain((None,) * len(graph.values[n].meta.shape), graph.values[n].meta) for n in op.inputs
    )
    outputs = tuple(
        plain((None,) * len(graph.values[n].meta.shape), graph.values[n].meta) if n else ()
        for n in op.outputs
    )
    return OpRule(inputs, outputs)


def resolve(
    op: Op, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...]
) -> OpRule | None:
    """The rule of an op whose tensors have these metas (None: an output that nobody uses), or
    None.
    """
    family = _family(op.target)
    resolver: Resolver | None = RESOLVERS.get(family)
    if resolver is not None:
        return resolver(op, inputs, outputs)
    text = "pointwise" if family in _POINTWISE else _REGISTERED.get(family, _TABLE.get(family))
    if text is None:
        return None
    if text == "pointwise":
        return pointwise(op, inputs, outputs)
    if family.startswith("conv") and op.arguments.get("groups", 1) != 1:
        return grouped_convolution(op, inputs, outputs)
    return _from_text(text, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _Parsed:
    inputs: tuple[tuple[str, ...], ...]
    optional: frozenset[int]
    outputs: tuple[tuple[str, ...], ...]
    additive: frozenset[int]
    linear: tuple[frozenset[int], ...]
    completes: frozenset[str]
    contiguous: frozenset[str]


_MARKS = ("additive(...)", "linear(...)", "completes(...)", "contiguous(...)")


@cache
def _parse(text: str) -> _Parsed:
    signature, *marks = (part.strip() for part in text.split(";"))
    left, arrow, right = signature.partition("->")
    words = signature.replace("->", " ").replace(",", " ").split()
    if not arrow or not all(re.fullmatch(r"[A-Za-z]\w*[*^]?\??", word) for word in words):
        raise ValueError(
            f"{text!r} is no rule. Write letters for the dims of operands and results, as in "
            '"b* k, n k, n? -> b* n; additive(2)".'
        )
    operands = [tuple(part.split()) for part in left.split(",")]
    optional = frozenset(
        i for i, letters in enumerate(operands) if letters and letters[-1].endswith("?")
    )
    found: dict[str, str] = {}
    for mark in marks:
        match = re.fullmatch(r"(\w+)\((.*)\)", mark)
        if match is None or f"{match[1]}(...)" not in _MARKS:
            raise ValueError(f"{mark!r} in rule {text!r} is no mark. Use {', '.join(_MARKS)}.")
        found[match[1]] = match[2]
    numbers = {
        key: frozenset(map(int, found[key].split()))
        for key in ("additive", "linear")
        if key in found
    }
    return _Parsed(
        inputs=tuple(tuple(letter.rstrip("?") for letter in letters) for letters in operands),
        optional=optional,
        outputs=tuple(tuple(part.split()) for part in right.split(",")),
        additive=numbers.get("additive", frozenset()),
        linear=(numbers["linear"],) if "linear" in numbers else (),
        completes=frozenset(found.get("completes", "").split()),
        contiguous=frozenset(found.get("contiguous", "").split()),
    )


def _from_text(
    text: str, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...]
) -> OpRule | None:
    parsed = _parse(text)
    operands = list(parsed.inputs)
    while len(operands) > len(inputs) and len(operands) - 1 in parsed.optional:
        operands.pop()
    if len(operands) != len(inputs) or len(outputs) > len(parsed.outputs):
        return None
    named = [_expand(letters, meta) for letters, meta in zip(operands, inputs)]
    results = [
        _expand(letters, meta) if meta else () for letters, meta in zip(parsed.outputs, outputs)
    ]
    if any(dims is None for dims in (*named, *results)):
        return None
    return OpRule(
        tuple(plain(d, m) for d, m in zip(named, inputs) if d is not None),
        tuple(plain(d, m) if m and d is not None else () for d, m in zip(results, outputs)),
        linear=parsed.linear,
        additive=parsed.additive & frozenset(range(len(inputs))),
        completes=parsed.completes,
        contiguous=parsed.contiguous,
    )


def _expand(letters: tuple[str, ...], meta: TensorMeta) -> tuple[str | None, ...] | None:
    """Letters per dim, None for `k^`; None when the rank does not fit."""
    spread = _spread(letters, meta)
    return spread and tuple(None if letter.endswith("^") else letter for letter in spread)


def _spread(letters: tuple[str, ...], meta: TensorMeta) -> tuple[str, ...] | None:
    """One letter per dim: `b*` becomes b0 b1 ..., counted from the left; None when the rank does
    not fit.
    """
    starred = [x for x in letters if x.endswith("*")]
    count = len(meta.shape) - (len(letters) - len(starred))
    if count < 0 or (not starred and count):
        return None
    dims: list[str] = []
    for letter in letters:
        dims += [f"{letter[:-1]}{i}" for i in range(count)] if letter.endswith("*") else [letter]
    return tuple(dims)


__all__ = [
    "Atom",
    "Dims",
    "OpRule",
    "contracted_flop",
    "example_shapes",
    "find_rule",
    "kept_whole",
    "register",
    "resolve",
    "unregister",
]
