# SPDX-License-Identifier: Apache-2.0
"""On what a plan runs: devices, links, hosts, and the groups of ranks that talk over them.

In comes a name (`dgx-h100-2x8`), a cluster JSON file or plain numbers; out goes a `Cluster`,
immutable and hashable, and from it `Group`, the shape of one communication group as the costs need
it. All is SI. Not here: what a number is worth in seconds (`costs/`), and how a cluster is written
down (`cluster_format.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from autoplan.cluster_format import Fields, convert_cluster, read_cluster
from autoplan.cluster_json import write_cluster
from autoplan.device import (
    Curve,
    DeviceSpec,
    Flash,
    HostTimes,
    KernelSpec,
    Tiles,
    require,
    rounded,
)

__all__ = [
    "Cluster",
    "Curve",
    "DeviceSpec",
    "Flash",
    "Group",
    "HostTimes",
    "KernelSpec",
    "Link",
    "Tiles",
    "axis_group",
    "group_of",
]

Table = tuple[str, int, tuple[tuple[float, float], ...]]
_LINKS = ("intra_host", "inter_host", "pair_link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One tier of the interconnect. Without efficiencies it is the textbook's alpha-beta link.

    Attributes:
        name: "nvlink4".
        latency_s: alpha, seconds per step of a collective.
        bytes_per_s: Bandwidth of one direction: inside a host of one device, between hosts of all
            NICs of a host together.
        device_bytes_per_s: Between hosts, the most that one device can use of it (its own NICs);
            None: all of it.
        launch_s: Seconds once per collective, whatever its size.
        fill_s: Between hosts, seconds that a large collective through both tiers loses until hosts
            and network work at once.
        efficiency: (collective, share of the bandwidth it reaches); "all": those not listed.
        rank_efficiency: (number of ranks, share) where the wiring serves some counts worse.
        switch_share: Share of the bandwidth at which the switch itself reduces; None: it cannot.
        tables: (collective, number of ranks, ((bytes, seconds), ...)) as measured inside a host,
            or between hosts while every device of each takes part in some group; these beat the
            numbers above.
        source: Where latency and efficiencies come from, as in `Curve`.

    Raises:
        ClusterError: A number is out of its range, or a table is not sorted.
    """

    name: str = "link"
    latency_s: float
    bytes_per_s: float
    device_bytes_per_s: float | None = None
    launch_s: float = 0.0
    fill_s: float = 0.0
    efficiency: tuple[tuple[str, float], ...] = ()
    rank_efficiency: tuple[tuple[int, float], ...] = ()
    switch_share: float | None = None
    tables: tuple[Table, ...] = ()
    source: str = "given"

    def __post_init__(self) -> None:
        label = f"link {self.name!r}"
        for name in ("latency_s", "launch_s", "fill_s"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{label}: {name} {value}", "seconds >= 0")
            object.__setattr__(self, name, rounded(value))
        for name in ("bytes_per_s", "device_bytes_per_s"):
            value = getattr(self, name)
            if value is not None:
                require(value > 0, f"{label}: {name} {value}", "bytes/s > 0")
                object.__setattr__(self, name, rounded(value))
        shares = [*self.efficiency, *self.rank_efficiency, ("switch", self.switch_share or 1.0)]
        for key, share in shares:
            require(0 < share <= 1, f"{label}: efficiency {share} ({key})", "a number in (0, 1]")
        for kind, num_ranks, points in self.tables:
            rows = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
            positive = bool(points) and points[0][0] > 0 and points[0][1] > 0
            require(
                rows and positive,
                f"{label}: the {kind} table of {num_ranks} ranks",
                "rows of (bytes, time) > 0, bytes rising and time never falling",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The shape of one communication group: everything its costs depend on.

    Attributes:
        num_ranks: Members. 1 costs nothing.
        num_hosts: Hosts with members.
        ranks_per_host: Members on the host that has the fewest.
        groups_per_host: Groups that leave a host at the same time, with this one; they share NICs.
        local_link: Link between members of one host: "intra", or "pair" where all are joined by it.
    """

    num_ranks: int
    num_hosts: int = 1
    ranks_per_host: int
    groups_per_host: int = 1
    local_link: Literal["intra", "pair"] = "intra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal hosts of equal devices, one process per device.

    Attributes:
        name: "dgx-h100-2x8".
        num_hosts, devices_per_host: Their product is the number of ranks.
        device: Every device.
        intra_host: Link inside a host, per device.
        inter_host: Link between hosts, all NICs of a host together; None for a single host.
        rank_hosts: Host of every rank; None: ranks are numbered host by host.
        fast_pairs: Groups of local ranks (0-based on their host) that are joined by `pair_link`.
        pair_link: Link inside a fast pair; the rest of the host is on `intra_host`.
        cores_per_host: Cores that the devices of a host share, where they are CPU processes: no
            more of them compute at full speed at once. None: each computes by itself.
        price_per_device_hour: In US dollars, or None.

    Raises:
        ClusterError: Counts, links and rank lists contradict each other.
    """

    name: str = "custom"
    num_hosts: int
    devices_per_host: int
    device: DeviceSpec
    intra_host: Link
    inter_host: Link | None = None
    rank_hosts: tuple[int, ...] | None = None
    fast_pairs: tuple[tuple[int, ...], ...] | None = None
    pair_link: Link | None = None
    cores_per_host: int | None = None
    price_per_device_hour: float | None = None

    def __post_init__(self) -> None:
        hosts, size = self.num_hosts, self.devices_per_host
        label = f"cluster {self.name!r}"
        require(
            hosts > 0 and size > 0,
            f"{label}: {hosts} hosts of {size} devices",
            "at least 1 of each",
        )
        require(
            hosts == 1 or self.inter_host is not None,
            f"{label}: {hosts} hosts without inter_host",
            "a link between hosts",
        )
        if self.rank_hosts is not None:
            object.__setattr__(self, "rank_hosts", tuple(self.rank_hosts))
            require(
                sorted(self.rank_hosts) == [h for h in range(hosts) for _ in range(size)],
                f"{label}: rank_hosts {self.rank_hosts}",
                f"each host 0..{hosts - 1} exactly {size} times",
            )
        require(
            (self.fast_pairs is None) == (self.pair_link is None),
            f"{label}: only one of fast_pairs and pair_link",
            "both or neither",
        )
        if self.fast_pairs is not None:
            object.__setattr__(self, "fast_pairs", tuple(map(tuple, self.fast_pairs)))
            members = [r for pair in self.fast_pairs for r in pair]
            require(
                len(set(members)) == len(members) and set(members) <= set(range(size)),
                f"{label}: fast_pairs {self.fast_pairs}",
                f"disjoint groups of local ranks 0..{size - 1}",
            )

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    def crowding(self, num_devices: int) -> float:
        """How many times as long the devices compute where so many do it at once, host by host."""
        if self.cores_per_host is None:
            return 1.0
        return max(1.0, min(num_devices, self.devices_per_host) / self.cores_per_host)

    @property
    def digest(self) -> str:
        """A stable hash of every number that decides a plan."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def host_of(self, rank: int) -> int:
        """The host that rank runs on.

        Raises:
            ClusterError: The cluster has no such rank.
        """
        require(
            0 <= rank < self.num_devices,
            f"rank {rank} on cluster {self.name!r}",
            f"0..{self.num_devices - 1}",
        )
        return rank // self.devices_per_host if self.rank_hosts is None else self.rank_hosts[rank]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, hardware neighbours side by side: by host, then fast pair, then number."""
        places = _place(self)
        return tuple(sorted(range(self.num_devices), key=lambda r: (*places[r][:2], r)))

    def take(self, num_devices: int) -> Cluster:
        """A smaller cluster of the same kind: whole hosts or part of one; ranks numbered anew.

        Raises:
            ClusterError: The count is neither part of a host nor a number of whole hosts.
        """
        size = self.devices_per_host
        whole = [size * h for h in range(1, self.num_hosts + 1)]
        require(
            1 <= num_devices <= size or num_devices in whole,
            f"{num_devices} devices of cluster {self.name!r}",
            f"1..{size} or one of {whole}",
        )
        if num_devices == self.num_devices:
            return self
        if num_devices >= size:
            hosts = num_devices // size
            kept = [h for h in map(self.host_of, range(self.num_devices)) if h < hosts]
            rank_hosts = None if kept == sorted(kept) else tuple(kept)
            return replace(
                self, name=f"{self.name}[{num_devices}]", num_hosts=hosts, rank_hosts=rank_hosts
            )
        places = _place(self)
        first = [places[r][2] for r in self.ranks[:num_devices]]  # local ranks on host 0
        renumber = {old: new for new, old in enumerate(sorted(first))}
        pairs = [tuple(renumber[r] for r in p if r in renumber) for p in self.fast_pairs or ()]
        pairs = [p for p in pairs if len(p) > 1]
        return replace(
            self,
            name=f"{self.name}[{num_devices}]",
            num_hosts=1,
            devices_per_host=num_devices,
            rank_hosts=None,
            fast_pairs=tuple(pairs) or None,
            pair_link=self.pair_link if pairs else None,
        )

    @classmethod
    def load(cls, name_or_path: str | Path) -> Cluster:
        """The cluster of a name (KIND-HxD: H hosts of D devices; local-cpu-N) or of a file.

        Raises:
            ClusterError: Unknown kind (known ones are listed), impossible sizes, malformed file.
        """
        return _cluster_of(read_cluster(name_or_path))

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Cluster:
        """The cluster that `to_json` wrote, or that a user wrote by profiles/README.md.

        Raises:
            ClusterError: An unknown key, a wrong type or value, with its path in the document.
        """
        return _cluster_of(convert_cluster(dict(document), "cluster"))

    def to_json(self) -> dict[str, Any]:
        """The cluster as JSON data that needs no other file; `from_json` gives an equal one."""
        return write_cluster(self)


def _cluster_of(fields: Fields) -> Cluster:
    links = {key: Link(**fields[key]) if fields[key] else None for key in _LINKS}
    return Cluster(**{**fields, **links, "device": _device_of(fields["device"])})


def _device_of(fields: Fields) -> DeviceSpec:
    curves = {family: Curve(**curve) for family, curve in fields["curves"].items()}
    tiles = fields["tiles"]
    kernel = KernelSpec(
        launch_s=fields["launch_s"],
        launch_source=fields["launch_source"],
        tiles=Tiles(**tiles) if tiles else None,
        flash=tuple(Flash(**flash) for flash in fields["flash"]),
        sustained=fields["sustained"],
        elementwise=fields["elementwise"],
        host=HostTimes(**fields["host"]),
        packing_bytes_per_s=fields["packing_bytes_per_s"],
        update_factor=fields["update_factor"],
        **curves,
    )
    names = ("name", "memory_bytes", "memory_bytes_per_s", "peak_flop_per_s")
    return DeviceSpec(**{name: fields[name] for name in names}, kernel=kernel)


def group_of(cluster: Cluster, ranks: tuple[int, ...], stride_groups: int = 1) -> Group:
    """The shape of the group of these ranks.

    Args:
        cluster: Where they run.
        ranks: The members, all different.
        stride_groups: How many groups like it, with this one, leave the same hosts at once.

    Raises:
        ClusterError: No ranks, one twice, one that does not exist, or stride_groups below 1.
    """
    require(
        bool(ranks) and len(set(ranks)) == len(ranks), f"group of ranks {ranks}", "different ranks"
    )
    require(stride_groups >= 1, f"stride_groups {stride_groups}", "1 or more")
    for rank in ranks:
        cluster.host_of(rank)
    all_places = _place(cluster)
    places = [all_places[r] for r in ranks]
    hosts = [place[0] for place in places]
    counts = [hosts.count(h) for h in set(hosts)]
    paired = len({place[:2] for place in places}) == len(counts) and all(
        p[1] < _NO_PAIR for p in places
    )
    return Group(
        num_ranks=len(ranks),
        num_hosts=len(counts),
        ranks_per_host=min(counts),
        groups_per_host=stride_groups if len(counts) > 1 else 1,
        local_link="pair" if paired else "intra",
    )


@lru_cache(maxsize=65536)
def axis_group(
    cluster: Cluster, ranks: tuple[int, ...], axis_sizes: tuple[int, ...], axis: int
) -> Group:
    """The shape of the groups along one mesh axis; of the worst one where they differ.

    All groups of an axis work at the same time, so `groups_per_host` counts those that have members
    on a host and leave it: they share its NICs.

    Args:
        cluster: Where they run.
        ranks: The stage's block of ranks in row-major mesh order.
        axis_sizes: The mesh, outermost axis first.
        axis: Which axis the group runs along.

    Raises:
        ClusterError: The mesh does not have as many places as there are ranks.
    """
    require(
        math.prod(axis_sizes) == len(ranks) and 0 <= axis < len(axis_sizes),
        f"{len(ranks)} ranks on axis {axis} of mesh {axis_sizes}",
        "axis sizes whose product is the number of ranks",
    )
    stride, size = math.prod(axis_sizes[axis + 1 :]), axis_sizes[axis]
    starts = [i for i in range(len(ranks)) if i // stride % size == 0]
    groups = [tuple(ranks[start + k * stride] for k in range(size)) for start in starts]
    leaving: dict[int, int] = {}
    for members in groups:
        hosts = {cluster.host_of(r) for r in members}
        for host in hosts if len(hosts) > 1 else ():
            leaving[host] = leaving.get(host, 0) + 1
    shapes = [
        group_of(cluster, g, max(leaving.get(cluster.host_of(r), 1) for r in g)) for g in groups
    ]
    return max(
        shapes,
        key=lambda g: (g.num_hosts, g.groups_per_host, -g.ranks_per_host, g.local_link == "intra"),
    )


_NO_PAIR = 1 << 30  # pair number of a device outside every fast pair: it sorts after them


@lru_cache(maxsize=256)
def _place(cluster: Cluster) -> tuple[tuple[int, int, int], ...]:
    """(host, fast pair or a number of its own from _NO_PAIR on, local rank) of every rank."""
    pair_of = {r: i for i, pair in enumerate(cluster.fast_pairs or ()) for r in pair}
    seen = [0] * cluster.num_hosts
    places = []
    for rank in range(cluster.num_devices):
        host = cluster.host_of(rank)
        places.append((host, pair_of.get(seen[host], _NO_PAIR + seen[host]), seen[host]))
        seen[host] += 1
    return tuple(places)
