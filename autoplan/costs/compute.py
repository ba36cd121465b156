# SPDX-License-Identifier: Apache-2.0
"""Seconds of one kernel on one device: a roofline whose two roofs are lower for small kernels.

In comes what a kernel does at LOCAL shapes (family, FLOPs, bytes, dtype), as `kernels.py` counts;
out goes a `Cost`. Communication is `collectives.py`, what autograd keeps is `saved.py`.
"""

from __future__ import annotations

from autoplan.cluster import Curve
from autoplan.costs.profile import FAMILIES, NOTHING, Cost, DeviceProfile, require_known


def kernel_time(
    profile: DeviceProfile,
    family: str,
    flop: float,
    num_bytes: float,
    dtype: str,
    shape: tuple[int, ...] = (),
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
        shape: (batch, m, n, k) of a matmul. The curves are over FLOPs, so it does not enter them.

    Returns:
        The seconds; "roofline", or "assumed" where the roof that binds has a guessed parameter.

    Raises:
        ProfileError: The family is unknown.

    Source: Williams, Waterman and Patterson, "Roofline", CACM 2009, with the efficiency by size of
    Isaev et al., "Calculon", SC 2023 (there a table of thresholds) as a curve of two parameters.
    Holds for: large kernels; tile and wave quantisation are not in it.
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
        terms.append((_roof_time(flop, peak, curve), curve.source if stated else "assumed"))
    time_s, source = max(terms, key=lambda term: term[0])
    return Cost(time_s, "assumed" if source == "assumed" else "roofline")


def _roof_time(amount: float, per_s: float, curve: Curve) -> float:
    """amount / (per_s * e(amount)), which is a straight line: (amount + half) / (per_s * share)."""
    return (amount + curve.half) / (per_s * curve.share)
