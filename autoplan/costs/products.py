# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of products: sizes and FLOP of matmuls, einsums, convolutions and attention.

In: an op with the metas of its tensors as one rank holds them. Out: the batched product that it is,
or its FLOP. A multiply-add counts two. Which kernels run, and what they read and write, is in
`kernels.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoplan.costs.saved import input_slots
from autoplan.graph import Op, TensorMeta

Metas = tuple[TensorMeta, ...]

# left, right and added operand of a product, by their names in the schema
_OPERANDS: dict[str, tuple[str, str, str]] = {
    "mm": ("self", "mat2", ""),
    "bmm": ("self", "mat2", ""),
    "mv": ("self", "vec", ""),
    "dot": ("self", "tensor", ""),
    "matmul": ("self", "other", ""),
    "addmm": ("mat1", "mat2", "self"),
    "addmv": ("mat", "vec", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
    "linear": ("input", "weight", "bias"),
    "grouped_mm_fallback": ("input", "weight", ""),
    "grouped_mm": ("input", "weight", ""),
    "expert_mm": ("input", "weight", ""),
}


@dataclass(frozen=True, slots=True)
class Product:
    """out[b, m, n] = sum over k of left[b, m, k] * right[b, k, n] (+ added)."""

    batch: int
    m: int
    n: int
    k: int
    left: int
    right: int
    added: int | None = None
    transposed: bool = False  # right is stored [n, k]

    @property
    def flop(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


def product_of(op: Op, inputs: Metas, out: TensorMeta) -> Product | None:
    """The product that a call is; None for an einsum that is none."""
    stem = op.target.split(".")[1]
    if stem == "einsum":
        return _einsum_product(op, inputs)
    left, right, added = _OPERANDS[stem]
    (i,), (j,) = input_slots(op, left), input_slots(op, right)
    bias = next(iter(input_slots(op, added)), None) if added else None
    a, b = inputs[i].shape, inputs[j].shape
    if stem == "linear":
        n, k = (b[0], b[1]) if len(b) == 2 else (1, b[0])
        return Product(1, math.prod(a[:-1]), n, k, i, j, bias, transposed=True)
    if op.target == "autoplan.grouped_mm":  # of the groups held here, if all have as many rows
        groups = op.arguments["num_groups"]
        assert isinstance(groups, int), "the number of groups is an int"
        return Product(1, max(a[0] * b[0] // groups, 1), b[-1], b[-2], i, j)
    if stem == "grouped_mm_fallback":  # (m, k) rows and (experts, k, n) weights: a row meets one
        return Product(1, a[0], b[-1], b[-2], i, j)
    if stem == "expert_mm":  # equal shares of the rows: each expert's product is one of a batch
        return Product(b[0], -(-a[0] // b[0]), b[2], b[1], i, j)
    m = a[-2] if len(a) > 1 else 1
    n = b[-1] if len(b) > 1 else 1
    if len(b) <= 2:  # torch folds the batch into the rows
        return Product(1, math.prod(a[:-1]), n, a[-1], i, j, bias)
    return Product(out.numel // max(m * n, 1), m, n, a[-1], i, j, bias)


def _einsum_product(op: Op, inputs: Metas) -> Product | None:
    """The batched product that an einsum of two operands is, by its letters; None for others."""
    equation = str(op.arguments.get("equation", "")).replace(" ", "")
    if len(inputs) != 2 or "->" not in equation or equation.count(",") != 1:
        return None
    terms, out = equation.split("->")
    size: dict[str, int] = {}
    letters: list[set[str]] = []
    for term, x in zip(terms.split(","), inputs):
        # the dims of an ellipsis get digits as their letters, counted from the right
        width = len(x.shape) - len(term.replace("...", ""))
        named = term.replace("...", "9876543210"[10 - width :])
        letters.append(set(named))
        for letter, length in zip(named, x.shape):
            size[letter] = max(size.get(letter, 1), length)
    a, b = letters
    kept = set(out.replace("...", "9876543210"))
    groups = (a & b & kept, (a - b) & kept, (b - a) & kept, (a & b) - kept)
    batch, m, n, k = (math.prod(size[c] for c in group) for group in groups)
    return Product(batch, m, n, k, 0, 1)


def convolution_flop(op: Op, inputs: Metas, out: TensorMeta) -> float:
    """2 * outputs * (channels in / groups) * kernel elements.

    Transposed: 2 * inputs * (channels out / groups) * kernel elements. The weight is (out,
    in / groups, *kernel), transposed (in, out / groups, *kernel): all but its first dim count.
    """
    transposed = "transpose" in op.target or bool(op.arguments.get("transposed"))
    each = inputs[0].numel if transposed else out.numel
    return 2.0 * each * math.prod(inputs[1].shape[1:])


def attention_flop(op: Op, inputs: Metas) -> float:
    """q k^T and p v, 2 b h s t d each; half of it under a causal mask, which skips blocks.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
    2023, section 4.1.
    """
    query, key, value = (t.shape for t in inputs[:3])
    flop = 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return flop / 2 if op.arguments.get("is_causal") else flop
