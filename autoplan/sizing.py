# SPDX-License-Identifier: Apache-2.0
"""How many devices a model needs: the clusters to try, and what was found on them.

In comes a kind of cluster, out go clusters of growing size; each answer (a Plan or a refusal)
decides the next one. First doubling until something fits, then back to the smallest number that
does, then on for the curve of step time and cost. Not here: planning itself (`api.py` is handed
`Ladder.clusters`), and pages (`render/`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autoplan.cluster import Cluster
from autoplan.cluster_format import known_clusters, read_kind
from autoplan.errors import ClusterError, InfeasibleError
from autoplan.plan import Plan

CURVE_DOUBLINGS = 3  # beyond the smallest that fits
MOST_BETWEEN = 8  # sizes that are tried one by one; more are halved first


@dataclass(frozen=True, slots=True)
class Size:
    """One number of devices.

    Attributes:
        cluster: Its name.
        num_devices: Of the cluster.
        plan: There; None: there is none.
        reason: Why there is none.
    """

    cluster: str
    num_devices: int
    plan: Plan | None
    reason: str = ""


@dataclass
class Ladder:
    """The clusters of one kind, small to large, as far as the answers make them worth trying.

    Attributes:
        kind: A name of `known_clusters()`, without a size.
        most: Largest number of devices to try.
        sizes: What was found so far, by number of devices.
    """

    kind: str
    most: int
    sizes: dict[int, Size] = field(default_factory=dict)

    def note(self, cluster: Cluster, result: Plan | InfeasibleError) -> None:
        """Takes the answer for the cluster that `clusters` gave last."""
        count = cluster.num_devices
        found = (result, "") if isinstance(result, Plan) else (None, str(result))
        self.sizes[count] = Size(cluster.name, count, *found)

    def clusters(self) -> Iterator[Cluster]:
        """Clusters to plan for; the answer for each must be noted before the next is asked for.

        Raises:
            ClusterError: There is no such kind.
        """
        counts = self._doublings()
        failed, fits = 0, None
        for count in counts:
            yield self._cluster(count)
            if self._fits(count):
                fits = count
                break
            failed = count
        if fits is None:
            return
        for count in self._between(failed, fits):
            yield self._cluster(count)
        larger = [count for count in counts if count > fits]
        for count in larger[:CURVE_DOUBLINGS]:
            yield self._cluster(count)

    @property
    def smallest(self) -> Size | None:
        """The fewest devices on which there is a plan."""
        return next((s for _, s in sorted(self.sizes.items()) if s.plan is not None), None)

    @property
    def curve(self) -> tuple[Size, ...]:
        """Everything tried, by number of devices."""
        return tuple(size for _, size in sorted(self.sizes.items()))

    def _fits(self, count: int) -> bool:
        return self.sizes[count].plan is not None

    def _doublings(self) -> list[int]:
        """1, 2, 4, ... devices of a host, then 1, 2, 4, ... whole hosts."""
        _, host, networked = read_kind(self.kind)
        counts = [2**i for i in range(host.bit_length()) if 2**i < host]
        hosts = 1
        while host * hosts <= self.most and (hosts == 1 or networked):
            counts.append(host * hosts)
            hosts *= 2
        return [count for count in counts if count <= self.most]

    def _between(self, failed: int, fits: int) -> Iterator[int]:
        """Sizes between, devices of one host or whole hosts, until the smallest that fits is found.

        Odd sizes may fit worse than smaller ones, so few are tried one by one, smallest first; of
        many the middle one decides in which half to look.
        """
        _, host, _ = read_kind(self.kind)
        step = 1 if fits <= host else host
        left = [n for n in range(failed + 1, fits) if n % step == 0]
        while len(left) > MOST_BETWEEN:
            middle = len(left) // 2
            yield left[middle]
            left = left[:middle] if self._fits(left[middle]) else left[middle + 1 :]
        for count in left:
            yield count
            if self._fits(count):
                return

    def _cluster(self, count: int) -> Cluster:
        _, host, _ = read_kind(self.kind)
        hosts, size = (1, count) if count <= host else (count // host, host)
        return Cluster.load(f"{self.kind}-{hosts}x{size}")


def kind_with(device: str) -> str:
    """The kind of cluster for a device: its vendor's reference system first, else by name.

    Raises:
        ClusterError: No shipped kind has that device; those that some kind has are listed.
    """
    devices: dict[str, list[str]] = {}
    for kind in known_clusters():
        devices.setdefault(read_kind(kind)[0], []).append(kind)
    if device not in devices:
        raise ClusterError(
            f"no kind of cluster has device {device!r}. Known: {', '.join(sorted(devices))}. "
            "Name one of those, or a kind."
        )
    return min(devices[device], key=lambda kind: (not kind.startswith("dgx-"), kind))
