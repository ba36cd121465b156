# SPDX-License-Identifier: Apache-2.0
"""What an op asks of a device: FLOP and bytes of its forward and backward kernels.

In: an op with the metas of its tensors as one rank holds them. Out: a tuple of `Kernel`, each with
the family whose efficiency applies, so that `compute.py` can turn it into seconds. Table-driven:
one line per group of ATen ops. Bytes count every operand once, as if it came from device memory;
what caches and strides do is left to the measured profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.costs.products import attention_flop, convolution_flop, product_of
from autoplan.costs.saved import input_slots, saved_by
from autoplan.graph import Op, TensorMeta
from autoplan.sharding.rules import contracted_flop
from autoplan.units import DTYPE_BYTES

FAMILIES = ("matmul", "convolution", "attention", "memory", "view")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch, or a group that runs as one, at local shapes.

    Attributes:
        family: One of FAMILIES. A "view" launches nothing.
        flop: Floating-point operations; a multiply-add counts two.
        num_bytes: Bytes read and written in device memory.
        dtype: The dtype whose peak applies: the operands' for products, the result's for "memory".
        shape: (batch, m, n, k) of a "matmul", (keys, elements of a head, causal) of an
            "attention", () otherwise.
    """

    family: str
    flop: float
    num_bytes: float
    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Call:
    op: Op
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    needs_grad: tuple[bool, ...] = ()

    @property
    def out(self) -> TensorMeta:
        return self.outputs[0]

    @property
    def wanted(self) -> tuple[int, ...]:
        return tuple(i for i, needs in enumerate(self.needs_grad) if needs)

    def slot(self, argument: str) -> int | None:
        slots = input_slots(self.op, argument)
        return slots[0] if slots else None

    def saved_bytes(self, wanted: tuple[int, ...]) -> float:
        """Bytes kept by forward that backward reads for the gradients of the inputs `wanted`."""
        needs = tuple(i in wanted for i in range(len(self.inputs)))
        saved = saved_by(self.op, self.inputs, self.outputs, needs)
        kept = [self.inputs[i] for i in saved.inputs] + [self.outputs[i] for i in saved.outputs]
        return sum(t.size_bytes for t in kept) + saved.extra_bytes


_Kernels = tuple[Kernel, ...]
EXCHANGE_KERNELS = 6  # that prepare an exchange of tokens
_Rule = Callable[[_Call], _Kernels]


def forward_kernels(
    op: Op, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]
) -> _Kernels:
    """The kernels of one forward call.

    Args:
        op: The call; its arguments say which input plays which role.
        inputs: Metas of its tensor inputs, local shapes, one per slot.
        outputs: Metas of its tensor outputs, local shapes.

    An op without a row in the table reads its inputs once and writes its outputs once, one FLOP per
    element; if a registered rule sums over a letter, it is a product over all letters.
    """
    row = _row_of(op.target)
    return (row[0] if row else _registered)(_Call(op, inputs, outputs))


def backward_kernels(
    op: Op,
    inputs: tuple[TensorMeta, ...],
    outputs: tuple[TensorMeta, ...],
    needs_grad: tuple[bool, ...],
) -> _Kernels:
    """The kernels of one backward call; () when no input needs a gradient, or none can have one.

    Products and convolutions give one kernel per gradient (data and weight apart). The sum of the
    gradients of a value with several users is not here: it belongs to the value.

    Args:
        op: The call.
        inputs: Metas of its tensor inputs, local shapes, one per slot.
        outputs: Metas of its tensor outputs, local shapes; their gradients have the same.
        needs_grad: One per input slot.
    """
    needs_grad = tuple(needs and meta.is_floating for needs, meta in zip(needs_grad, inputs))
    if not any(needs_grad) or not any(o.is_floating for o in outputs):
        return ()
    row = _row_of(op.target)
    return (row[1] if row else _registered_backward)(_Call(op, inputs, outputs, needs_grad))


def is_known(target: str) -> bool:
    """Whether the table has a row for this target; if not, its cost is one pass over memory."""
    return _row_of(target) is not None


def _row_of(target: str) -> tuple[_Rule, _Rule] | None:
    namespace, _, rest = target.partition(".")
    stem = rest.partition(".")[0]
    return _TABLE.get(stem if namespace == "aten" else f"{namespace}.{stem}")


# -- passes over memory ----------------------------------------------------------------------------


def _memory(num_bytes: float, flop: float, dtype: str) -> Kernel:
    return Kernel("memory", float(flop), float(num_bytes), dtype)


def _no_kernel(meta: TensorMeta) -> Kernel:
    return Kernel("view", 0.0, 0.0, meta.dtype)


def _elements(call: _Call) -> int:
    return max((t.numel for t in (*call.inputs, *call.outputs)), default=0)


def _total(metas: tuple[TensorMeta, ...]) -> int:
    return sum(t.size_bytes for t in metas)


def _stream(call: _Call) -> _Kernels:
    """Reads every input, writes every output."""
    if not call.outputs:
        return ()
    return (_memory(_total(call.inputs) + _total(call.outputs), _elements(call), call.out.dtype),)


def _stream_backward(call: _Call) -> _Kernels:
    """One kernel: reads the output's gradient and what was saved, writes the gradients."""
    written = sum(call.inputs[i].size_bytes for i in call.wanted)
    num_bytes = call.out.size_bytes + call.saved_bytes(call.wanted) + written
    return (_memory(num_bytes, _elements(call), call.out.dtype),)


def _exchange(call: _Call) -> _Kernels:
    """Rows in the order of their owners, behind short kernels that count and sort them: the token
    permutation of Megatron-LM's moe_utils.py and Transformer Engine.
    """
    small = tuple(_memory(0.0, 1.0, call.out.dtype) for _ in range(EXCHANGE_KERNELS))
    return (*_stream(call), *small)


def _reduced(source: TensorMeta, target: TensorMeta) -> Kernel:
    """The sum of a gradient over the dims along which its operand was broadcast."""
    return _memory(source.size_bytes + target.size_bytes, source.numel, source.dtype)


def _pointwise_backward(call: _Call) -> _Kernels:
    """A kernel per operand at the output's size; a broadcast operand's gradient is then summed."""
    kernels = []
    for i in call.wanted:
        num_bytes = 2 * call.out.size_bytes + call.saved_bytes((i,))
        kernels.append(_memory(num_bytes, call.out.numel, call.out.dtype))
        if call.inputs[i].numel < call.out.numel:
            kernels.append(_reduced(call.out, call.inputs[i]))
    return tuple(kernels)


def _pass_backward(call: _Call) -> _Kernels:
    """The gradient goes on as it is: scaled by alpha or a minus, summed for a broadcast operand."""
    kernels = []
    for i in call.wanted:
        alpha = call.op.arguments.get("alpha", 1)
        factor = alpha != 1 or ".sub." in call.op.target or ".rsub." in call.op.target
        subtracted = "self" if ".rsub." in call.op.target else "other"
        if factor and i == call.slot(subtracted):
            kernels.append(_memory(2 * call.out.size_bytes, call.out.numel, call.out.dtype))
        if call.inputs[i].numel < call.out.numel:
            kernels.append(_reduced(call.out, call.inputs[i]))
    return tuple(kernels) or (_no_kernel(call.out),)


def _fill(call: _Call) -> _Kernels:
    """Writes its output; an input, if any, lends its shape only."""
    return (_memory(_total(call.outputs), 0, call.out.dtype),) if call.outputs else ()


def _none(call: _Call) -> _Kernels:
    return ()


# -- views -----------------------------------------------------------------------------------------


def _view(call: _Call) -> _Kernels:
    return (_no_kernel(call.out),) if call.outputs else ()


def _expand_backward(call: _Call) -> _Kernels:
    x = call.inputs[0]
    return (_reduced(call.out, x),) if x.numel < call.out.numel else (_no_kernel(x),)


def _part_backward(call: _Call) -> _Kernels:
    """Of slice and select: zeros of the input's size, then the gradient copied into its place."""
    return (_memory(call.inputs[0].size_bytes + 2 * call.out.size_bytes, 0, call.out.dtype),)


def _parts_backward(call: _Call) -> _Kernels:
    """Of split and unbind: the gradients of all parts concatenated."""
    return (_memory(2 * call.inputs[0].size_bytes, 0, call.out.dtype),)


def _spread_backward(call: _Call) -> _Kernels:
    """Of mean: the gradient, scaled, written over the whole input."""
    x = call.inputs[0]
    return (_memory(call.out.size_bytes + x.size_bytes, call.out.numel, call.out.dtype),)


# -- products --------------------------------------------------------------------------------------


def _matmul(call: _Call) -> _Kernels:
    """2 b m n k FLOP; reads both operands and the addend, writes the product."""
    p = product_of(call.op, call.inputs, call.out)
    if p is None:
        return _stream(call)
    num_bytes = float(_total(call.inputs) + call.out.size_bytes)
    shape = (p.batch, p.m, p.n, p.k)
    return (Kernel("matmul", p.flop, num_bytes, call.inputs[p.left].dtype, shape),)


def _matmul_backward(call: _Call) -> _Kernels:
    """d left = d out * right^T and d right = left^T * d out, each as many FLOP as forward.

    The addend's gradient is a sum. So is an operand's that was broadcast along the batch.
    """
    p = product_of(call.op, call.inputs, call.out)
    if p is None:
        return _stream_backward(call)
    d_right = (p.batch, p.n, p.k, p.m) if p.transposed else (p.batch, p.k, p.n, p.m)
    shapes = {p.left: (p.batch, p.m, p.k, p.n), p.right: d_right}
    kernels = []
    for i in call.wanted:
        meta = call.inputs[i]
        if i not in shapes:
            small = meta.numel < call.out.numel
            kernels.append(_reduced(call.out, meta) if small else _no_kernel(call.out))
            continue
        batch, rows, columns, _ = shapes[i]
        full = TensorMeta((batch, rows, columns), meta.dtype)
        other = call.inputs[p.right if i == p.left else p.left]
        num_bytes = float(call.out.size_bytes + other.size_bytes + full.size_bytes)
        if "grouped_mm" in call.op.target and i == p.right:  # one (k, n) gradient per expert
            full, num_bytes = meta, num_bytes - full.size_bytes + meta.size_bytes
        kernels.append(Kernel("matmul", p.flop, num_bytes, meta.dtype, shapes[i]))
        if meta.numel < full.numel:
            kernels.append(_reduced(full, meta))
    return tuple(kernels)


def _registered(call: _Call) -> _Kernels:
    """Of an op without a row: a pass over memory, or the product that its rule's letters say."""
    flop, passes = contracted_flop(call.op, call.inputs), _stream(call)
    if flop is None or not passes:
        return passes
    n = (1, *call.out.shape)[-1]
    shape = (1, call.out.numel // n, n, max(int(flop) // (2 * call.out.numel), 1))
    return (Kernel("matmul", flop, passes[0].num_bytes, call.inputs[0].dtype, shape),)


def _registered_backward(call: _Call) -> _Kernels:
    """A pass over memory, or a product as large as forward's per gradient."""
    if contracted_flop(call.op, call.inputs) is None:
        return _stream_backward(call)
    return _registered(call) * len(call.wanted)


def _grouped_mm(call: _Call) -> _Kernels:
    """The products, a pass that sorts the rows held here and one that puts the results back."""
    return (*_matmul(call), *_sorting(call))


def _grouped_mm_backward(call: _Call) -> _Kernels:
    """As forward: the gradient is sorted, and the rows' is put back."""
    return (*_matmul_backward(call), *_sorting(call))


def _sorting(call: _Call) -> _Kernels:
    p = product_of(call.op, call.inputs, call.out)
    assert p is not None, "a grouped product has its sizes"
    moved = 2.0 * p.m * (p.k + p.n) * DTYPE_BYTES[call.out.dtype]
    return (_memory(moved + call.out.size_bytes, 0, call.out.dtype),)


# -- convolution and attention ---------------------------------------------------------------------


def _convolution(call: _Call) -> _Kernels:
    num_bytes = float(_total(call.inputs) + call.out.size_bytes)
    return (
        Kernel(
            "convolution",
            convolution_flop(call.op, call.inputs, call.out),
            num_bytes,
            call.inputs[0].dtype,
        ),
    )


def _convolution_backward(call: _Call) -> _Kernels:
    """A convolution each for data and weight, as many FLOP as forward; the bias is a sum."""
    flop, dtype = convolution_flop(call.op, call.inputs, call.out), call.inputs[0].dtype
    both = call.inputs[0].size_bytes + call.inputs[1].size_bytes + call.out.size_bytes
    kernels = []
    for i in call.wanted:
        if i > 1:
            kernels.append(_reduced(call.out, call.inputs[i]))
            continue
        kernels.append(Kernel("convolution", flop, float(both), dtype))
    return tuple(kernels)


def _attention(call: _Call) -> _Kernels:
    """Fused: q, k, v (and mask) in, output and log-sum-exp out; the scores never reach memory."""
    lse_bytes = 4.0 * math.prod(call.inputs[0].shape[:-1])
    num_bytes = _total(call.inputs) + call.out.size_bytes + lse_bytes
    flop = attention_flop(call.op, call.inputs)
    return (Kernel("attention", flop, num_bytes, call.inputs[0].dtype, _attention_shape(call)),)


def _attention_shape(call: _Call) -> tuple[int, ...]:
    query, key = call.inputs[0].shape, call.inputs[1].shape
    return key[-2], query[-1], int(bool(call.op.arguments.get("is_causal")))


def _attention_backward(call: _Call) -> _Kernels:
    """Five products instead of two, one of them the scores again: 2.5 times the forward FLOP.

    Reads q, k, v, mask, output, its gradient and the log-sum-exp; writes the gradients that are
    needed. All come from one kernel, so a gradient that nobody needs saves no FLOP.

    Source: as `attention_flop`, section 4.1.
    """
    lse_bytes = 4.0 * math.prod(call.inputs[0].shape[:-1])
    written = sum(call.inputs[i].size_bytes for i in call.wanted)
    num_bytes = _total(call.inputs) + 2 * call.out.size_bytes + lse_bytes + written
    flop = 2.5 * attention_flop(call.op, call.inputs)
    return (Kernel("attention", flop, num_bytes, call.inputs[0].dtype, _attention_shape(call)),)


# -- lookups, norms, losses ------------------------------------------------------------------------


def _index_bytes(call: _Call) -> int:
    slots = input_slots(call.op, "indices") + input_slots(call.op, "index")
    return sum(call.inputs[i].size_bytes for i in slots)


def _lookup(call: _Call) -> _Kernels:
    """Reads the indices and the rows they name, not the whole table; writes them."""
    return (_memory(2 * call.out.size_bytes + _index_bytes(call), call.out.numel, call.out.dtype),)


def _lookup_backward(call: _Call) -> _Kernels:
    """A dense gradient: zeros of the table's size, then each row added into its place."""
    indices = _index_bytes(call)
    table = sum(call.inputs[i].size_bytes for i in call.wanted)
    return (_memory(table + 3 * call.out.size_bytes + indices, call.out.numel, call.out.dtype),)


def _norm_backward(call: _Call) -> _Kernels:
    """Data, then weight and bias: two kernels, each reading the gradient and what was saved.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu, LayerNormBackwardKernelImplInternal.
    """
    read = call.out.size_bytes + call.saved_bytes(call.wanted)
    numel, dtype = call.inputs[0].numel, call.out.dtype
    groups = [[i for i in call.wanted if i == 0], [i for i in call.wanted if i > 0]]
    written = [sum(call.inputs[i].size_bytes for i in group) for group in groups if group]
    return tuple(_memory(read + size_bytes, numel, dtype) for size_bytes in written)


def _batch_norm(call: _Call) -> _Kernels:
    """In training the input is read twice: statistics first, then the normalisation."""
    x = call.inputs[0]
    once = _total(call.inputs) + call.out.size_bytes
    training = bool(call.op.arguments.get("training", call.op.arguments.get("train", True)))
    training = training and "no_training" not in call.op.target
    return (_memory(once + (x.size_bytes if training else 0), x.numel, call.out.dtype),)


def _batch_norm_backward(call: _Call) -> _Kernels:
    """Reduces gradient and input per channel, then reads both again for the data's gradient."""
    x = call.inputs[0]
    reduce = _memory(call.out.size_bytes + x.size_bytes, x.numel, call.out.dtype)
    apply = _memory(call.out.size_bytes + 2 * x.size_bytes, x.numel, call.out.dtype)
    return (reduce, apply) if 0 in call.wanted else (reduce,)


def _own_dropout(call: _Call) -> _Kernels:
    """Reads the input, writes the output and a bool per element."""
    x = call.inputs[0]
    return (_memory(x.size_bytes + call.out.size_bytes + x.numel, x.numel, call.out.dtype),)


def _cross_entropy(call: _Call) -> _Kernels:
    """log_softmax reads the logits and writes as much; nll_loss reads one value a row."""
    logits = call.inputs[0]
    passes = 0 if call.op.arguments.get("log_probs") or "nll_loss" in call.op.target else 2
    picked = call.inputs[1].numel * DTYPE_BYTES[logits.dtype]
    num_bytes = passes * logits.size_bytes + picked + _total(call.inputs[1:]) + call.out.size_bytes
    return (_memory(num_bytes, logits.numel, logits.dtype),)


def _cross_entropy_backward(call: _Call) -> _Kernels:
    """nll_loss fills zeros with a value a row; log_softmax reads these and its output, writes."""
    logits = call.inputs[0]
    passes = 1 if call.op.arguments.get("log_probs") or "nll_loss" in call.op.target else 4
    num_bytes = passes * logits.size_bytes + _total(call.inputs[1:])
    return (_memory(num_bytes, logits.numel, logits.dtype),)


# -- the table -------------------------------------------------------------------------------------

# One row per group: names of ATen ops, all overloads of each ("mul"), forward rule, backward rule.
_ROWS: tuple[tuple[str, _Rule, _Rule], ...] = (
    ("view reshape view_as reshape_as flatten unflatten alias transpose t mT permute movedim "
     "swapaxes unsqueeze squeeze real imag view_as_real", _view, _view),
    ("detach", _view, _none),
    ("expand expand_as broadcast_to", _view, _expand_backward),
    ("slice select narrow diagonal unfold", _view, _part_backward),
    ("split split_with_sizes chunk unbind unsafe_split unsafe_chunk", _view, _parts_backward),
    ("_assert_tensor_metadata _assert_async", _none, _none),
    ("mm bmm mv dot matmul addmm addmv baddbmm linear einsum transformers.grouped_mm_fallback "
     "autoplan.expert_mm",
     _matmul, _matmul_backward),
    ("autoplan.grouped_mm", _grouped_mm, _grouped_mm_backward),
    ("convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
     _convolution, _convolution_backward),
    ("scaled_dot_product_attention", _attention, _attention_backward),
    ("embedding index autoplan.index index_select gather", _lookup, _lookup_backward),
    ("layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm",
     _stream, _norm_backward),
    ("batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
     "autoplan.batch_norm", _batch_norm, _batch_norm_backward),
    ("autoplan.exchange", _exchange, _stream),
    ("autoplan.context", _none, _none),
    ("autoplan.dropout", _own_dropout, _stream_backward),
    ("cross_entropy_loss nll_loss nll_loss_nd autoplan.cross_entropy autoplan.cross_entropy_sum",
     _cross_entropy, _cross_entropy_backward),
    ("add sub rsub", _stream, _pass_backward),
    # copies and sums: their gradient is a view of the output's
    ("clone contiguous _unsafe_view lift_fresh_copy positive cat stack sum", _stream, _view),
    ("mean", _stream, _spread_backward),
    ("mul div true_divide maximum minimum where masked_fill pow atan2 addcmul lerp prelu",
     _stream, _pointwise_backward),
    ("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty zeros ones "
     "full empty arange scalar_tensor rand randn rand_like randn_like", _fill, _none),
    ("eq ne lt le gt ge isnan isinf isfinite logical_not logical_and logical_or logical_xor any "
     "all bitwise_not bitwise_and bitwise_or __and__ __or__ argmax argmin argsort floor ceil "
     "round sign trunc floor_divide histc bincount one_hot autoplan.cross_entropy_count",
     _stream, _none),
    ("neg tanh sigmoid exp expm1 exp2 sqrt rsqrt reciprocal relu tan softmax _softmax "
     "_safe_softmax log_softmax _log_softmax gelu silu log log1p log2 log10 cos sin abs square "
     "erf softplus relu6 leaky_relu hardtanh hardswish hardsigmoid mish elu selu celu atan asin "
     "acos softshrink glu hardshrink clamp clamp_min clamp_max remainder _to_copy copy fill "
     "native_dropout dropout max min amax amin logsumexp var var_mean std norm linalg_vector_norm "
     "prod cumsum cumprod diff topk sort pad constant_pad_nd repeat repeat_interleave roll flip "
     "tril triu slice_scatter select_scatter scatter scatter_add index_add index_put mse_loss "
     "l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
     "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool2d "
     "adaptive_max_pool2d upsample_nearest1d upsample_nearest2d upsample_bilinear2d pixel_shuffle",
     _stream, _stream_backward),
)  # fmt: skip
_TABLE: dict[str, tuple[_Rule, _Rule]] = {
    name: (forward, backward) for names, forward, backward in _ROWS for name in names.split()
}
