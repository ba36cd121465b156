# SPDX-License-Identifier: Apache-2.0
"""What autograd keeps from an op's forward pass until its backward pass.

In: an op with the metas of its tensors (local shapes) and which of its inputs need a gradient. Out:
which inputs and outputs stay alive, how many bytes beside them, and whether the output is a view of
an input. The table is what the derivative formulas of PyTorch 2.13
(tools/autograd/derivatives.yaml) hold on to, checked by running every op in
tests/costs/test_saved.py. Where the CPU's and CUDA's kernels differ, CUDA's is meant. How long the
tensors live is not here; nor are parameters told from activations: the caller knows which input is
which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.graph import Op, Ref, TensorMeta
from autoplan.units import DTYPE_BYTES

_LSE_ALIGNMENT = (
    32  # rows; kAlignLSE of PyTorch's memory-efficient attention (CUTLASS FMHA, kernel_forward.h)
)
_INDEX_BYTES = 8  # int64, which max pooling keeps per output element


@dataclass(frozen=True, slots=True)
class Saved:
    """What one op leaves alive for its backward pass.

    Attributes:
        inputs: Input slots whose tensors are kept.
        outputs: Positions of the outputs that are kept.
        extra_bytes: Bytes of kept tensors that are neither: masks, log-sum-exp, statistics, pooling
            indices.
        alias_of: Input slot whose storage the outputs share (a view), else None. Holds with or
            without gradients.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra_bytes: float = 0.0
    alias_of: int | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    op: Op
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    needs_grad: tuple[bool, ...]

    def needs(self, argument: str) -> bool:
        return any(self.needs_grad[i] for i in input_slots(self.op, argument))


_Rule = Callable[[_Call], Saved]


def saved_by(
    op: Op,
    inputs: tuple[TensorMeta, ...],
    outputs: tuple[TensorMeta, ...],
    needs_grad: tuple[bool, ...],
) -> Saved:
    """What autograd keeps of one call; nothing when no input needs a gradient.

    Args:
        op: The call. Its arguments say which input slot plays which role.
        inputs: Metas of its tensor inputs, local shapes, one per slot.
        outputs: Metas of its tensor outputs, local shapes. Missing trailing ones (masks, statistics
            that nobody reads)
            are counted in `extra_bytes`.
        needs_grad: One per input slot.

    Source: derivatives.yaml and the autograd code generated from it, PyTorch 2.13: a tensor that
    only the gradient of one operand reads is kept only if that operand needs one. An op without a
    row keeps all inputs and outputs: more than is true, never less; `is_exact` tells.
    """
    rule = _rule_of(op.target)
    call = _Call(op, inputs, outputs, needs_grad)
    if any(needs_grad):
        return _keep_all(call) if rule is None else rule(call)
    if rule is None:
        return Saved()
    return Saved(alias_of=rule(call).alias_of)


def is_exact(target: str) -> bool:
    """Whether the table has a row for this target; if not, `saved_by` overestimates."""
    return _rule_of(target) is not None


def input_slots(op: Op, argument: str) -> tuple[int, ...]:
    """The input slots that one argument of the schema stands for.

    None for a number or an absent tensor, one for a tensor, several for a list of tensors.
    """
    value = op.arguments.get(argument)
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(v.index for v in values if isinstance(v, Ref))


def _rule_of(target: str) -> _Rule | None:
    namespace, _, rest = target.partition(".")
    stem = rest.partition(".")[0]
    for key in (target, f"{namespace}.{stem}" if namespace != "aten" else stem):
        if key in _TABLE:
            return _TABLE[key]
    return None


# -- rules: what a row of the table can say --------------------------------------------------------


def _keep(*items: str) -> _Rule:
    """A rule from texts.

    "x" keeps argument x, "x<y,z" keeps x if y or z needs a gradient, "out0" keeps output 0.
    """

    def rule(call: _Call) -> Saved:
        slots: set[int] = set()
        outs: set[int] = set()
        for item in items:
            name, _, condition = item.partition("<")
            if name.startswith("out") and name[3:].isdigit():
                outs.add(int(name[3:]))
            elif not condition or any(call.needs(who) for who in condition.split(",")):
                slots.update(input_slots(call.op, name))
        return _saved(call, slots, outs)

    return rule


def _saved(call: _Call, slots: set[int], outs: set[int], extra_bytes: float = 0.0) -> Saved:
    return Saved(tuple(sorted(slots)), tuple(sorted(outs)), extra_bytes)


def _nothing(call: _Call) -> Saved:
    return Saved()


def _keep_all(call: _Call) -> Saved:
    return Saved(tuple(range(len(call.inputs))), tuple(range(len(call.outputs))))


def _view(call: _Call) -> Saved:
    return Saved(alias_of=0)


def _side_output(call: _Call, position: int, size_bytes: float) -> tuple[set[int], float]:
    """An output beside the result: kept by position if it has a name, else counted as bytes."""
    names = call.op.outputs
    if position < len(call.outputs) and position < len(names) and names[position]:
        return {position}, 0.0
    return set(), size_bytes


def _statistic_bytes(dtype: str) -> int:
    """Bytes of one mean or rstd: CUDA keeps float32, and float64 for float64 (at::acc_type)."""
    return 8 if dtype == "float64" else 4


def _dropout(call: _Call) -> Saved:
    """The mask, one bool per element: native_dropout's second output on CUDA (fused dropout).

    aten.dropout on the CPU keeps a mask of the input's own dtype instead; where it does nothing it
    returns its input.
    """
    given = call.op.arguments
    if call.op.target.startswith("aten.dropout") and not (given.get("train") and given.get("p")):
        return Saved(alias_of=0)
    outs, extra = _side_output(call, 1, float(call.inputs[0].numel))
    return _saved(call, set(), outs, extra)


def _layer_norm(call: _Call) -> Saved:
    """Input, weight, bias, and mean and rstd per row."""
    x = call.inputs[0]
    shape = call.op.arguments.get("normalized_shape")
    rows = x.numel // _product_of(shape) if x.numel else 0
    slots = {i for name in ("input", "weight", "bias") for i in input_slots(call.op, name)}
    outs, extra = _statistics(call, (1, 2), rows)
    return _saved(call, slots, outs, extra)


def _rms_norm(call: _Call) -> Saved:
    """Input, weight and rstd per row: CUDA's fused kernel, _fused_rms_norm; the CPU decomposes."""
    x = call.inputs[0]
    rows = x.numel // _product_of(call.op.arguments.get("normalized_shape")) if x.numel else 0
    slots = {i for name in ("input", "weight") for i in input_slots(call.op, name)}
    outs, extra = _statistics(call, (1,), rows)
    return _saved(call, slots, outs, extra)


def _group_norm(call: _Call) -> Saved:
    """Input, weight, and mean and rstd per sample and group."""
    x = call.inputs[0]
    groups = call.op.arguments.get("num_groups", call.op.arguments.get("group", 1))
    assert isinstance(groups, int), "the number of groups is an int"
    slots = {i for name in ("input", "weight") for i in input_slots(call.op, name)}
    outs, extra = _statistics(call, (1, 2), x.shape[0] * groups)
    return _saved(call, slots, outs, extra)


def _batch_norm(call: _Call) -> Saved:
    """Input, weight, running statistics, and in training mean and inverse deviation per channel.

    The running statistics are buffers, which live anyway. `autoplan.batch_norm` gives the new ones
    as outputs 1 and 2, so its batch statistics are always extra, and it does not hold the old ones.
    """
    own = call.op.target.startswith("autoplan.")
    given = call.op.arguments
    training = bool(given.get("training", given.get("train", True)))
    names = ("input", "weight") if own else ("input", "weight", "running_mean", "running_var")
    slots = {i for name in names for i in input_slots(call.op, name)}
    x = call.inputs[0]
    channels = x.shape[1] if training and "no_training" not in call.op.target else 0
    if own:
        return _saved(call, slots, set(), 2.0 * channels * _statistic_bytes(x.dtype))
    outs, extra = _statistics(call, (1, 2), channels)
    return _saved(call, slots, outs, extra)


def _statistics(call: _Call, positions: tuple[int, ...], rows: int) -> tuple[set[int], float]:
    outs: set[int] = set()
    extra = 0.0
    for position in positions:
        kept, size_bytes = _side_output(
            call, position, float(rows * _statistic_bytes(call.inputs[0].dtype))
        )
        outs |= kept
        extra += size_bytes
    return outs, extra


def _product_of(shape: object) -> int:
    assert isinstance(shape, tuple | list), "normalized_shape is a list of sizes"
    return math.prod(int(s) for s in shape) or 1


def _cross_entropy(call: _Call) -> Saved:
    """Log-probabilities (the logits' size), target, class weights, and the total weight (a scalar).

    cross_entropy = nll_loss(log_softmax(logits)); with label smoothing also a bool mask of ignored
    targets, and the count or weight that the mean divides by. `log_probs` (autoplan's) says that
    the input already is log_softmax's output.
    """
    logits = call.inputs[0]
    given = call.op.arguments
    target = input_slots(call.op, "target")
    item = DTYPE_BYTES[logits.dtype]
    if call.inputs[
        target[0]
    ].is_floating:  # probabilities: -(log_softmax * target).sum(), no nll_loss
        slots = set(target) if call.needs_grad[0] else set()
        return _saved(call, slots, set(), float(logits.size_bytes))
    slots = {*target, *input_slots(call.op, "weight")}
    extra = float(item)
    if given.get("log_probs") or "nll_loss" in call.op.target:
        slots.add(0)
    else:
        extra += logits.size_bytes
    if given.get("label_smoothing"):
        extra += call.inputs[target[0]].numel
        if given.get("reduction", 2) == 1:  # Reduction.Mean; autoplan's own ops are sums
            extra += item if input_slots(call.op, "weight") else _INDEX_BYTES
    return _saved(call, slots, set(), extra)


def _max_pool(call: _Call) -> Saved:
    """Input and the int64 index of each maximum."""
    outs, extra = _side_output(call, 1, float(call.outputs[0].numel * _INDEX_BYTES))
    return _saved(call, {0}, outs, extra)


def _indices(call: _Call) -> Saved:
    """The int64 index of each value that was picked, the second output."""
    outs, extra = _side_output(call, 1, float(call.outputs[0].numel * _INDEX_BYTES))
    return _saved(call, set(), outs, extra)


def _adaptive_avg_pool(call: _Call) -> Saved:
    """The input; nothing for an output of one pixel, which PyTorch computes as a mean."""
    spatial = call.outputs[0].shape[-2:]
    is_mean = call.op.target.startswith("aten.adaptive_avg_pool2d") and spatial == (1, 1)
    return Saved() if is_mean else Saved(inputs=(0,))


def _attention(call: _Call) -> Saved:
    """q, k, v, mask, output, and the softmax's log-sum-exp in float32, one per query row and head.

    Flash attention (float16, bfloat16, no mask) keeps (batch, heads, queries) of them; memory-
    efficient attention, which CUDA takes otherwise, rounds queries up to 32. A bool mask is first
    turned into one of the query's dtype (convert_boolean_attn_mask). The CPU's flash attention
    never rounds. 24 bytes of random state are left out.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu; Dao, "FlashAttention-2", 2023,
    section 3.1.
    """
    query = call.inputs[0]
    mask = input_slots(call.op, "attn_mask")
    rows = query.shape[-2]
    if mask or query.dtype not in ("float16", "bfloat16"):
        rows = math.ceil(rows / _LSE_ALIGNMENT) * _LSE_ALIGNMENT
    extra = 4.0 * math.prod(query.shape[:-2]) * rows
    slots = {0, 1, 2}
    if mask and call.inputs[mask[0]].dtype == "bool":
        extra += call.inputs[mask[0]].numel * DTYPE_BYTES[query.dtype]
    else:
        slots.update(mask)
    return _saved(call, slots, {0}, extra)


def _einsum(call: _Call) -> Saved:
    """Each operand if another one needs a gradient: einsum ends in bmm."""
    needing = [i for i, needs in enumerate(call.needs_grad) if needs]
    return _saved(call, {i for i in range(len(call.inputs)) if any(n != i for n in needing)}, set())


def _grouped_mm(call: _Call) -> Saved:
    """The rows of the groups held here, sorted by group, and where each of them was (int64, once to
    sort and once to put back); the matrices for the rows' gradient.
    """
    x, weight = call.inputs[0], call.inputs[1]
    groups = call.op.arguments["num_groups"]
    assert isinstance(groups, int), "the number of groups is an int"
    rows = x.shape[0] * weight.shape[0] / groups
    extra = rows * 2 * _INDEX_BYTES
    extra += rows * x.shape[1] * DTYPE_BYTES[x.dtype] if call.needs("weight") else 0.0
    return _saved(call, {1} if call.needs("input") else set(), set(), extra)


def _l1_loss(call: _Call) -> Saved:
    """The difference of the operands, whose sign is the gradient."""
    return Saved(extra_bytes=float(max(x.size_bytes for x in call.inputs)))


# -- the table -------------------------------------------------------------------------------------
# One line per group: names of ATen ops ("mul" holds for all overloads, "aten.max.dim" for one), and
# their rule.

_ROWS: tuple[tuple[str, _Rule], ...] = (
    # views share storage and keep nothing; a reshape that must copy is counted as a view too,
    # because metas have no strides: its source then dies and its copy lives, so the sum is the same
    ("view _unsafe_view reshape view_as reshape_as flatten unflatten alias expand expand_as "
     "broadcast_to transpose t mT permute movedim unsqueeze squeeze slice select narrow split "
     "split_with_sizes chunk unsafe_split unsafe_chunk unbind diagonal unfold detach swapaxes",
     _view),
    # linear in their operands, or without a gradient
    ("add sub rsub neg positive sum mean cumsum cat stack clone _to_copy contiguous copy fill "
     "lift_fresh_copy pad constant_pad_nd repeat repeat_interleave roll flip tril triu diff "
     "slice_scatter select_scatter upsample_nearest1d upsample_nearest2d upsample_bilinear2d "
     "pixel_shuffle lerp remainder floor ceil round trunc sign floor_divide zeros_like ones_like "
     "full_like empty_like new_zeros new_ones new_full new_empty zeros ones full empty arange eq "
     "ne lt le gt ge isnan isinf isfinite logical_not logical_and logical_or logical_xor "
     "bitwise_not bitwise_and bitwise_or __and__ __or__ any all argmax argmin argsort histc "
     "bincount one_hot bucketize searchsorted rand_like randn_like rand randn scalar_tensor "
     "_assert_tensor_metadata _assert_async autoplan.cross_entropy_count", _nothing),
    # products: an operand is kept for the other's gradient
    ("mul outer", _keep("self<other,vec2", "other<self", "vec2<self")),
    ("div true_divide", _keep("self<other", "other")),
    ("mm bmm mv dot", _keep("self<mat2,vec,tensor", "mat2<self", "vec<self", "tensor<self")),
    ("matmul", _keep("self<other", "other<self")),
    ("addmm", _keep("mat1<mat2", "mat2<mat1")),
    ("baddbmm", _keep("batch1<batch2", "batch2<batch1")),
    ("addmv", _keep("mat<vec", "vec<mat")),
    ("addcmul", _keep("tensor1<tensor2", "tensor2<tensor1")),
    ("linear", _keep("input<weight", "weight<input")),
    ("bilinear", _keep("input1<input2,weight", "input2<input1,weight", "weight<input1,input2")),
    ("einsum", _einsum),
    # offs rides on ctx: a few integers
    ("transformers.grouped_mm_fallback autoplan.expert_mm", _keep("input", "weight")),
    ("autoplan.grouped_mm", _grouped_mm),
    ("autoplan.exchange autoplan.context", _nothing),
    # convolution_backward takes all of them, whatever is needed
    ("convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
     _keep("input", "weight")),
    # elementwise, by their result or by their argument
    ("tanh sigmoid exp expm1 exp2 sqrt rsqrt reciprocal relu tan softmax _softmax _safe_softmax "
     "log_softmax _log_softmax", _keep("out0")),
    ("gelu silu log log1p log2 log10 cos sin abs square erf softplus leaky_relu hardtanh "
     "hardswish hardsigmoid mish elu selu celu relu6 atan asin acos softshrink hardshrink "
     "clamp_min clamp_max glu var var_mean avg_pool1d avg_pool2d _adaptive_avg_pool2d",
     _keep("self")),
    ("clamp", _keep("self", "min", "max")),
    ("aten.pow.Tensor_Scalar", _keep("self")),
    ("aten.pow.Scalar", _keep("exponent", "out0")),
    ("aten.pow.Tensor_Tensor", _keep("self", "exponent", "out0")),
    ("logsumexp amax amin std linalg_vector_norm cumprod prod aten.max.default aten.min.default",
     _keep("self", "out0")),
    ("maximum minimum atan2 aten.max.other aten.min.other", _keep("self", "other")),
    ("prelu", _keep("self", "weight")),
    ("where", _keep("condition")),
    ("masked_fill", _keep("mask")),
    ("mse_loss smooth_l1_loss huber_loss binary_cross_entropy", _keep("self", "target", "weight")),
    ("binary_cross_entropy_with_logits", _keep("self", "target", "weight", "pos_weight")),
    ("l1_loss", _l1_loss),
    # lookups keep where they looked
    ("embedding index autoplan.index index_put", _keep("indices")),
    ("gather", _keep("self", "index")),
    ("index_select scatter", _keep("index")),
    ("scatter_add", _keep("index<src")),
    ("index_add", _keep("index<source", "source<source")),
    ("topk sort aten.max.dim aten.min.dim", _indices),
    # kernels that keep something of their own
    ("native_dropout dropout autoplan.dropout", _dropout),
    ("layer_norm native_layer_norm", _layer_norm),
    ("rms_norm _fused_rms_norm", _rms_norm),
    ("group_norm native_group_norm", _group_norm),
    ("batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
     "autoplan.batch_norm", _batch_norm),
    ("cross_entropy_loss nll_loss nll_loss_nd autoplan.cross_entropy autoplan.cross_entropy_sum",
     _cross_entropy),
    ("max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d", _max_pool),
    ("adaptive_avg_pool2d", _adaptive_avg_pool),
    ("scaled_dot_product_attention", _attention),
)  # fmt: skip
_TABLE: dict[str, _Rule] = {name: rule for names, rule in _ROWS for name in names.split()}
