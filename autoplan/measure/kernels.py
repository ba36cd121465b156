# SPDX-License-Identifier: Apache-2.0
"""The device alone: products, attention, passes over memory and elementwise arithmetic, forward and
backward, with the host's part taken off.

Every process of the launch measures at the same time, as they will compute at the same time. Out
comes what a device document says of kernels (`write.py`), and lines for the report. What the host's
Python costs is `host.py`, what links cost `links.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from autoplan.costs.kernels import Kernel, backward_kernels, forward_kernels
from autoplan.graph import Op, TensorMeta
from autoplan.measure.clock import Row, Timing, summarize, time_call
from autoplan.measure.fit import Line, fit_line, fit_terms
from autoplan.measure.host import HostTimings

Tensor = torch.Tensor
ATEN = torch.ops.aten
DTYPES = ("float32", "bfloat16", "float16", "float64")

# (m, k, n) of products, (batch, heads, tokens, width) of attention; the second of each pair is what
# --quick leaves out
PRODUCTS = (
    (
        (64, 64, 64),
        (16, 256, 1024),
        (64, 1024, 256),
        (32, 768, 3072),
        (256, 256, 1024),
        (256, 768, 3072),
    ),
    ((128, 128, 128), (16, 1024, 1024), (1024, 256, 512), (1024, 1024, 1024), (4096, 1024, 1024)),
)
ATTENTION = (
    ((4, 4, 32, 16), (16, 8, 64, 16), (4, 8, 64, 48), (2, 8, 256, 64)),
    ((8, 8, 128, 32), (1, 8, 1024, 64)),
)
# elements of each operand of an addition, more than a core's own caches hold
STREAMED = ((1 << 20, 1 << 21), (1 << 22, 1 << 23))
ELEMENTS = 1 << 19  # at which elementwise arithmetic is timed
GPU_SCALE = 8  # a GPU's products are so many times longer in every dim


def _unary(op: Callable[..., Tensor], *more: object) -> Callable[[Tensor], Tensor]:
    return lambda x: op(x, *more)


# ops as a model's graph names them; arguments that `kernels.py` reads are none of these
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _unary(ATEN.gelu.default),
    "tanh": _unary(ATEN.tanh.default),
    "silu": _unary(ATEN.silu.default),
    "sigmoid": _unary(ATEN.sigmoid.default),
    "relu": _unary(ATEN.relu.default),
    "exp": _unary(ATEN.exp.default),
    "pow": _unary(ATEN.pow.Tensor_Scalar, 2),
    "rsqrt": lambda x: ATEN.rsqrt.default(x),
    "softmax": _unary(ATEN.softmax.int, -1),
    "mul": lambda x: ATEN.mul.Tensor(x, x.detach()),
    "layer_norm": lambda x: ATEN.layer_norm.default(x, [x.shape[-1]]),
    "clone": lambda x: ATEN.clone.default(x.transpose(0, 1), memory_format=torch.contiguous_format),
    "cat": lambda x: ATEN.cat.default([x, x.detach()], -1),
    "mse_loss": lambda x: ATEN.mse_loss.default(x, x.detach()),
}
UPDATED = 1 << 20  # elements of the parameter whose update is timed
WIDTH = 256  # of the last dim of elementwise operands


@dataclass
class DeviceTimings:
    """What was measured of a device.

    Attributes:
        peaks: By dtype, FLOP/s of long products.
        product, attention: Lines over FLOP in float32.
        packing_bytes_per_s: Of a product's operands and result, beside its arithmetic.
        update_factor: Bytes of AdamW's update over those of one fused kernel.
        memory: Line over bytes.
        elementwise: Op -> FLOP/s forward and backward.
        launch_s: Of the shortest kernel, the host's part taken off.
        rows: For the report.
    """

    peaks: dict[str, float]
    product: Line
    packing_bytes_per_s: float
    update_factor: float
    attention: Line
    memory: Line
    elementwise: dict[str, tuple[float, float]]
    launch_s: float
    rows: list[Row] = field(default_factory=list)


class _Meter:
    """Times ops forward and backward on one device, less what the host takes."""

    def __init__(self, device: torch.device, batch_s: float, host: HostTimings) -> None:
        self.device, self.batch_s, self.host = device, batch_s, host
        self.timings: list[Timing] = []

    def randn(self, *shape: int, dtype: str = "float32") -> Tensor:
        x = torch.randn(*shape, device=self.device).to(getattr(torch, dtype))
        return x.requires_grad_()

    def forward_s(self, call: Callable[[], object], num_ops: int = 1) -> float:
        timing = time_call(call, self.device, self.batch_s)
        self.timings.append(timing)
        return max(timing.best_s - num_ops * self.host.op.forward_s, 0.02 * timing.best_s)

    def backward_s(self, out: Tensor, inputs: list[Tensor], num_ops: int = 1) -> float:
        gradient = torch.ones_like(out)
        timing = time_call(
            lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True),
            self.device,
            self.batch_s,
        )
        self.timings.append(timing)
        host_s = self.host.engine_s + num_ops * self.host.op.backward_s
        return max(timing.best_s - host_s, 0.02 * timing.best_s)

    def row(self, what: str) -> Row:
        """The timings since the last row."""
        taken, self.timings = self.timings, []
        return summarize(what, taken)


def measure_device(
    device: torch.device, host: HostTimings, *, quick: bool, batch_s: float = 0.02
) -> DeviceTimings:
    """Times the device's kernels.

    Args:
        device: CPU or CUDA.
        host: What to take off.
        quick: Fewer points.
        batch_s: Device seconds of each of the batches of a point.
    """
    meter, rows = _Meter(device, batch_s, host), []
    scale = GPU_SCALE if device.type == "cuda" else 1
    product, packing = _products(meter, _chosen(PRODUCTS, quick), scale)
    rows.append(meter.row("matmul"))
    peaks = _peaks(meter, product, scale)
    rows.append(meter.row(f"matmul in {', '.join(peaks)}"))
    attention = _attention(meter, _chosen(ATTENTION, quick))
    rows.append(meter.row("attention"))
    memory = _memory(meter, _chosen(STREAMED, quick), scale * scale)
    rows.append(meter.row("passes over memory"))
    factor = _update(meter, memory)
    rows.append(meter.row("AdamW of a large parameter"))
    elementwise = {}
    if device.type == "cpu":  # on a GPU the memory binds them
        elementwise = _elementwise(meter)
        rows.append(meter.row("elementwise arithmetic"))
    shortest = meter.randn(1)
    launch_s = meter.forward_s(lambda: ATEN.add.Tensor(shortest, shortest))
    rows.append(meter.row("shortest kernel"))
    return DeviceTimings(
        peaks, product, packing, factor, attention, memory, elementwise, launch_s, rows
    )


def _chosen(
    choice: tuple[tuple[object, ...], tuple[object, ...]], quick: bool
) -> tuple[object, ...]:
    return choice[0] if quick else choice[0] + choice[1]


def _products(meter: _Meter, shapes: tuple[object, ...], scale: int) -> tuple[Line, float]:
    """A line over FLOP, and bytes per second of what adds to it by operands and result."""
    rows, times = [], []
    for shape in shapes:
        m, k, n = (int(size) * scale for size in shape)  # type: ignore[attr-defined]
        x, w = meter.randn(m, k), meter.randn(n, k)
        row = 1.0, 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)
        out = ATEN.linear.default(x, w)
        rows += [row, row]
        times.append(meter.forward_s(partial(ATEN.linear.default, x, w)))
        times.append(meter.backward_s(out, [x, w]) / 2)
    if meter.device.type == "cuda":  # there the memory works while the products do
        return fit_line([(row[1], t) for row, t in zip(rows, times)]), math.inf
    (fixed_s, per_flop, per_byte), error = fit_terms(rows, times)
    return Line(fixed_s, 1.0 / per_flop, error), 1.0 / per_byte if per_byte else math.inf


def _peaks(meter: _Meter, product: Line, scale: int) -> dict[str, float]:
    """FLOP/s by dtype: float32's by the fit, the others' as many times as one product is faster."""
    size = 256 * scale
    times = {}
    for dtype in DTYPES:
        x, w = meter.randn(size, size, dtype=dtype), meter.randn(size, size, dtype=dtype)
        times[dtype] = meter.forward_s(partial(ATEN.linear.default, x, w))
    return {dtype: product.rate * times["float32"] / t for dtype, t in times.items()}


def _attention(meter: _Meter, shapes: tuple[object, ...]) -> Line:
    points = []
    for shape in shapes:
        batch, heads, tokens, width = (int(size) for size in shape)  # type: ignore[attr-defined]
        q, k, v = (meter.randn(batch, heads, tokens, width) for _ in range(3))

        call = partial(ATEN.scaled_dot_product_attention.default, q, k, v, None, 0.0, True)
        flop = 2.0 * batch * heads * tokens * tokens * width
        points.append((flop, meter.forward_s(call)))
        points.append((2.5 * flop, meter.backward_s(call(), [q, k, v])))
    return fit_line(points)


def _memory(meter: _Meter, counts: tuple[object, ...], scale: int) -> Line:
    points = []
    for count in counts:
        x, y = (torch.ones(int(count) * scale, device=meter.device) for _ in range(2))  # type: ignore[call-overload]
        points.append((12.0 * x.numel(), meter.forward_s(partial(ATEN.add.Tensor, x, y))))
    return fit_line(points)


def _update(meter: _Meter, memory: Line) -> float:
    """Bytes that AdamW's update moves over those of a fused one, which reads four tensors and
    writes three.
    """
    parameter = torch.nn.Parameter(torch.ones(UPDATED, device=meter.device))
    parameter.grad = torch.ones_like(parameter)
    small = torch.nn.Parameter(torch.ones(1, device=meter.device))
    small.grad = torch.ones_like(small)
    times = [
        time_call(torch.optim.AdamW([p]).step, meter.device, meter.batch_s)
        for p in (parameter, small)
    ]
    meter.timings.append(times[0])
    moved = (times[0].best_s - times[1].best_s) * memory.rate
    return max(1.0, moved / (7.0 * 4.0 * UPDATED))


def _elementwise(meter: _Meter) -> dict[str, tuple[float, float]]:
    """FLOP/s of each op's arithmetic, counted as `costs/kernels.py` counts."""
    found = {}
    for stem, call in ELEMENTWISE.items():
        x = meter.randn(ELEMENTS // WIDTH, WIDTH)
        ahead_s = meter.forward_s(partial(call, x))
        out = call(x)
        back_s = meter.backward_s(out, [x])
        ahead, back = _flop(stem, x, out)
        found[stem] = (ahead / ahead_s, (back or ahead) / back_s)
    return found


def _flop(stem: str, x: Tensor, out: Tensor) -> tuple[float, float]:
    two = stem in ("mul", "cat", "mse_loss")
    metas = [TensorMeta(tuple(t.shape), "float32") for t in ((x, x) if two else (x,))]
    names = tuple(f"x{i}" for i in range(len(metas)))
    arguments = {"normalized_shape": (WIDTH,)} if stem == "layer_norm" else {}
    op = Op(stem, f"aten.{stem}.default", names, ("y",), arguments)
    made = (TensorMeta(tuple(out.shape), "float32"),)
    needs = tuple(i == 0 for i in range(len(metas)))

    def total(kernels: tuple[Kernel, ...]) -> float:
        return sum(kernel.flop for kernel in kernels)

    forward = total(forward_kernels(op, tuple(metas), made))
    return forward, total(backward_kernels(op, tuple(metas), made, needs))
