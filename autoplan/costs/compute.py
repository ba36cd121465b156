# SPDX-License-Identifier: Apache-2.0
"""Seconds of one kernel on one device: a roofline whose two roofs are lower for small kernels.

In comes what a kernel does at LOCAL shapes (family, FLOPs, bytes, dtype), as `kernels.py` counts;
out goes a `Cost`. Where the device says how its kernels cut their work, matmuls and fused attention
go by their shape. Communication is `collectives.py`, what autograd keeps is `saved.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autoplan.cluster import Curve, Tiles
from autoplan.costs.profile import FAMILIES, NOTHING, Cost, DeviceProfile, require_known
from autoplan.units import DTYPE_BYTES

# output tiles that matmul libraries choose from, and parts that they may cut a long k into
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64))
SPLITS = (1, 2, 4, 8, 16, 32)
LEAST_SPLIT = 256  # of k, in one part
MANY_WAVES = 8  # above, the last wave hides among the others' unevenness
NARROW_HEAD = 64


def kernel_time(
    profile: DeviceProfile,
    family: str,
    flop: float,
    num_bytes: float,
    dtype: str,
    shape: tuple[int, ...] = (),
    variant: str = "flash2",
    element_flop_per_s: float | None = None,
) -> Cost:
    """Seconds of one kernel.

        t = max(F / (peak * e_f(F)), bytes / (bandwidth * e_m(bytes)), launch)
        e(x) = share * x / (x + half)

    Rises with `flop` and with `num_bytes`, never falls.

    Args:
        profile: The device.
        family: "matmul", "convolution", "attention", "memory" or "view" (which costs nothing).
        flop: F, floating point operations of one device.
        num_bytes: Bytes read and written in the device's memory.
        dtype: Whose peak applies, "bfloat16".
        shape: (batch, m, n, k) of a matmul: with the device's `tiles`, its first roof is
            `tiled_time`. (keys, elements of a head, 1 under a causal mask) of attention: with the
            device's `flash`, its first roof is that kernel's.
        variant: Which of the device's fused attention kernels runs.
        element_flop_per_s: Rate of a "memory" kernel's arithmetic; None: the peak.

    Returns:
        The seconds; "roofline", or "assumed" where the roof that binds has a guessed parameter.

    Raises:
        ProfileError: The family is unknown.

    Source: Williams, Waterman and Patterson, "Roofline", CACM 2009, with the efficiency by size of
    Isaev et al., "Calculon", SC 2023 (there a table of thresholds) as a curve of two parameters.
    """
    require_known(family, FAMILIES, "kernel family")
    if family == "view":
        return NOTHING
    terms = [(profile.launch_s, profile.launch_source)]
    if num_bytes > 0:
        memory = profile.curves["memory"]
        terms.append((_roof_time(num_bytes, profile.bytes_per_s, memory), memory.source))
    if flop > 0:
        # For elementwise arithmetic the memory curve says nothing: its FLOPs run at the peak.
        curve = profile.curves[family] if family != "memory" else Curve(source="roofline")
        peak, stated = profile.peak(dtype)
        if family == "memory" and element_flop_per_s is not None:
            peak, stated = element_flop_per_s, True
        if family == "matmul" and shape and profile.tiles is not None:
            rate = peak * curve.share
            moved = profile.bytes_per_s * profile.curves["memory"].share
            time_s = tiled_time(profile.tiles, rate, moved, DTYPE_BYTES[dtype], *shape)
            time_s += profile.launch_s
        elif family == "attention" and shape and variant in profile.flash:
            kernel = profile.flash[variant]
            keys, width, causal = shape
            half = kernel.causal_half if causal else kernel.half
            share = kernel.share * (kernel.narrow if width <= NARROW_HEAD else 1.0)
            time_s = flop * (1.0 + half / keys) / (peak * share)
        else:
            time_s = _roof_time(flop, peak, curve)
            if family == "matmul":
                time_s += num_bytes / profile.packing_bytes_per_s
        terms.append((time_s, curve.source if stated else "assumed"))
    time_s, source = max(terms, key=lambda term: term[0])
    return Cost(time_s, "assumed" if source == "assumed" else "roofline")


def best_share(profile: DeviceProfile) -> float:
    """The share of a peak that no kernel's FLOPs pass: for bounds."""
    matmul = profile.curves["matmul"].share
    if profile.tiles is not None:
        h = max(a * b / (a + b) for a, b in TILES)
        matmul *= h / (h + profile.tiles.side)
    others = (profile.curves[family].share for family in ("convolution", "attention"))
    return max(matmul, *others, *(kernel.share for kernel in profile.flash.values()))


@lru_cache(maxsize=1 << 16)
def tiled_time(
    tiles: Tiles,
    flop_per_s: float,
    bytes_per_s: float,
    width: int,
    batch: int,
    m: int,
    n: int,
    k: int,
) -> float:
    """Seconds of a product by the best of a library's tilings, without its launch.

        t = waves * 2 a b (k / s + lead) / (rate / units * e),     e = h / (h + side)

    with output tiles of a by b, h = a b / (a + b), k cut in s parts, and waves the rounds that
    batch * ceil(m / a) * ceil(n / b) * s tiles take on the device's units; not faster than the
    bytes of operands, result and (where k is cut) float32 partial sums.

    Args:
        tiles: The device's.
        flop_per_s: Rate of the whole device at a perfect tiling.
        bytes_per_s: Bandwidth reached.
        width: Bytes of an element.
        batch, m, n, k: Of the product.

    Source: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization);
    Osama et al., "Stream-K", PPoPP 2023.
    """
    operands = width * batch * (m * k + n * k)
    results = batch * m * n
    best = math.inf
    for a, b in TILES:
        h = a * b / (a + b)
        per_unit = flop_per_s / tiles.units * h / (h + tiles.side)
        grid = batch * -(-m // a) * -(-n // b)
        for parts in SPLITS:
            if parts > 1 and (k < parts * LEAST_SPLIT or grid * parts > 4 * tiles.units):
                break
            waves = grid * parts / tiles.units
            waves = float(math.ceil(waves)) if waves < MANY_WAVES else waves + 0.5
            work_s = waves * 2.0 * a * b * (math.ceil(k / parts) + tiles.lead) / per_unit
            written = float(results * max(width, 2))
            if parts > 1:
                written += results * 8.0 * parts
            best = min(best, max(work_s, (operands + written) / bytes_per_s))
    return best


def _roof_time(amount: float, per_s: float, curve: Curve) -> float:
    """amount / (per_s * e(amount)), which is a straight line: (amount + half) / (per_s * share)."""
    return (amount + curve.half) / (per_s * curve.share)
