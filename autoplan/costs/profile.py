# SPDX-License-Identifier: Apache-2.0
"""What the cost functions read: the device and the links of a cluster, as rates, floors and tables.

In comes a `Cluster`, whose numbers `cluster.py` read and checked; out goes `Profiles`, which says
"how fast is this dtype, this kernel family, this collective" and says where each answer comes from.
Turning an answer into seconds is `compute.py` and `collectives.py`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from autoplan.cluster import Cluster, Curve, DeviceSpec, Flash, HostTimes, Link, Tiles
from autoplan.cluster_format import COLLECTIVES
from autoplan.errors import ProfileError
from autoplan.units import FLOATING

Source = Literal["measured", "interpolated", "roofline", "alpha-beta", "assumed"]
FAMILIES = ("matmul", "convolution", "attention", "memory", "view")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, and what kind of number they are: from a clock, between two of a clock's, from a
    formula with known parameters ("roofline", "alpha-beta"), or from a formula with guessed ones.
    """

    time_s: float
    source: Source


NOTHING = Cost(0.0, "roofline")


@dataclass(frozen=True, slots=True, eq=False)
class DeviceProfile:
    """How fast one device computes.

    Attributes:
        name: The device's.
        peak_flop_per_s: By dtype.
        bytes_per_s: Peak bandwidth of its memory; math.inf for unlimited.
        launch_s: Seconds of the shortest kernel.
        launch_source: Where `launch_s` comes from.
        curves: Efficiency by kernel family, of the peak FLOP/s; under "memory" of the bandwidth.
        tiles: Of matmuls, where known.
        flash: Fused attention kernels by name.
        elementwise: Op -> FLOP/s forward and backward of its arithmetic, where that is no peak.
        host: Host times that add to the kernels'.
        packing_bytes_per_s, update_factor: As of `KernelSpec`.
    """

    name: str
    peak_flop_per_s: Mapping[str, float]
    bytes_per_s: float
    launch_s: float
    launch_source: str
    curves: Mapping[str, Curve]
    tiles: Tiles | None
    flash: Mapping[str, Flash]
    elementwise: Mapping[str, tuple[float, float]]
    host: HostTimes
    packing_bytes_per_s: float
    update_factor: float

    @staticmethod
    def of(device: DeviceSpec) -> DeviceProfile:
        """The profile of a device as its description gives it."""
        kernel = device.kernel
        return DeviceProfile(
            name=device.name,
            peak_flop_per_s=device.peak_flop_per_s,
            bytes_per_s=device.memory_bytes_per_s,
            launch_s=kernel.launch_s,
            launch_source=kernel.launch_source,
            curves={
                "matmul": kernel.matmul,
                "convolution": kernel.convolution,
                "attention": kernel.attention,
                "memory": kernel.memory,
            },
            tiles=kernel.tiles,
            flash={flash.name: flash for flash in kernel.flash},
            elementwise={op: (ahead, back) for op, ahead, back in kernel.elementwise},
            host=kernel.host,
            packing_bytes_per_s=kernel.packing_bytes_per_s,
            update_factor=kernel.update_factor,
        )

    def crowded(self, factor: float) -> DeviceProfile:
        """The device where so many times more of them compute than there are cores for."""
        if factor == 1.0:
            return self
        return replace(
            self,
            peak_flop_per_s={d: peak / factor for d, peak in self.peak_flop_per_s.items()},
            bytes_per_s=self.bytes_per_s / factor,
            launch_s=self.launch_s * factor,
            elementwise={
                op: (ahead / factor, back / factor)
                for op, (ahead, back) in self.elementwise.items()
            },
            host=self.host.slowed(factor),
            packing_bytes_per_s=self.packing_bytes_per_s / factor,
        )

    def sustained(self, share: float) -> DeviceProfile:
        """The device in a long step, whose products run at this share of a benchmark's rate."""
        peaks = {dtype: peak * share for dtype, peak in self.peak_flop_per_s.items()}
        return replace(self, peak_flop_per_s=peaks)

    def peak(self, dtype: str) -> tuple[float, bool]:
        """Peak FLOP/s for a dtype, and whether the device states it.

        Integers count as float32. A floating dtype that the device does not state runs at the
        lowest of the stated peaks: a bound that is visible in the cost's source.
        """
        known = self.peak_flop_per_s
        if dtype in known:
            return known[dtype], True
        lowest = min(known.values())
        if dtype in FLOATING:
            return lowest, False
        return known.get("float32", lowest), True


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """How fast one tier of the interconnect is.

    Attributes:
        link: Its description: alpha, bandwidth, efficiencies, tables.
    """

    link: Link

    def rate(self, kind: str, num_ranks: int) -> float:
        """Bytes/s of one direction that `kind` reaches among `num_ranks`, on an idle link."""
        link = self.link
        for count, share in link.rank_efficiency:
            if count == num_ranks:
                return link.bytes_per_s * share
        shares = dict(link.efficiency)
        return link.bytes_per_s * shares.get(kind, shares.get("all", 1.0))

    def device_rate(self, kind: str, num_ranks: int) -> float:
        """Bytes/s that one device alone can draw from `rate`."""
        rate, link = self.rate(kind, num_ranks), self.link
        if link.device_bytes_per_s is None or math.isinf(link.bytes_per_s):
            return rate
        return rate * min(1.0, link.device_bytes_per_s / link.bytes_per_s)

    def measured(self, kind: str, num_ranks: int, size_bytes: float) -> Cost | None:
        """Seconds by the table of this collective and number of ranks, or None without one.

        Interpolates between rows on a logarithmic scale. Below the first row its time stands
        (latency decides there), above the last one its rate; both are called interpolated.
        """
        for table_kind, count, rows in self.link.tables:
            if (table_kind, count) == (kind, num_ranks):
                return _interpolate(rows, size_bytes)
        return None

    @property
    def source(self) -> Source:
        """Kind of number that the formulas give on this link."""
        return "assumed" if self.link.source == "assumed" else "alpha-beta"


def _interpolate(rows: tuple[tuple[float, float], ...], size_bytes: float) -> Cost:
    """Seconds at `size_bytes` of a table of (bytes, seconds) whose times never fall."""
    sizes = [size for size, _ in rows]
    i = bisect.bisect_left(sizes, size_bytes)
    if i < len(rows) and rows[i][0] == size_bytes:
        return Cost(rows[i][1], "measured")
    if i == 0:
        return Cost(rows[0][1], "interpolated")
    if i == len(rows):
        return Cost(rows[-1][1] * size_bytes / rows[-1][0], "interpolated")
    (size0, time0), (size1, time1) = rows[i - 1], rows[i]
    part = math.log(size_bytes / size0) / math.log(size1 / size0)
    return Cost(time0 * (time1 / time0) ** part, "interpolated")


@dataclass(frozen=True, slots=True, eq=False)
class Profiles:
    """The profiles of one cluster.

    Attributes:
        device: Every device's.
        intra: Link inside a host.
        inter: Link between hosts, or None.
        pair: Link inside a fast pair, or None.
        digest: Of every number the costs depend on.
    """

    device: DeviceProfile
    intra: LinkProfile
    inter: LinkProfile | None
    pair: LinkProfile | None
    digest: str

    @staticmethod
    @lru_cache(maxsize=64)
    def of(cluster: Cluster, num_devices: int = 0) -> Profiles:
        """The profiles of a cluster's device and links.

        Args:
            cluster: Whose.
            num_devices: That compute at once, and share the cores of their hosts; 0: all.
        """
        inter, pair = cluster.inter_host, cluster.pair_link
        device = DeviceProfile.of(cluster.device).sustained(cluster.device.kernel.sustained)
        return Profiles(
            device=device.crowded(cluster.crowding(num_devices or cluster.num_devices)),
            intra=LinkProfile(cluster.intra_host),
            inter=LinkProfile(inter) if inter else None,
            pair=LinkProfile(pair) if pair else None,
            digest=cluster.digest,
        )


def require_known(word: str, known: tuple[str, ...], what: str) -> None:
    """Checks a kernel family or a collective kind.

    Raises:
        ProfileError: It is none of the known ones.
    """
    if word not in known:
        raise ProfileError(
            f"unknown {what} {word!r}: expected one of {', '.join(known)}. Use one of these."
        )


def require_collective(kind: str) -> None:
    """Checks the kind of a collective.

    Raises:
        ProfileError: It is none of `cluster.COLLECTIVES`.
    """
    require_known(kind, COLLECTIVES, "collective")
