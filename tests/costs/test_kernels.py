# SPDX-License-Identifier: Apache-2.0
"""kernels.py: FLOP against torch's own counter, bytes against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from autoplan.costs.kernels import Kernel, backward_kernels, forward_kernels, is_known
from autoplan.graph import Op, Ref, TensorMeta

aten = torch.ops.aten
F32 = 4


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(shape, dtype)


def op_of(
    target: str, num_outputs: int = 1, /, **arguments: object
) -> tuple[Op, tuple[TensorMeta, ...]]:
    """An op whose tensor arguments are given as metas; returns them in slot order too."""
    found: list[TensorMeta] = []

    def ref(value: object) -> object:
        if isinstance(value, TensorMeta):
            found.append(value)
            return Ref(len(found) - 1)
        return tuple(map(ref, value)) if isinstance(value, list | tuple) else value

    refs = {name: ref(value) for name, value in arguments.items()}
    names = tuple(f"i{n}" for n in range(len(found)))
    return Op("op", target, names, tuple(f"o{n}" for n in range(num_outputs)), refs), tuple(found)


def forward(target: str, out: TensorMeta, /, **arguments: object) -> tuple[Kernel, ...]:
    op, inputs = op_of(target, **arguments)
    return forward_kernels(op, inputs, (out,))


def backward(
    target: str, out: TensorMeta, needs: tuple[bool, ...] | None = None, /, **arguments: object
) -> tuple[Kernel, ...]:
    op, inputs = op_of(target, **arguments)
    return backward_kernels(op, inputs, (out,), needs or (True,) * len(inputs))


# -- products: the truth is torch.utils.flop_counter -----------------------------------------------


def r(*shape: int) -> torch.Tensor:
    return torch.rand(*shape)


PRODUCTS: list[tuple] = [
    (aten.mm.default, r(4, 6), r(6, 5)),
    (aten.bmm.default, r(2, 4, 6), r(2, 6, 5)),
    (aten.addmm.default, r(5), r(4, 6), r(6, 5)),
    (aten.baddbmm.default, r(2, 4, 5), r(2, 4, 6), r(2, 6, 5)),
    (aten.matmul.default, r(2, 3, 4, 6), r(2, 3, 6, 5)),
    (aten.matmul.default, r(2, 3, 4, 6), r(1, 1, 6, 5)),
    (aten.matmul.default, r(2, 3, 4, 6), r(6, 5)),
    (aten.linear.default, r(2, 4, 6), r(5, 6), r(5)),
    (aten.linear.default, r(4, 6), r(5, 6)),
    (aten.einsum.default, "bik,bkj->bij", [r(2, 4, 6), r(2, 6, 5)]),
    (aten.einsum.default, "...d,ed->...e", [r(2, 4, 6), r(5, 6)]),
    (aten.einsum.default, "bshd,bthd->bhst", [r(2, 4, 3, 6), r(2, 5, 3, 6)]),
    (aten.conv1d.default, r(2, 4, 6), r(5, 4, 3)),
    (aten.conv2d.default, r(2, 4, 6, 6), r(5, 4, 3, 3), r(5)),
    (aten.conv2d.default, r(2, 4, 6, 6), r(8, 4, 3, 3), None, [2, 2], [1, 1]),
    (aten.conv3d.default, r(1, 2, 4, 4, 4), r(3, 2, 2, 2, 2)),
    (aten.conv_transpose2d.input, r(2, 4, 6, 6), r(4, 5, 3, 3), r(5), [2, 2]),
]  # fmt: skip


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


def as_op(func: torch._ops.OpOverload, args: tuple) -> tuple[Op, tuple[TensorMeta, ...]]:
    def change(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return meta(*value.shape)
        return tuple(map(change, value)) if isinstance(value, list | tuple) else value

    schema = func._schema.arguments
    given = dict(zip([a.name for a in schema], args))
    return op_of(str(func), **{a.name: change(given.get(a.name, a.default_value)) for a in schema})


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("call", PRODUCTS, ids=lambda c: str(c[0]))
@pytest.mark.parametrize("wanted", ["all", "first", "second"])
def test_flop_of_products_equal_torch_flop_counter(call: tuple, wanted: str) -> None:
    func, *args = call
    op, inputs = as_op(func, tuple(args))
    tensors = tensors_in(args)
    pair = [i for i, t in enumerate(tensors) if t.dim() > 1][-2:]  # the operands, without a bias
    chosen = {"all": range(len(tensors)), "first": pair[:1], "second": pair[1:]}[wanted]
    for i, t in enumerate(tensors):
        t.requires_grad_(i in chosen)
    results: list[torch.Tensor] = []
    kernels = forward_kernels(op, inputs, (out_meta(func, args),))
    assert sum(k.flop for k in kernels) == counted(lambda: results.append(func(*args)))
    needs = tuple(t.requires_grad for t in tensors)
    again = backward_kernels(op, inputs, (out_meta(func, args),), needs)
    flop = sum(k.flop for k in again if k.family != "memory")
    assert flop == counted(lambda: results[0].sum().backward())
    for kernel in (*kernels, *again):
        if kernel.family == "matmul":
            assert kernel.flop == 2 * math.prod(kernel.shape)


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_convolution_is_as_many_convolutions_as_groups(transposed: bool) -> None:
    """torch's counter takes the weight gradient of a grouped convolution for a dense one."""
    func = aten.conv_transpose2d.input if transposed else aten.conv2d.default
    x, w = r(2, 4, 6, 6), r(4, 3, 3, 3) if transposed else r(6, 2, 3, 3)
    rest = ([1, 1], [0, 0], [0, 0], 2) if transposed else ([1, 1], [0, 0], [1, 1], 2)
    op, inputs = as_op(func, (x, w, None, *rest))
    out = out_meta(func, [x, w, None, *rest])
    part, kernel = x[:, :2].clone().requires_grad_(), w[: len(w) // 2].clone().requires_grad_()
    results: list[torch.Tensor] = []
    (kernels,) = forward_kernels(op, inputs, (out,))
    assert kernels.flop == 2 * counted(lambda: results.append(func(part, kernel)))
    again = backward_kernels(op, inputs, (out,), (True, True))
    assert sum(k.flop for k in again) == 2 * counted(lambda: results[0].sum().backward())


def out_meta(func: torch._ops.OpOverload, args: list) -> TensorMeta:
    with torch.no_grad():
        return meta(*func(*args).shape)


def test_linear_forward_and_backward_in_full() -> None:
    """(2, 4, 6) times (5, 6) plus bias: rows 8, so 2 * 8 * 5 * 6 = 480 FLOP three times."""
    x, w, b, y = (
        meta(2, 4, 6, dtype="bfloat16"),
        meta(5, 6, dtype="bfloat16"),
        meta(5, dtype="bfloat16"),
        meta(2, 4, 5, dtype="bfloat16"),
    )
    target, given = "aten.linear.default", {"input": x, "weight": w, "bias": b}
    assert forward(target, y, **given) == (
        Kernel("matmul", 480, 2 * (48 + 30 + 5 + 40), "bfloat16", (1, 8, 5, 6)),
    )
    data = Kernel("matmul", 480, 2 * (40 + 30 + 48), "bfloat16", (1, 8, 6, 5))
    weight = Kernel("matmul", 480, 2 * (40 + 48 + 30), "bfloat16", (1, 5, 6, 8))
    bias = Kernel("memory", 40, 2 * (40 + 5), "bfloat16")
    assert backward(target, y, **given) == (data, weight, bias)
    assert backward(target, y, (False, True, False), **given) == (weight,)
    assert backward(target, y, (False, False, False), **given) == ()


def test_batched_product_shapes_and_the_sum_of_a_broadcast_operand() -> None:
    a, b, out = meta(2, 3, 4, 6), meta(1, 1, 6, 5), meta(2, 3, 4, 5)
    (kernel,) = forward("aten.matmul.default", out, self=a, other=b)
    assert kernel.shape == (6, 4, 5, 6)
    left, right, total = backward("aten.matmul.default", out, self=a, other=b)
    assert (left.shape, right.shape) == ((6, 4, 6, 5), (6, 6, 5, 4))
    assert total == Kernel("memory", 6 * 30, (6 * 30 + 30) * F32, "float32")


def test_grouped_product_counts_each_row_once() -> None:
    x, w, offs, y = meta(10, 6), meta(4, 6, 5), meta(4, dtype="int32"), meta(10, 5)
    given = {"input": x, "weight": w, "offs": offs}
    (kernel,) = forward("transformers.grouped_mm_fallback.default", y, **given)
    assert kernel.flop == 2 * 10 * 6 * 5
    data, weight = backward(
        "transformers.grouped_mm_fallback.default", y, (True, True, False), **given
    )
    assert data.flop == weight.flop == kernel.flop
    assert weight.num_bytes == (50 + 60 + 120) * F32


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (8, 12)])
def test_flop_of_attention_equal_torch_flop_formulas(queries: int, keys: int) -> None:
    q, k, target = (
        (2, 4, queries, 16),
        (2, 4, keys, 16),
        "aten.scaled_dot_product_attention.default",
    )
    given = {"query": meta(*q), "key": meta(*k), "value": meta(*k)}
    assert [x.flop for x in forward(target, meta(*q), **given)] == [sdpa_flop_count(q, k, k)]
    expected = sdpa_backward_flop_count(q, q, k, k)
    assert [x.flop for x in backward(target, meta(*q), **given)] == [expected]


def test_attention_flop_and_bytes_and_the_causal_half() -> None:
    q, k = (
        meta(2, 8, 64, 16, dtype="bfloat16"),
        meta(2, 2, 96, 16, dtype="bfloat16"),
    )  # grouped queries
    given = {"query": q, "key": k, "value": k, "attn_mask": None}
    target = "aten.scaled_dot_product_attention.default"
    (full,) = forward(target, q, **given, is_causal=False)
    lse_bytes = 4 * 2 * 8 * 64
    assert full.flop == 4 * 2 * 8 * 64 * 96 * 16
    assert full.num_bytes == 2 * q.size_bytes + 2 * k.size_bytes + lse_bytes
    (half,) = forward(target, q, **given, is_causal=True)
    assert half.flop == full.flop / 2
    (back,) = backward(target, q, **given, is_causal=True)
    assert back.flop == 2.5 * half.flop
    assert (
        back.num_bytes == 4 * q.size_bytes + 4 * k.size_bytes + lse_bytes
    )  # q, o, do, dq; k, v, dk, dv
    mask = meta(1, 1, 64, 96, dtype="bfloat16")
    (masked,) = forward(target, q, **{**given, "attn_mask": mask})
    assert masked.num_bytes == full.num_bytes + mask.size_bytes


# -- views and copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["view", "reshape", "transpose", "permute", "unsqueeze", "alias"])
def test_views_are_free_both_ways(name: str) -> None:
    x = meta(4, 6)
    for kernels in (
        forward(f"aten.{name}.default", x, self=x),
        backward(f"aten.{name}.default", x, self=x),
    ):
        assert [(k.family, k.flop, k.num_bytes) for k in kernels] == [("view", 0, 0)]


def test_views_whose_gradient_is_work() -> None:
    x = meta(4, 6)
    assert backward("aten.expand.default", meta(8, 4, 6), self=x) == (
        Kernel("memory", 192, (192 + 24) * F32, "float32"),
    )
    (part,) = backward("aten.slice.Tensor", meta(2, 6), self=x)
    assert part.num_bytes == (24 + 2 * 12) * F32  # zeros of the whole, then a copy of the part
    op, inputs = op_of("aten.split.Tensor", 2, self=x)
    assert [k.family for k in forward_kernels(op, inputs, (meta(2, 6), meta(2, 6)))] == ["view"]
    (joined,) = backward_kernels(op, inputs, (meta(2, 6), meta(2, 6)), (True,))
    assert joined.num_bytes == 2 * 24 * F32
    assert backward("aten.detach.default", x, self=x) == ()


@pytest.mark.parametrize("name", ["clone", "contiguous", "_unsafe_view"])
def test_copies_cost_two_passes_forward_and_none_backward(name: str) -> None:
    x = meta(4, 6)
    assert [k.num_bytes for k in forward(f"aten.{name}.default", x, self=x)] == [2 * 24 * F32]
    assert [k.num_bytes for k in backward(f"aten.{name}.default", x, self=x)] == [0]


# -- passes over memory ----------------------------------------------------------------------------


def test_addition_passes_its_gradient_on_and_sums_a_broadcast_one() -> None:
    x, b = meta(4, 6), meta(6)
    (add,) = forward("aten.add.Tensor", x, self=x, other=b, alpha=1)
    assert add == Kernel("memory", 24, (24 + 6 + 24) * F32, "float32")
    assert [k.family for k in backward("aten.add.Tensor", x, self=x, other=x, alpha=1)] == ["view"]
    (summed,) = backward("aten.add.Tensor", x, self=x, other=b, alpha=1)
    assert summed.num_bytes == (24 + 6) * F32
    (minus,) = backward("aten.sub.Tensor", x, self=x, other=x, alpha=1)
    assert minus.num_bytes == 2 * 24 * F32


def test_multiplication_has_a_pass_per_gradient() -> None:
    x, w = meta(4, 6), meta(6)
    data, weight, total = backward("aten.mul.Tensor", x, self=x, other=w)
    assert data.num_bytes == (24 + 6 + 24) * F32  # gradient, weight, result
    assert weight.num_bytes == (24 + 24 + 24) * F32  # gradient, input, product
    assert total.num_bytes == (24 + 6) * F32


def test_elementwise_backward_reads_gradient_and_saved_tensor() -> None:
    x = meta(4, 6)
    for target in ("aten.gelu.default", "aten.tanh.default", "aten.softmax.int"):
        (kernel,) = backward(target, x, self=x)
        assert kernel.num_bytes == 3 * 24 * F32
    (cast,) = backward("aten._to_copy.default", meta(4, 6, dtype="bfloat16"), self=x)
    assert cast.num_bytes == 24 * (2 + 4)


def test_embedding_touches_the_rows_it_needs() -> None:
    table, ids, out = meta(1000, 6), meta(2, 3, dtype="int64"), meta(2, 3, 6)
    (read,) = forward("aten.embedding.default", out, weight=table, indices=ids)
    assert read.num_bytes == 2 * 36 * F32 + 6 * 8
    (write,) = backward("aten.embedding.default", out, (True, False), weight=table, indices=ids)
    assert write.num_bytes == 6000 * F32 + 3 * 36 * F32 + 6 * 8


def test_layer_norm_backward_is_a_data_and_a_weight_kernel() -> None:
    x, w = meta(4, 6), meta(6)
    given = {"input": x, "normalized_shape": (6,), "weight": w, "bias": w}
    data, weight = backward("aten.layer_norm.default", x, **given)
    saved = 24 + 6 + 6 + 2 * 4  # input, weight, bias, mean and rstd of four rows
    assert data.num_bytes == (24 + saved + 24) * F32
    assert weight.num_bytes == (24 + saved + 12) * F32
    assert len(backward("aten.layer_norm.default", x, (True, False, False), **given)) == 1


def test_batch_norm_reads_its_input_twice_in_training() -> None:
    x, c = meta(2, 3, 4, 4), meta(3)
    given = {"input": x, "weight": c, "bias": c, "running_mean": c, "running_var": c}
    (train,) = forward("autoplan.batch_norm", x, **given, training=True)
    (infer,) = forward("autoplan.batch_norm", x, **given, training=False)
    assert train.num_bytes - infer.num_bytes == x.size_bytes
    needs = (True, True, True, False, False)
    kernels = backward("autoplan.batch_norm", x, needs, **given, training=True)
    assert sum(k.num_bytes for k in kernels) == 5 * x.size_bytes


def test_cross_entropy_passes_over_the_logits() -> None:
    logits, target = meta(8, 100), meta(8, dtype="int64")
    given = {"input": logits, "target": target, "weight": None}
    (out,) = forward("autoplan.cross_entropy_sum", meta(), **given)
    assert out.num_bytes == 2 * 800 * F32 + 8 * 8 + 8 * F32 + F32
    (back,) = backward("autoplan.cross_entropy_sum", meta(), (True, False), **given)
    assert back.num_bytes == 4 * 800 * F32 + 8 * 8


def test_own_dropout_writes_and_reads_a_bool_mask() -> None:
    x = meta(4, 6)
    assert [k.num_bytes for k in forward("autoplan.dropout", x, self=x, p=0.1)] == [2 * 96 + 24]
    assert [k.num_bytes for k in backward("autoplan.dropout", x, self=x, p=0.1)] == [2 * 96 + 24]


def test_creation_writes_only_and_comparisons_have_no_gradient() -> None:
    x = meta(4, 6)
    assert [k.num_bytes for k in forward("aten.zeros_like.default", x, self=x)] == [96]
    assert [k.num_bytes for k in forward("aten.arange.default", meta(8, dtype="int64"), end=8)] == [
        64
    ]
    assert backward("aten.gt.Scalar", meta(4, 6, dtype="bool"), self=x, other=0) == ()
    op = Op("check", "aten._assert_tensor_metadata.default", ("x",), (), {"a": Ref(0)})
    assert forward_kernels(op, (x,), ()) == ()


def test_unknown_op_is_one_pass_and_says_so() -> None:
    x = meta(4, 6)
    assert not is_known("mine.strange.default")
    assert is_known("aten.linear.default")
    assert forward("mine.strange.default", x, a=x, b=x) == (
        Kernel("memory", 24, 3 * 96, "float32"),
    )
    (back,) = backward("mine.strange.default", x, a=x, b=x)
    assert back.num_bytes == (1 + 3 + 2) * 96  # gradient, all that was kept, two gradients


def test_integer_inputs_never_get_a_gradient() -> None:
    ids = meta(4, dtype="int64")
    assert backward("aten.mul.Tensor", ids, (True, True), self=ids, other=ids) == ()
