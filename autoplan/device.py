# SPDX-License-Identifier: Apache-2.0
"""One device: memory, peaks, and how close its kernels come to them. The cluster's first noun.

All is SI. What a number is worth in seconds is said in `costs/compute.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autoplan.errors import ClusterError
from autoplan.units import FLOATING


def require(condition: bool, wrong: str, expected: str) -> None:
    """Raises ClusterError, with what is wrong and what was expected, unless it holds."""
    if not condition:
        raise ClusterError(f"{wrong}: expected {expected}. Correct the cluster description.")


def rounded(value: float) -> float:
    """The number with 15 digits."""
    # 15 digits: what survives the change of units to JSON and back, so that round trips are exact.
    return float(f"{value:.15g}")


@dataclass(frozen=True, slots=True)
class Curve:
    """A saturating efficiency: e(x) = share * x / (x + half). The default is an ideal machine.

    Attributes:
        share: e for large x, at most 1.
        half: FLOPs (or bytes, for memory) at which half of `share` is reached. 0: at any size.
        source: "given" by the user, or "datasheet", "measured", "published", "assumed".
    """

    share: float = 1.0
    half: float = 0.0
    source: str = "given"

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"an efficiency of {self.share}", "a number in (0, 1]")
        require(0 <= self.half < math.inf, f"a half-size of {self.half}", "a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a device's matmul kernels cut their work: see `costs/compute.py`.

    Attributes:
        units: Processors (SMs) that a tile of the output is given to, one at a time.
        lead: Steps along k that filling and draining a tile's pipeline is worth.
        side: Elements of an output tile's harmonic side at which half the rate is reached.
    """

    units: int
    lead: float = 0.0
    side: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """One fused attention kernel: its rate is peak * share * keys / (keys + half).

    Attributes:
        name: "flash2"; a runtime says which it calls.
        share: Of the peak, for many keys at 128 elements a head.
        half: Keys at which half of it is reached, without a mask.
        causal_half: The same under a causal mask, counting half the work.
        narrow: Factor for heads of 64 elements or fewer.
    """

    name: str
    share: float
    half: float = 0.0
    causal_half: float = 0.0
    narrow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """What the executor's Python costs where the device is the host's own processor, so that it
    adds to the kernels instead of running ahead of them. Seconds of one idle core.

    Attributes:
        op_s: Of every op, views included: forward, backward.
        conversion_s: Of every change of layout, beside its collective: forward, backward.
        parameter_s: Of every trained parameter, once per step: its optimizer's calls.
        microbatch_s: Of one action of the pipeline's runtime, forward or backward.
    """

    op_s: tuple[float, float] = (0.0, 0.0)
    conversion_s: tuple[float, float] = (0.0, 0.0)
    parameter_s: float = 0.0
    microbatch_s: float = 0.0

    def slowed(self, factor: float) -> HostTimes:
        """The same, each so many times as long."""
        return HostTimes(
            op_s=(self.op_s[0] * factor, self.op_s[1] * factor),
            conversion_s=(self.conversion_s[0] * factor, self.conversion_s[1] * factor),
            parameter_s=self.parameter_s * factor,
            microbatch_s=self.microbatch_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """How close kernels come to a device's peaks. Without one, kernels reach the peaks as given.

    Attributes:
        launch_s: Seconds the shortest kernel takes.
        tiles: Of matmuls whose shape is known: `matmul.share` is then that of a perfect tiling.
        flash: Fused attention kernels; without one of the name asked for, `attention` holds.
        sustained: Share of the rate of a short benchmark that products keep in a long training
            step, within the device's power.
        matmul, convolution, attention: Share of the peak FLOP/s by FLOPs of the kernel.
        memory: Share of the memory bandwidth by bytes moved.
        launch_source: Where `launch_s` comes from, as in `Curve`.
        elementwise: (op, FLOP/s forward, backward) of ops whose arithmetic binds them before the
            memory does, where it runs below the peak: "tanh" on a CPU.
        host: Host times that add to the kernels'.
        packing_bytes_per_s: At which products bring operands and result into the layout of their
            inner loops, before and after the arithmetic. math.inf: in the same pass.
        update_factor: Bytes that the optimizer's update moves, over those of one fused kernel.
    """

    launch_s: float = 0.0
    matmul: Curve = Curve()
    convolution: Curve = Curve()
    attention: Curve = Curve()
    memory: Curve = Curve()
    launch_source: str = "given"
    tiles: Tiles | None = None
    flash: tuple[Flash, ...] = ()
    sustained: float = 1.0
    elementwise: tuple[tuple[str, float, float], ...] = ()
    host: HostTimes = HostTimes()
    packing_bytes_per_s: float = math.inf
    update_factor: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.launch_s < math.inf, f"launch {self.launch_s} s", "seconds >= 0")
        object.__setattr__(self, "launch_s", rounded(self.launch_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one CPU process.

    Attributes:
        name: "h100-80g".
        memory_bytes: Device memory that a program can use.
        memory_bytes_per_s: Bandwidth of that memory; math.inf for unlimited.
        peak_flop_per_s: By dtype ("bfloat16"), without sparsity. Read-only.
        kernel: How close kernels come to the peaks.

    Raises:
        ClusterError: A number is not positive, or a dtype is not a floating one.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flop_per_s: Mapping[str, float] = field(hash=False)
    kernel: KernelSpec = KernelSpec()

    def __post_init__(self) -> None:
        label = f"device {self.name!r}"
        require(self.memory_bytes > 0, f"{label}: memory_bytes {self.memory_bytes}", "bytes > 0")
        bandwidth = self.memory_bytes_per_s
        require(bandwidth > 0, f"{label}: memory bandwidth {bandwidth}", "bytes/s > 0")
        require(bool(self.peak_flop_per_s), f"{label}: no peaks", "a peak for at least one dtype")
        for dtype, peak in self.peak_flop_per_s.items():
            require(dtype in FLOATING, f"{label}: a peak for {dtype!r}", f"{sorted(FLOATING)}")
            require(0 < peak, f"{label}: {dtype} peak {peak}", "FLOP/s > 0")
        peaks = {
            dtype: rounded(self.peak_flop_per_s[dtype]) for dtype in sorted(self.peak_flop_per_s)
        }
        object.__setattr__(self, "memory_bytes", int(self.memory_bytes))
        object.__setattr__(self, "memory_bytes_per_s", rounded(bandwidth))
        object.__setattr__(self, "peak_flop_per_s", MappingProxyType(peaks))

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping does not pickle: hand over a dict, __post_init__ wraps it again.
        peaks = dict(self.peak_flop_per_s)
        return _device, (self.name, self.memory_bytes, self.memory_bytes_per_s, peaks, self.kernel)


def _device(*values: Any) -> DeviceSpec:
    names = ("name", "memory_bytes", "memory_bytes_per_s", "peak_flop_per_s", "kernel")
    return DeviceSpec(**dict(zip(names, values)))
