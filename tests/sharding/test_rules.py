# SPDX-License-Identifier: Apache-2.0
"""Every rule of the tables on pretend ranks: parts of operands give the parts of the result.

One or more small ATen calls per op family; for every strategy on one and two mesh axes, values and
gradients of the local form in float64. Splits are tried plainly and in two blocks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rule_check import graph_of, problems_of, values_of

from autoplan.sharding.rules import _POINTWISE, _TABLE, RESOLVERS

aten = torch.ops.aten
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]


def x(*shape: int, low: float = 0.1, high: float = 0.9) -> torch.Tensor:
    """Distinct numbers, in the domain of every function that has one."""
    count = max(1, torch.Size(shape).numel())
    values = low + (high - low) * (torch.randperm(count, dtype=torch.float64) + 0.5) / count
    return values.reshape(shape)


def signed(*shape: int) -> torch.Tensor:
    return x(*shape, low=-3.0, high=3.0)


def ints(*shape: int, below: int = 8) -> torch.Tensor:
    return torch.randint(0, below, shape)


def bools(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


def case(func: Any, *args: Any, **kwargs: Any) -> Case:
    return func, args, kwargs


def z(*shape: int) -> torch.Tensor:
    return torch.complex(signed(*shape), signed(*shape))


torch.manual_seed(20)

UNARY = """acos asin asinh atan atanh cos cosh erf erfc exp exp2 expm1 log log1p log2 log10 logit
reciprocal rsqrt sin sinh sqrt tan tanh""".split()
SIGNED_UNARY = """abs celu elu gelu hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf
isposinf leaky_relu log_sigmoid mish nan_to_num relu relu6 selu sgn sigmoid sign silu softplus
softshrink square ceil floor frac round trunc neg detach hardshrink zeros_like ones_like real
logical_not""".split()
BINARY = """atan2 eq.Tensor fmod.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor ne.Tensor maximum
minimum logaddexp remainder.Tensor xlogy.Tensor copysign.Tensor hypot logical_and logical_or
logical_xor pow.Tensor_Tensor floor_divide add.Tensor sub.Tensor mul.Tensor div.Tensor
rsub.Tensor""".split()
BITWISE = """bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor
__xor__.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor""".split()


def named(text: str) -> Any:
    name, _, overload = text.partition(".")
    return getattr(getattr(aten, name), overload or "default")


POINTWISE: list[Case] = [
    *[case(named(n), x(8, 4)) for n in UNARY],
    *[case(named(n), signed(8, 4)) for n in SIGNED_UNARY],
    case(aten.acosh.default, x(8, 4, low=1.5, high=3.0)),
    *[case(named(n), x(8, 4), x(8, 4)) for n in BINARY],
    *[case(named(n), x(8, 4), x(4)) for n in BINARY],
    *[case(named(n), x(8, 1), x(2, 8, 4)) for n in ("add.Tensor", "mul.Tensor", "div.Tensor")],
    *[case(named(n), ints(8, 4, below=4), ints(8, 4, below=4)) for n in BITWISE],
    case(aten.bitwise_not.default, ints(8, 4)),
    case(aten.add.Tensor, x(8, 4), 2.0),
    case(aten.add.Tensor, x(8, 4), x(8, 4), alpha=3),
    case(aten.add.Scalar, x(8, 4), 2.0),
    case(aten.sub.Scalar, x(8, 4), 2.0),
    case(aten.rsub.Scalar, x(8, 4), 2.0),
    case(aten.mul.Scalar, x(8, 4), 2.0),
    case(aten.mul.Tensor, x(8, 4), ints(8, 4)),
    case(aten.div.Scalar, x(8, 4), 2.0),
    case(aten.div.Tensor_mode, x(8, 4), x(8, 4), rounding_mode="floor"),
    case(aten.pow.Tensor_Scalar, x(8, 4), 2),
    case(aten.clamp.default, signed(8, 4), -1.0, 1.0),
    case(aten.clamp.Tensor, signed(8, 4), x(4), x(8, 4)),
    case(aten.clamp_min.default, signed(8, 4), 0.5),
    case(aten.clamp_max.default, signed(8, 4), 0.5),
    case(aten.lerp.Scalar, x(8, 4), x(8, 4), 0.25),
    case(aten.lerp.Tensor, x(8, 4), x(8, 4), x(4)),
    case(aten.masked_fill.Scalar, x(8, 4), bools(8, 4), 0),
    case(aten.masked_fill.Scalar, x(8, 4), bools(8, 1), -1e9),
    case(aten.masked_fill.Tensor, x(8, 4), bools(4), torch.tensor(2.0, dtype=torch.float64)),
    case(aten.where.self, bools(8, 4), x(8, 4), x(8, 4)),
    case(aten.where.self, bools(4), x(8, 4), torch.tensor(0.5, dtype=torch.float64)),
    case(aten.threshold.default, signed(8, 4), 0.5, 0.25),
    case(aten.addcmul.default, x(8, 4), x(8, 4), x(4), value=2),
    case(aten.addcdiv.default, x(8, 4), x(8, 4), x(4), value=2),
    case(aten.fill.Scalar, x(8, 4), 2.0),
    case(aten.fill.Tensor, x(8, 4), torch.tensor(2.0, dtype=torch.float64)),
    case(aten.full_like.default, x(8, 4), 2.0),
    case(aten._to_copy.default, x(8, 4), dtype=torch.float32),
    case(aten._to_copy.default, ints(8, 4), dtype=torch.float64),
    case(aten.isin.Tensor_Scalar, ints(8, 4), 3),
]

COMPLEX: list[Case] = [
    case(aten.complex.default, x(8, 4), x(4)),
    case(aten.polar.default, x(8, 4), signed(8, 4)),
    case(aten.angle.default, z(8, 4)),
    case(aten.real.default, z(8, 4)),
    case(aten.imag.default, z(8, 4)),
    case(aten.view_as_real.default, z(8, 4)),
    case(aten.view_as_complex.default, x(8, 4, 2)),
    case(aten.mul.Tensor, z(8, 4), z(4)),
    case(aten.mul.Tensor, z(8, 4), x(8, 4)),
    case(aten.add.Tensor, z(8, 4), x(8, 4)),
]

REDUCTIONS: list[Case] = [
    *[case(f, x(8, 4, 2)) for f in (aten.sum.default, aten.mean.default)],
    *[case(f, x(8, 4, 2), [1]) for f in (aten.sum.dim_IntList, aten.mean.dim)],
    *[case(f, x(8, 4), [-1, 0], True) for f in (aten.sum.dim_IntList, aten.mean.dim)],
    case(aten.sum.dim_IntList, ints(8, 4), [0]),
    case(aten.sum.default, bools(8, 4)),
    case(aten.mean.default, x(8, 4), dtype=torch.float32),
    *[
        case(named(n), x(8, 4, 2))
        for n in "max min amax amin argmax argmin var std prod any all median".split()
    ],
    *[case(named(n), x(8, 4, 2), 1) for n in "max.dim min.dim argmax argmin prod.dim_int".split()],
    *[case(named(n), x(8, 4, 2), 1) for n in "any.dim all.dim median.dim mode".split()],
    *[case(named(n), x(8, 4, 2), [0, 2], True) for n in "amax amin logsumexp".split()],
    case(aten.var.dim, x(8, 4, 2), [1]),
    case(aten.var.correction, x(8, 4, 2), [1], correction=0, keepdim=True),
    case(aten.std.correction, x(8, 4, 2), [-1]),
    case(aten.var_mean.correction, x(8, 4, 2), [-1], correction=0, keepdim=True),
    case(aten.norm.ScalarOpt_dim, x(8, 4), 2, [1], True),
    case(aten.linalg_vector_norm.default, x(8, 4), 2, [1]),
    case(aten.count_nonzero.dim_IntList, ints(8, 4), [1]),
    case(aten.max.other, x(8, 4), x(8, 4)),
]

ALONG: list[Case] = [
    case(aten.softmax.int, x(8, 4), -1),
    case(aten._softmax.default, x(8, 4, 2), 1, False),
    case(aten.log_softmax.int, x(8, 4), 0),
    case(aten._log_softmax.default, x(8, 4), 1, False),
    *[case(named(n), x(8, 4), 1) for n in "cumsum cumprod cummax logcumsumexp".split()],
    case(aten.sort.default, x(8, 4), 1),
    case(aten.argsort.default, x(8, 4), 0),
    case(aten.topk.default, x(8, 4), 2),
    case(aten.flip.default, x(8, 4, 2), [0, 1]),
    case(aten.roll.default, x(8, 4, 2), [1, 1], [0, 1]),
    case(aten.roll.default, x(8, 4), [3]),
    case(aten.diff.default, x(8, 4)),
    case(aten.glu.default, x(8, 4, 4), 1),
]

LOSSES: list[Case] = [
    *[
        case(named(n), x(8, 4), x(8, 4), *more, reduction)
        for n, more in (
            ("mse_loss", ()),
            ("l1_loss", ()),
            ("binary_cross_entropy", (None,)),
            ("binary_cross_entropy_with_logits", (None, None)),
        )
        for reduction in (0, 1, 2)
    ],
    *[case(named(n), x(8, 4), x(8, 4)) for n in ("smooth_l1_loss", "huber_loss")],
    case(aten.binary_cross_entropy_with_logits.default, signed(8, 4), x(8, 4), None, x(4), 1),
]

VIEWS: list[Case] = [
    case(aten.reshape.default, x(8, 4), [32]),
    case(aten.reshape.default, x(32), [8, 4]),
    case(aten.reshape.default, x(4, 8, 2), [4, 16]),
    case(aten.reshape.default, x(4, 8, 4), [32, 4]),
    case(aten.reshape.default, x(32, 4), [4, 8, 4]),
    case(aten.reshape.default, x(4, 24), [4, 3, 8]),
    case(aten.reshape.default, x(4, 24), [4, 3, 4, 2]),
    case(aten.reshape.default, x(4, 3, 8), [12, 8]),
    case(aten.reshape.default, x(6, 4), [8, 3]),
    case(aten.reshape.default, x(4, 8, 2, 4), [4, 4, 2, 8]),
    case(aten.reshape.default, x(8, 1, 4), [8, 4]),
    case(aten.reshape.default, x(8, 4), [1, 8, 1, 4]),
    case(aten.reshape.default, ints(4, 8), [2, 2, 8]),
    case(aten.view.default, x(8, 4), [4, 8]),
    case(aten.transpose.int, x(8, 4, 2), 0, -1),
    case(aten.permute.default, x(8, 4, 2), [2, 0, 1]),
    case(aten.t.default, x(8, 4)),
    case(aten.t.default, x(8)),
    case(aten.swapaxes.default, x(8, 4, 2), 0, 1),
    case(aten.unsqueeze.default, x(8, 4), -1),
    case(aten.tril.default, x(4, 8, 8)),
    case(aten.triu.default, x(4, 8, 8), 1),
    case(aten.tile.default, x(8, 4), [3, 1]),
    case(aten.einsum.default, "bik,bkj->bij", [x(4, 2, 8), x(4, 8, 2)]),
    case(aten.einsum.default, "bi,bi->b", [x(4, 8), x(4, 8)]),
    case(aten.unsqueeze.default, x(8, 4), 0),
    case(aten.squeeze.default, x(8, 1, 4)),
    case(aten.squeeze.dim, x(8, 1, 4), 1),
    case(aten.squeeze.dims, x(1, 8, 1, 4), [0, 1]),
    case(aten.expand.default, x(8, 1), [8, 4]),
    case(aten.expand.default, x(4), [8, -1]),
    case(aten.slice.Tensor, x(8, 4), 0, 0, 4),
    case(aten.slice.Tensor, x(8, 4), 0, 4, 8),
    case(aten.slice.Tensor, x(4, 12), 1, 4, 8),
    case(aten.slice.Tensor, x(8, 4), 0, -4, 9223372036854775807),
    case(aten.slice.Tensor, x(8, 4), 0, 1, 5),
    case(aten.slice.Tensor, x(8, 4), 0, 0, 8, 2),
    case(aten.slice.Tensor, x(8, 4), 1),
    case(aten.select.int, x(8, 4), 0, 3),
    case(aten.select.int, x(8, 4), 1, -1),
    case(aten.split.Tensor, x(4, 12), 4, 1),
    case(aten.split.Tensor, x(4, 10), 4, 1),
    case(aten.split_with_sizes.default, x(4, 12), [4, 4, 4], -1),
    case(aten.split_with_sizes.default, x(4, 12), [4, 8], 1),
    case(aten.unbind.int, x(3, 4, 8)),
    case(aten.unbind.int, x(4, 8, 2), -1),
    case(aten.cat.default, [x(8, 4), x(8, 4)], 1),
    case(aten.cat.default, [x(8, 4), x(8, 8)], 1),
    case(aten.cat.default, [x(8, 4), x(8, 4), x(8, 4)]),
    case(aten.stack.default, [x(8, 4), x(8, 4)], 1),
    case(aten.stack.default, [x(8, 4), x(8, 4)], -1),
    case(aten.pad.default, x(8, 4, 2), [1, 1]),
    case(aten.constant_pad_nd.default, x(8, 4), [0, 1], 1.0),
    case(aten.constant_pad_nd.default, x(8, 4), [1, 0, 2, 0]),
    case(aten.repeat.default, x(8, 4), [1, 2]),
    case(aten.repeat.default, x(8, 4), [3, 1, 1]),
    case(aten.repeat.default, x(8, 4), [2, 3]),
    case(aten.unfold.default, x(4, 8, 4), 1, 4, 2),
    case(aten.repeat_interleave.self_int, x(8, 4), 2, 1),
    case(aten.repeat_interleave.self_int, x(4, 8, 2), 3, -3),
    case(aten.repeat_interleave.self_int, x(8, 4), 2),
    case(aten.slice_scatter.default, x(8, 4), x(8, 2), 1, 0, 2),
    case(aten.select_scatter.default, x(8, 4), x(8), 1, 2),
    case(aten.copy.default, x(8, 4), x(8, 4)),
]

FACTORIES: list[Case] = [
    *[case(named(n), [8, 4], dtype=torch.float64) for n in ("zeros", "ones")],
    case(aten.full.default, [8, 4], 2.0, dtype=torch.float64),
    *[case(named(n), x(2, 2), [8, 4]) for n in ("new_zeros", "new_ones")],
    case(aten.new_full.default, x(2, 2), [8, 4], 2.0),
    case(aten.arange.default, 8),
    case(aten.arange.start_step, 0, 16, 2),
    case(aten.scalar_tensor.default, 2.0, dtype=torch.float64),
    case(aten.eye.default, 4, dtype=torch.float64),
    case(aten.linspace.default, 0, 1, 8, dtype=torch.float64),
]

LOOKUPS: list[Case] = [
    case(aten.embedding.default, x(8, 4), ints(4, 2)),
    case(aten.embedding.default, x(8, 4), ints(4, 2), 3),
    case(aten.embedding.default, x(8, 4), ints(4, 2, below=3), -1, True),
    case(aten.gather.default, x(8, 4), 1, ints(8, 2, below=4)),
    case(aten.gather.default, x(8, 4), 1, ints(4, 2, below=4)),
    case(aten.take_along_dim.default, x(8, 4), ints(8, 4, below=4), 1),
    case(aten.scatter.src, x(8, 4), 1, ints(8, 4, below=4).argsort(1), x(8, 4)),
    case(aten.scatter.value, x(8, 4), 1, ints(8, 2, below=4), 2.0),
    case(aten.scatter_add.default, x(8, 4), 1, ints(8, 4, below=4), x(8, 4)),
    case(aten.index_select.default, x(8, 4), 1, ints(6, below=4)),
    case(aten.index.Tensor, x(8, 4), [ints(4)]),
    case(aten.index.Tensor, x(8, 4, 2), [None, ints(4, 2, below=4)]),
    case(aten.index.Tensor, x(8, 4, 2), [ints(4), None, ints(4, below=2)]),
    case(aten.index.Tensor, x(8, 4), [ints(4, 1), ints(2, below=4)]),
    case(aten.index.Tensor, x(8, 4), [bools(8)]),
]

PRODUCTS: list[Case] = [
    case(aten.linear.default, x(4, 2, 8), x(4, 8), x(4)),
    case(aten.linear.default, x(4, 8), x(4, 8)),
    case(aten.mm.default, x(4, 8), x(8, 4)),
    case(aten.bmm.default, x(4, 2, 8), x(4, 8, 4)),
    case(aten.addmm.default, x(4), x(8, 4), x(4, 4)),
    case(aten.mv.default, x(4, 8), x(8)),
    case(aten.dot.default, x(8), x(8)),
    case(aten.outer.default, x(8), x(4)),
    case(aten.matmul.default, x(4, 2, 8), x(8, 4)),
    case(aten.matmul.default, x(2, 4, 2, 8), x(4, 8, 4)),
    case(aten.matmul.default, x(2, 1, 4, 8), x(4, 8, 4)),
    case(aten.matmul.default, x(8), x(8, 4)),
    case(aten.matmul.default, x(4, 8), x(8)),
    case(aten.matmul.default, x(8), x(8)),
    case(aten.baddbmm.default, x(4, 2, 4), x(4, 2, 8), x(4, 8, 4)),
    case(aten.baddbmm.default, x(4), x(4, 2, 8), x(4, 8, 4)),
]

NORMS: list[Case] = [
    case(aten.layer_norm.default, signed(4, 2, 8), [8], x(8), x(8)),
    case(aten.layer_norm.default, signed(4, 8), [8]),
    case(aten.layer_norm.default, signed(4, 2, 8), [2, 8]),
    case(aten.rms_norm.default, signed(4, 2, 8), [8], x(8)),
    case(aten.rms_norm.default, signed(4, 2, 8), [2, 8], x(2, 8)),
    case(aten._fused_rms_norm.default, signed(4, 8), [8], x(8), 1e-6),
    case(aten.group_norm.default, signed(4, 8, 3), 4, x(8), x(8)),
    case(aten.group_norm.default, signed(4, 8, 3), 1),
    case(aten.native_group_norm.default, signed(4, 8, 3), x(8), x(8), 4, 8, 3, 4, 1e-5),
    case(
        aten._native_batch_norm_legit_functional.default,
        *(signed(4, 8, 3), x(8), x(8), x(8), x(8), True, 0.1, 1e-5),
    ),
    case(
        aten._native_batch_norm_legit_no_training.default,
        *(signed(4, 8, 3, 3), x(8), x(8), x(8), x(8), 0.1, 1e-5),
    ),
]

IMAGES: list[Case] = [
    case(aten.conv1d.default, x(4, 4, 5), x(8, 4, 3), x(8), [1], [1]),
    case(aten.conv2d.default, x(4, 4, 5, 5), x(8, 4, 3, 3), x(8), [2, 2], [1, 1]),
    case(aten.conv2d.default, x(4, 4, 5, 5), x(8, 4, 1, 1)),
    case(aten.conv2d.default, x(4, 8, 5, 5), x(8, 1, 3, 3), x(8), [1, 1], [1, 1], [1, 1], 8),
    case(aten.conv2d.default, x(4, 8, 5, 5), x(16, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
    case(aten.conv2d.padding, x(4, 4, 5, 5), x(8, 4, 3, 3), x(8), [1, 1], "same"),
    case(aten.conv3d.default, x(4, 4, 3, 3, 3), x(4, 4, 2, 2, 2), x(4)),
    case(aten.max_pool2d_with_indices.default, x(4, 8, 4, 4), [2, 2]),
    case(aten.max_pool2d.default, x(4, 8, 4, 4), [2, 2]),
    case(aten.avg_pool2d.default, x(4, 8, 4, 4), [2, 2]),
    case(aten.avg_pool1d.default, x(4, 8, 4), [2]),
    case(aten.adaptive_avg_pool2d.default, x(4, 8, 4, 4), [1, 1]),
    case(aten._adaptive_avg_pool2d.default, x(4, 8, 4, 4), [2, 2]),
    case(aten.adaptive_avg_pool1d.default, x(4, 8, 4), [2]),
    case(aten.upsample_nearest2d.default, x(4, 8, 2, 2), [4, 4]),
    case(aten.upsample_bilinear2d.default, x(4, 8, 2, 2), [4, 4], False),
    case(aten.upsample_bicubic2d.default, x(4, 8, 2, 2), [4, 4], False),
]

sdpa = aten.scaled_dot_product_attention.default
ATTENTION: list[Case] = [
    case(sdpa, signed(4, 4, 8, 2), signed(4, 4, 8, 2), signed(4, 4, 8, 2)),
    case(sdpa, signed(4, 4, 8, 2), signed(4, 4, 8, 2), signed(4, 4, 8, 2), None, 0.0, True),
    case(sdpa, *(signed(4, 4, 8, 2) for _ in range(3)), None, 0.0, False, scale=0.3),
    case(sdpa, *(signed(4, 4, 8, 2) for _ in range(3)), x(4, 1, 8, 8)),
    case(sdpa, *(signed(4, 4, 8, 2) for _ in range(3)), torch.ones(8, 8).tril() > 0),
    case(sdpa, *(signed(2, 4, 8, 2) for _ in range(3)), x(4, 8, 8)),
    case(
        sdpa,
        *(signed(4, 8, 4, 2), signed(4, 4, 4, 2), signed(4, 4, 4, 2), None, 0.0, True),
        enable_gqa=True,
    ),
    case(
        sdpa,
        *(signed(2, 8, 4, 2), signed(2, 4, 4, 2), signed(2, 4, 4, 2), x(2, 8, 4, 4), 0.0, False),
        enable_gqa=True,
    ),
    case(
        sdpa,
        *(signed(2, 4, 4, 2), signed(2, 1, 4, 2), signed(2, 1, 4, 2), None, 0.0, True),
        enable_gqa=True,
    ),
    case(sdpa, signed(4, 8, 2), signed(4, 8, 2), signed(4, 8, 2), None, 0.0, True),
    case(sdpa, signed(4, 2, 4, 2), signed(4, 2, 8, 2), signed(4, 2, 8, 4)),
    case(sdpa, signed(2, 2, 4, 2), signed(2, 2, 8, 2), signed(2, 2, 8, 2), None, 0.0, True),
]

CE = aten.cross_entropy_loss.default
TARGET = torch.tensor([1, -100, 3, 0, 2, 3, -100, 1])
CROSS_ENTROPY: list[Case] = [
    *[case(CE, signed(8, 4), TARGET, None, reduction) for reduction in (0, 1, 2)],
    case(CE, signed(8, 4), TARGET, None, 1, -100, 0.1),
    case(CE, signed(8, 4), TARGET, x(4), 1),
    case(CE, signed(8, 4), TARGET.abs() % 4, None, 1, 2),
    case(CE, signed(8, 4), torch.softmax(signed(8, 4), 1), None, 1),
    case(CE, signed(4, 4, 8), ints(4, 8, below=4)),
    case(CE, signed(4), torch.tensor(2)),
    case(aten.nll_loss_nd.default, torch.log_softmax(signed(8, 4), 1), TARGET),
    case(aten.nll_loss_nd.default, torch.log_softmax(signed(8, 4), 1), TARGET, x(4), 2),
]

# Outputs that a graph uses, where it is not all of them.
USED = {"aten.native_group_norm.default": 1}

# What autograd refuses to differentiate: all of an op's tensors, or those arguments.
FROZEN = {
    "aten.floor_divide.default": {"*"},
    "aten.copy.default": {"*"},
    "aten.binary_cross_entropy_with_logits.default": {"pos_weight"},
    "aten.cross_entropy_loss.default": {"weight"},
    "aten.nll_loss_nd.default": {"weight"},
    "aten._native_batch_norm_legit_functional.default": {"running_mean", "running_var"},
    "aten._native_batch_norm_legit_no_training.default": {"running_mean", "running_var"},
}

CASES = [
    *POINTWISE,
    *COMPLEX,
    *REDUCTIONS,
    *ALONG,
    *LOSSES,
    *VIEWS,
    *FACTORIES,
    *LOOKUPS,
    *PRODUCTS,
    *NORMS,
    *IMAGES,
    *ATTENTION,
    *CROSS_ENTROPY,
]


def label(one: Case) -> str:
    func, args, _ = one
    shapes = [str(list(a.shape)) for a in args if isinstance(a, torch.Tensor)]
    return f"{str(func).removeprefix('aten.')}-{'-'.join(shapes)}"


@pytest.mark.parametrize("one", CASES, ids=label)
def test_parts_make_up_the_whole(one: Case) -> None:
    torch.manual_seed(20)
    func, args, kwargs = one
    frozen = frozenset(FROZEN.get(str(func), ()))
    graph, held = graph_of(func, args, kwargs, frozen, USED.get(str(func)))
    values = values_of(graph, held)
    wrong = problems_of(graph, values, lambda op, rule: {letter: (2,) for letter in rule.letters})
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:12])


# -- no family is missed ---------------------------------------------------------------------------

# Families whose values are not defined by their operands, and those that capture rewrites.
UNTRIED = {
    **dict.fromkeys(("empty", "empty_like"), "uninitialised memory"),
    **dict.fromkeys(("rand", "randn", "randint"), "random, and made whole"),
    "native_dropout": "autoplan.dropout after capture, tried above",
    "autoplan.dropout": "tried above",
    **dict.fromkeys(
        ("autoplan.context", "autoplan.exchange", "autoplan.expert_mm"),
        "in the graphs that check/ writes of published runs: priced, never run",
    ),
    "autoplan.grouped_mm": "what capture makes of a sort, tried in test_rules_models.py",
}


def family_of(target: str) -> str:
    return target if target.startswith("autoplan.") else target.split(".")[1]


def test_every_family_of_the_tables_is_tried() -> None:
    """A family that cannot be tried has no business in the tables: take it out, or add a case."""
    tried = set()
    for func, args, kwargs in CASES:
        frozen = frozenset(FROZEN.get(str(func), ()))
        graph, _ = graph_of(func, args, kwargs, frozen)
        tried |= {family_of(op.target) for op in graph.ops} | {family_of(str(func))}
    missed = {*_TABLE, *_POINTWISE, *RESOLVERS} - tried - set(UNTRIED)
    assert not missed, f"families without a case: {sorted(missed)}"
