# SPDX-License-Identifier: Apache-2.0
"""saved.py against autograd itself: ops run under saved_tensors_hooks, kept storages are compared.

Single calls over all gradient combinations. Whole models are in `test_saved_models.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers grouped_mm_fallback
from keeper import Keeper, combinations, compare, meta_of, op_of, replaced, tensors_in

from autoplan.costs.saved import Saved, is_exact, saved_by
from autoplan.graph import Op, Ref, TensorMeta

aten = torch.ops.aten


# -- single calls ----------------------------------------------------------------------------------


def r(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.25


def labels(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) % 4


IMAGE, MASK = (2, 4, 6, 6), torch.arange(24).reshape(4, 6) % 2 == 0
STATS = (torch.zeros(4), torch.ones(4))
CALLS: list[tuple] = [
    (aten.mul.Tensor, r(4, 6), r(4, 6)),
    (aten.mul.Tensor, r(4, 6), r(6)),
    (aten.mul.Tensor, r(4, 6), 0.5),
    (aten.div.Tensor, r(4, 6), r(4, 6)),
    (aten.div.Tensor, r(4, 6), 2.0),
    (aten.add.Tensor, r(4, 6), r(6)),
    (aten.sub.Tensor, r(4, 6), r(4, 6)),
    (aten.rsub.Scalar, r(4, 6), 1.0),
    (aten.outer.default, r(4), r(6)),
    (aten.mm.default, r(4, 6), r(6, 5)),
    (aten.mv.default, r(4, 6), r(6)),
    (aten.dot.default, r(6), r(6)),
    (aten.bmm.default, r(2, 4, 6), r(2, 6, 5)),
    (aten.baddbmm.default, r(2, 4, 5), r(2, 4, 6), r(2, 6, 5)),
    (aten.addmm.default, r(5), r(4, 6), r(6, 5)),
    (aten.addmv.default, r(4), r(4, 6), r(6)),
    (aten.addcmul.default, r(4, 6), r(4, 6), r(4, 6)),
    (aten.matmul.default, r(2, 3, 4, 6), r(2, 3, 6, 5)),
    (aten.matmul.default, r(2, 3, 4, 6), r(6, 5)),
    (aten.linear.default, r(4, 6), r(5, 6), r(5)),
    (aten.linear.default, r(2, 4, 6), r(5, 6), r(5)),
    (aten.linear.default, r(2, 4, 6), r(5, 6)),
    (aten.bilinear.default, r(4, 6), r(4, 5), r(3, 6, 5), r(3)),
    (aten.einsum.default, "bik,bkj->bij", [r(2, 4, 6), r(2, 6, 5)]),
    (
        torch.ops.transformers.grouped_mm_fallback.default,
        *(r(4, 6), r(2, 6, 5), torch.tensor([1, 4], dtype=torch.int32)),
    ),
    (aten.conv1d.default, r(2, 4, 6), r(5, 4, 3)),
    (aten.conv2d.default, r(*IMAGE), r(5, 4, 3, 3), r(5)),
    (aten.conv2d.default, r(*IMAGE), r(4, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
    (aten.conv_transpose2d.input, r(*IMAGE), r(4, 5, 3, 3), r(5)),
    *[
        (getattr(aten, name).default, r(4, 6))
        for name in (
            "tanh sigmoid exp expm1 exp2 sqrt rsqrt reciprocal relu tan gelu silu log log1p log2 "
            "log10 cos sin abs square erf softplus leaky_relu hardtanh hardswish hardsigmoid mish "
            "elu selu celu relu6 atan asin acos softshrink hardshrink neg sum mean max prod tril "
            "triu diff clone floor detach"
        ).split()
    ],
    (aten.clamp.default, r(4, 6), 0.5, 1.0),
    (aten.clamp.Tensor, r(4, 6), r(4, 6), r(4, 6)),
    (aten.clamp_min.default, r(4, 6), 0.5),
    (aten.clamp_max.default, r(4, 6), 0.5),
    (aten.remainder.Scalar, r(4, 6), 0.5),
    (aten.atan2.default, r(4, 6), r(4, 6)),
    (aten.cumprod.default, r(4, 6), 1),
    (aten.prod.dim_int, r(4, 6), 1),
    (aten.var_mean.correction, r(4, 6), [1]),
    (aten.huber_loss.default, r(4, 6), r(4, 6)),
    (aten.binary_cross_entropy.default, r(4, 6) / 2, r(4, 6) / 2),
    (aten.conv_transpose1d.default, r(2, 4, 6), r(4, 5, 3)),
    (aten.conv3d.default, r(2, 4, 6, 6, 6), r(5, 4, 3, 3, 3)),
    (aten.convolution.default, r(2, 4, 6), r(5, 4, 3), None, [1], [0], [1], False, [0], 1),
    (aten.avg_pool1d.default, r(2, 4, 6), [2]),
    (aten.max_pool3d.default, r(2, 4, 6, 6, 6), [2]),
    (aten._adaptive_avg_pool2d.default, r(*IMAGE), [2, 2]),
    (aten.adaptive_max_pool2d.default, r(*IMAGE), [2, 2]),
    (aten.native_group_norm.default, r(*IMAGE), r(4), r(4), 2, 4, 36, 2, 1e-5),
    (aten.batch_norm.default, r(*IMAGE), r(4), r(4), *STATS, True, 0.1, 1e-5, False),
    (aten.batch_norm.default, r(*IMAGE), r(4), r(4), *STATS, False, 0.1, 1e-5, False),
    (aten.pow.Tensor_Scalar, r(4, 6), 3),
    (aten.pow.Scalar, 2.0, r(4, 6)),
    (aten.pow.Tensor_Tensor, r(4, 6), r(4, 6)),
    (aten.softmax.int, r(4, 6), 1),
    (aten.softmax.int, r(4, 6), 1, torch.float64),
    (aten._softmax.default, r(4, 6), 1, False),
    (aten.log_softmax.int, r(4, 6), 1),
    (aten.logsumexp.default, r(4, 6), [1]),
    (aten.maximum.default, r(4, 6), r(4, 6)),
    (aten.min.other, r(4, 6), r(4, 6)),
    (aten.max.dim, r(4, 6), 1),
    (aten.amax.default, r(4, 6), [1]),
    (aten.topk.default, r(4, 6), 2),
    (aten.sort.default, r(4, 6)),
    (aten.var.correction, r(4, 6), [1]),
    (aten.std.correction, r(4, 6), [1]),
    (aten.linalg_vector_norm.default, r(4, 6), 2, [1]),
    (aten.cumsum.default, r(4, 6), 1),
    (aten.mean.dim, r(4, 6), [1]),
    (aten.sum.dim_IntList, r(4, 6), [1]),
    (aten.cat.default, [r(4, 6), r(4, 6)]),
    (aten.stack.default, [r(4, 6), r(4, 6)]),
    (aten.pad.default, r(4, 6), [1, 0]),
    (aten.slice_scatter.default, r(4, 6), r(2, 6), 0, 0, 2),
    (aten.select_scatter.default, r(4, 6), r(6), 0, 0),
    (aten.repeat.default, r(4, 6), [2, 1]),
    (aten.roll.default, r(4, 6), [1], [0]),
    (aten.flip.default, r(4, 6), [0]),
    (aten.lerp.Scalar, r(4, 6), r(4, 6), 0.5),
    (aten.glu.default, r(4, 6), 1),
    (aten.prelu.default, r(2, 3, 4), r(3)),
    (aten.mse_loss.default, r(4, 6), r(4, 6)),
    (aten.l1_loss.default, r(4, 6), r(4, 6)),
    (aten.smooth_l1_loss.default, r(4, 6), r(4, 6)),
    (aten.binary_cross_entropy_with_logits.default, r(4, 6), r(4, 6)),
    (aten.where.self, MASK, r(4, 6), r(4, 6)),
    (aten.where.ScalarOther, MASK, r(4, 6), 1.0),
    (aten.masked_fill.Scalar, r(4, 6), MASK, 1.0),
    (aten.embedding.default, r(4, 6), labels(2, 3)),
    (aten.gather.default, r(4, 6), 0, labels(3, 6)),
    (aten.index.Tensor, r(4, 6), [labels(2)]),
    (aten.index.Tensor, r(4, 6), [None, labels(2)]),
    (aten.index_select.default, r(4, 6), 0, labels(3)),
    (aten.index_put.default, r(4, 6), [labels(3)], r(3, 6), True),
    (aten.index_add.default, r(4, 6), 0, labels(3), r(3, 6)),
    (aten.scatter.src, r(4, 6), 0, labels(3, 6), r(3, 6)),
    (aten.scatter_add.default, r(4, 6), 0, labels(3, 6), r(3, 6)),
    (aten.native_dropout.default, r(4, 6), 0.5, True),
    (aten.dropout.default, r(4, 6), 0.5, False),
    (aten.layer_norm.default, r(4, 6), [6], r(6), r(6)),
    (aten.layer_norm.default, r(4, 6), [6]),
    (aten.native_layer_norm.default, r(4, 6), [6], r(6), r(6), 1e-5),
    (aten.rms_norm.default, r(4, 6), [6]),
    (aten.group_norm.default, r(*IMAGE), 2, r(4), r(4)),
    (
        aten._native_batch_norm_legit_functional.default,
        r(*IMAGE),
        r(4),
        r(4),
        *STATS,
        True,
        0.1,
        1e-5,
    ),
    (aten.max_pool1d.default, r(2, 4, 6), [2]),
    (aten.max_pool2d.default, r(*IMAGE), [2, 2]),
    (aten.max_pool2d_with_indices.default, r(*IMAGE), [2, 2]),
    (aten.avg_pool2d.default, r(*IMAGE), [2, 2]),
    (aten.adaptive_avg_pool2d.default, r(*IMAGE), [1, 1]),
    (aten.adaptive_avg_pool2d.default, r(*IMAGE), [2, 2]),
    (aten.upsample_nearest2d.vec, r(*IMAGE), None, [2.0, 2.0]),
    (aten.pixel_shuffle.default, r(*IMAGE), 2),
    *[
        (aten.cross_entropy_loss.default, r(4, 6), labels(4), None, n, -100, s)
        for n in (0, 1, 2)
        for s in (0.0, 0.1)
    ],
    (aten.cross_entropy_loss.default, r(2, 6, 3), labels(2, 3)),
    (aten.cross_entropy_loss.default, r(4, 6), r(4, 6)),
    (aten.nll_loss.default, r(4, 6), labels(4)),
    (aten.scaled_dot_product_attention.default, r(2, 4, 32, 8), r(2, 4, 6, 8), r(2, 4, 6, 8)),
    (
        aten.scaled_dot_product_attention.default,
        r(2, 4, 32, 8),
        r(2, 2, 32, 8),
        r(2, 2, 32, 8),
        None,
        0.0,
        True,
    ),
    (aten._to_copy.default, r(4, 6)),
    *[
        (func, r(4, 1, 6), *rest)
        for func, *rest in (
            (aten.view.default, [24]),
            (aten._unsafe_view.default, [24]),
            (aten.reshape.default, [24]),
            (aten.expand.default, [4, 3, 6]),
            (aten.transpose.int, 0, 1),
            (aten.permute.default, [2, 0, 1]),
            (aten.unsqueeze.default, 0),
            (aten.squeeze.dim, 1),
            (aten.slice.Tensor, 0, 1, 3),
            (aten.select.int, 0, 1),
            (aten.split.Tensor, 2),
            (aten.unbind.int, 0),
            (aten.alias.default,),
            (aten.diagonal.default, 0, 0, 2),
        )
    ],
]


# The derivative of these with respect to that input does not exist.
NO_GRADIENT = {
    "aten._native_batch_norm_legit_functional.default": {3, 4},
    "aten.batch_norm.default": {3, 4},
}


def keywords(func, args: tuple) -> dict[str, object]:
    """What a call needs beside its positional arguments on this machine."""
    if func is aten.scaled_dot_product_attention.default:
        return {"enable_gqa": args[0].shape[1] != args[1].shape[1]}
    return {"dtype": torch.float64} if func is aten._to_copy.default else {}


@pytest.mark.parametrize("call", CALLS, ids=lambda c: f"{c[0]}-{len(c)}")
def test_single_call_keeps_what_autograd_keeps(call: tuple) -> None:
    func, *args = call
    assert is_exact(str(func))
    barred = NO_GRADIENT.get(str(func), set())
    flags = [t.is_floating_point() and i not in barred for i, t in enumerate(tensors_in(args))]
    for needs in combinations(flags):
        _, wrong = compare(func, tuple(args), keywords(func, tuple(args)), needs)
        assert not wrong


@pytest.mark.parametrize(
    "call",
    [
        (aten.linear.default, r(4, 6), r(5, 6), r(5)),
        (aten.layer_norm.default, r(4, 6), [6], r(6), r(6)),
        (aten.cross_entropy_loss.default, r(4, 6), labels(4)),
        (aten.group_norm.default, r(*IMAGE), 2, r(4), r(4)),
        (aten.native_dropout.default, r(4, 6), 0.5, True),
        (aten.max_pool2d.default, r(*IMAGE), [2, 2]),
    ],
    ids=lambda c: str(c[0]),
)
def test_single_call_in_float64(call: tuple) -> None:
    func, *args = call
    double = replaced(args, lambda t: t.double() if t.is_floating_point() else t)
    flags = [t.is_floating_point() for t in tensors_in(double)]
    for needs in combinations(flags):
        _, wrong = compare(func, tuple(double), {}, needs)
        assert not wrong


# -- where CUDA is modelled and the CPU differs ----------------------------------------------------


def predicted(target: str, arguments: dict[str, object], *outputs: TensorMeta) -> Saved:
    op, inputs = op_of(target, arguments, len(outputs))
    needs = tuple(t.is_floating_point() for t in inputs)
    return saved_by(op, tuple(map(meta_of, inputs)), outputs, needs)


def kept_on_cpu(func: Callable[..., object], *args: object, **kwargs: object) -> int:
    """Bytes of all storages that autograd keeps when every floating input needs a gradient."""
    leaves = replaced(args, lambda t: t.detach().requires_grad_(t.is_floating_point()))
    with Keeper() as keeper:
        func(*leaves, **kwargs)
    return sum(keeper.kept.values())


def test_log_sum_exp_is_rounded_to_32_rows_on_cuda_in_float32_and_with_a_mask() -> None:
    q = r(2, 4, 8, 16)
    arguments = {"query": q, "key": q.clone(), "value": q.clone(), "attn_mask": None}
    qkvo = 4 * q.numel() * 4
    cpu = kept_on_cpu(aten.scaled_dot_product_attention.default, q, q.clone(), q.clone())
    assert cpu == qkvo + 2 * 4 * 8 * 4  # one float32 per query row
    target = "aten.scaled_dot_product_attention.default"
    said = predicted(target, arguments, meta_of(q))
    assert said == Saved((0, 1, 2), (0,), 2 * 4 * 32 * 4)
    half = {k: v.bfloat16() if v is not None else None for k, v in arguments.items()}
    assert (
        predicted(target, half, TensorMeta(tuple(q.shape), "bfloat16")).extra_bytes == 2 * 4 * 8 * 4
    )
    masked = {**arguments, "attn_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)}
    said = predicted(target, masked, meta_of(q))
    cpu = kept_on_cpu(aten.scaled_dot_product_attention.default, *masked.values())
    assert said == Saved((0, 1, 2), (0,), 2 * 4 * 32 * 4 + 2 * 8 * 8 * 4)
    assert cpu == qkvo + 2 * 4 * 8 * 4 + 2 * 8 * 8 * 4  # the bool mask became a float one on both


def test_float_mask_is_kept_as_an_input() -> None:
    q = r(1, 2, 32, 8)
    call = (aten.scaled_dot_product_attention.default, (q, q.clone(), q.clone(), r(1, 1, 32, 32)))
    said, wrong = compare(*call, {}, (True, True, True, False))
    assert not wrong
    assert said.inputs == (0, 1, 2, 3)


def test_aten_dropout_keeps_bools_on_cuda_and_the_input_dtype_on_the_cpu() -> None:
    x = r(4, 6)
    assert kept_on_cpu(aten.dropout.default, x, 0.5, True) == x.numel() * 4
    said = predicted("aten.dropout.default", {"input": x, "p": 0.5, "train": True}, meta_of(x))
    assert said == Saved(extra_bytes=x.numel())


def test_rms_norm_is_fused_on_cuda_and_decomposed_on_the_cpu() -> None:
    x, w = r(4, 6), r(6)
    fused = x.numel() * 4 + w.numel() * 4 + 4 * 4
    assert (
        kept_on_cpu(aten.rms_norm.default, x, [6], w) == fused + x.numel() * 4
    )  # the normalised input too
    said = predicted(
        "aten.rms_norm.default", {"input": x, "normalized_shape": [6], "weight": w}, meta_of(x)
    )
    assert said == Saved((0, 1), (), 4 * 4)


# -- autoplan's own targets, against what they stand for -------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_sum(smoothing: float) -> None:
    x, t = r(4, 6), labels(4)
    arguments = {
        "input": x,
        "target": t,
        "weight": None,
        "label_smoothing": smoothing,
        "log_probs": False,
    }
    said = predicted("autoplan.cross_entropy_sum", arguments, TensorMeta((), "float32"))
    kept = kept_on_cpu(
        lambda a: F.cross_entropy(a, t, reduction="sum", label_smoothing=smoothing), x
    )
    assert said.inputs == (1,)
    assert said.extra_bytes + t.numel() * 8 == kept


def test_cross_entropy_of_log_probabilities_keeps_its_input() -> None:
    arguments = {"input": r(4, 6), "target": labels(4), "weight": None, "log_probs": True}
    said = predicted("autoplan.cross_entropy_sum", arguments, TensorMeta((), "float32"))
    assert said == Saved((0, 1), (), 4)


def test_cross_entropy_count_keeps_nothing() -> None:
    said = predicted(
        "autoplan.cross_entropy_count",
        {"target": labels(4), "weight": r(6)},
        TensorMeta((), "float32"),
    )
    assert said == Saved()


def test_own_batch_norm_keeps_input_weight_and_channel_statistics() -> None:
    x, w, b = r(*IMAGE), r(4), r(4)
    arguments = {
        "input": x,
        "weight": w,
        "bias": b,
        "running_mean": STATS[0],
        "running_var": STATS[1],
        "training": True,
    }
    op, inputs = op_of("autoplan.batch_norm", arguments, 3)
    metas = tuple(map(meta_of, inputs))
    said = saved_by(op, metas, (metas[0], metas[3], metas[4]), (True, True, True, False, False))
    assert said == Saved((0, 1), (), 2 * 4 * 4)
    kept = kept_on_cpu(lambda *a: F.batch_norm(a[0], *STATS, a[1], a[2], training=True), x, w, b)
    buffers = sum(t.numel() * 4 for t in STATS)
    assert kept == x.numel() * 4 + w.numel() * 4 + said.extra_bytes + buffers


def test_own_dropout_keeps_a_bool_mask_and_index_its_indices() -> None:
    x = r(4, 6)
    assert predicted("autoplan.dropout", {"self": x, "p": 0.1}, meta_of(x)) == Saved(extra_bytes=24)
    said = predicted(
        "autoplan.index", {"self": x, "indices": (None, labels(3))}, TensorMeta((4, 3), "float32")
    )
    assert said == Saved(inputs=(1,))


def test_mask_that_nobody_can_name_is_extra() -> None:
    x = TensorMeta((4, 6), "float32")
    op = Op(
        "drop",
        "aten.native_dropout.default",
        ("x",),
        ("y", ""),
        {"input": Ref(0), "p": 0.5, "train": True},
    )
    assert saved_by(op, (x,), (x, TensorMeta((4, 6), "bool")), (True,)) == Saved(extra_bytes=24)
    assert saved_by(op, (x,), (x,), (True,)) == Saved(extra_bytes=24)
    best = Op("best", "aten.max.dim", ("x",), ("v", ""), {"self": Ref(0), "dim": 1})
    assert saved_by(best, (x,), (TensorMeta((4,), "float32"),), (True,)) == Saved(extra_bytes=32)


def test_unknown_op_keeps_everything_when_it_needs_a_gradient() -> None:
    x = TensorMeta((4, 6), "float32")
    op = Op("op", "mine.strange.default", ("x", "y"), ("z",), {"x": Ref(0), "y": Ref(1)})
    assert not is_exact(op.target)
    assert saved_by(op, (x, x), (x,), (True, False)) == Saved((0, 1), (0,))
    assert saved_by(op, (x, x), (x,), (False, False)) == Saved()
