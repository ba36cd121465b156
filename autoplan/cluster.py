# SPDX-License-Identifier: Apache-2.0
"""On what a plan runs: devices, links, hosts, and the groups of ranks that talk over them.

In comes a name (`dgx-h100-2x8`), a cluster JSON file or plain numbers; out goes a `Cluster`,
immutable and hashable, and from it `Group`, the shape of one communication group as the costs need
it. What a number is worth in seconds is not here (`costs/`). JSON keys carry their units, inside
all is SI; the schema of `profiles/README.md` is the structs in the second half of this file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from autoplan.errors import AutoplanError, ClusterError, ProfileError
from autoplan.units import FLOATING, GIB

Curved = Literal["matmul", "convolution", "attention", "memory"]
_CURVES: tuple[Curved, ...] = get_args(Curved)
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Table = tuple[str, int, tuple[tuple[float, float], ...]]


def _require(condition: bool, wrong: str, expected: str) -> None:
    if not condition:
        raise ClusterError(f"{wrong}: expected {expected}. Correct the cluster description.")


def _round(value: float) -> float:
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
        _require(0 < self.share <= 1, f"an efficiency of {self.share}", "a number in (0, 1]")
        _require(0 <= self.half < math.inf, f"a half-size of {self.half}", "a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """How close kernels come to a device's peaks. Without one, kernels reach the peaks as given.

    Attributes:
        launch_s: Seconds the shortest kernel takes.
        matmul, convolution, attention: Share of the peak FLOP/s by FLOPs of the kernel.
        memory: Share of the memory bandwidth by bytes moved.
        launch_source: Where `launch_s` comes from, as in `Curve`.
    """

    launch_s: float = 0.0
    matmul: Curve = Curve()
    convolution: Curve = Curve()
    attention: Curve = Curve()
    memory: Curve = Curve()
    launch_source: str = "given"

    def __post_init__(self) -> None:
        _require(0 <= self.launch_s < math.inf, f"launch {self.launch_s} s", "seconds >= 0")
        object.__setattr__(self, "launch_s", _round(self.launch_s))


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
        _require(self.memory_bytes > 0, f"{label}: memory_bytes {self.memory_bytes}", "bytes > 0")
        bandwidth = self.memory_bytes_per_s
        _require(bandwidth > 0, f"{label}: memory bandwidth {bandwidth}", "bytes/s > 0")
        _require(bool(self.peak_flop_per_s), f"{label}: no peaks", "a peak for at least one dtype")
        for dtype, peak in self.peak_flop_per_s.items():
            _require(dtype in FLOATING, f"{label}: a peak for {dtype!r}", f"{sorted(FLOATING)}")
            _require(0 < peak, f"{label}: {dtype} peak {peak}", "FLOP/s > 0")
        peaks = {
            dtype: _round(self.peak_flop_per_s[dtype]) for dtype in sorted(self.peak_flop_per_s)
        }
        object.__setattr__(self, "memory_bytes", int(self.memory_bytes))
        object.__setattr__(self, "memory_bytes_per_s", _round(bandwidth))
        object.__setattr__(self, "peak_flop_per_s", MappingProxyType(peaks))

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping does not pickle: hand over a dict, __post_init__ wraps it again.
        peaks = dict(self.peak_flop_per_s)
        return _device, (self.name, self.memory_bytes, self.memory_bytes_per_s, peaks, self.kernel)


def _device(*values: Any) -> DeviceSpec:
    names = ("name", "memory_bytes", "memory_bytes_per_s", "peak_flop_per_s", "kernel")
    return DeviceSpec(**dict(zip(names, values)))


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
        efficiency: (collective, share of the bandwidth it reaches); "all": those not listed.
        rank_efficiency: (number of ranks, share) where the wiring serves some counts worse.
        switch_share: Share of the bandwidth at which the switch itself reduces; None: it cannot.
        tables: (collective, number of ranks, ((bytes, seconds), ...)) as measured inside a host;
            these beat the numbers above.
        source: Where latency and efficiencies come from, as in `Curve`.

    Raises:
        ClusterError: A number is out of its range, or a table is not sorted.
    """

    name: str = "link"
    latency_s: float
    bytes_per_s: float
    device_bytes_per_s: float | None = None
    launch_s: float = 0.0
    efficiency: tuple[tuple[str, float], ...] = ()
    rank_efficiency: tuple[tuple[int, float], ...] = ()
    switch_share: float | None = None
    tables: tuple[Table, ...] = ()
    source: str = "given"

    def __post_init__(self) -> None:
        label = f"link {self.name!r}"
        for name in ("latency_s", "launch_s"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{label}: {name} {value}", "seconds >= 0")
            object.__setattr__(self, name, _round(value))
        for name in ("bytes_per_s", "device_bytes_per_s"):
            value = getattr(self, name)
            if value is not None:
                _require(value > 0, f"{label}: {name} {value}", "bytes/s > 0")
                object.__setattr__(self, name, _round(value))
        shares = [*self.efficiency, *self.rank_efficiency, ("switch", self.switch_share or 1.0)]
        for key, share in shares:
            _require(0 < share <= 1, f"{label}: efficiency {share} ({key})", "a number in (0, 1]")
        for kind, num_ranks, points in self.tables:
            rows = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
            positive = bool(points) and points[0][0] > 0 and points[0][1] > 0
            _require(
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
    price_per_device_hour: float | None = None

    def __post_init__(self) -> None:
        hosts, size = self.num_hosts, self.devices_per_host
        label = f"cluster {self.name!r}"
        _require(
            hosts > 0 and size > 0,
            f"{label}: {hosts} hosts of {size} devices",
            "at least 1 of each",
        )
        _require(
            hosts == 1 or self.inter_host is not None,
            f"{label}: {hosts} hosts without inter_host",
            "a link between hosts",
        )
        if self.rank_hosts is not None:
            object.__setattr__(self, "rank_hosts", tuple(self.rank_hosts))
            _require(
                sorted(self.rank_hosts) == [h for h in range(hosts) for _ in range(size)],
                f"{label}: rank_hosts {self.rank_hosts}",
                f"each host 0..{hosts - 1} exactly {size} times",
            )
        _require(
            (self.fast_pairs is None) == (self.pair_link is None),
            f"{label}: only one of fast_pairs and pair_link",
            "both or neither",
        )
        if self.fast_pairs is not None:
            object.__setattr__(self, "fast_pairs", tuple(map(tuple, self.fast_pairs)))
            members = [r for pair in self.fast_pairs for r in pair]
            _require(
                len(set(members)) == len(members) and set(members) <= set(range(size)),
                f"{label}: fast_pairs {self.fast_pairs}",
                f"disjoint groups of local ranks 0..{size - 1}",
            )

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

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
        _require(
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
        _require(
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
        text = str(name_or_path)
        if text.endswith(".json"):
            return _convert_cluster(_read_json(Path(text), ClusterError), text)
        return _load_kind(text)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Cluster:
        """The cluster that `to_json` wrote, or that a user wrote by profiles/README.md.

        Raises:
            ClusterError: An unknown key, a wrong type or value, with its path in the document.
        """
        return _convert_cluster(dict(document), "cluster")

    def to_json(self) -> dict[str, Any]:
        """The cluster as JSON data that needs no other file; `from_json` gives an equal one."""
        links = {
            "intra_host": self.intra_host,
            "inter_host": self.inter_host,
            "pair_link": self.pair_link,
        }
        return {
            "name": self.name,
            "num_hosts": self.num_hosts,
            "devices_per_host": self.devices_per_host,
            "device": _device_json(self.device),
            **{key: _link_json(link) if link else None for key, link in links.items()},
            "rank_hosts": list(self.rank_hosts) if self.rank_hosts is not None else None,
            "fast_pairs": [list(p) for p in self.fast_pairs]
            if self.fast_pairs is not None
            else None,
            "price_per_device_hour": self.price_per_device_hour,
        }


def group_of(cluster: Cluster, ranks: tuple[int, ...], stride_groups: int = 1) -> Group:
    """The shape of the group of these ranks.

    Args:
        cluster: Where they run.
        ranks: The members, all different.
        stride_groups: How many groups like it, with this one, leave the same hosts at once.

    Raises:
        ClusterError: No ranks, one twice, one that does not exist, or stride_groups below 1.
    """
    _require(
        bool(ranks) and len(set(ranks)) == len(ranks), f"group of ranks {ranks}", "different ranks"
    )
    _require(stride_groups >= 1, f"stride_groups {stride_groups}", "1 or more")
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
    _require(
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


# Documents. The structs are the schema: msgspec refuses unknown keys and wrong types.

Number = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Provenance(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    source: Literal["datasheet", "measured", "published", "assumed", "given"]
    document: str = ""
    note: str = ""


class _Curve(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    share: Share
    half_GFLOP: Number = 0.0
    half_MB: Number = 0.0


class _Kernel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    launch_us: Number = 0.0
    efficiency: Share | dict[Curved, Share | _Curve] = 1.0


class _Device(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str = "device"
    memory_GiB: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
    memory_GBps: Number | None
    peak_TFLOPs: dict[str, Number]
    kernel: _Kernel = _Kernel()
    provenance: dict[str, _Provenance] = {}


class _Link(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: str = "link"
    latency_us: Number
    bandwidth_GBps: Number | None
    device_GBps: Number | None = None
    launch_us: Number = 0.0
    efficiency: Share | dict[Literal["all"] | Collective, Share] = 1.0
    rank_efficiency: dict[Count, Share] = {}
    switch_share: Share | None = None
    tables_MB_us: dict[Collective, dict[Count, list[tuple[Number, Number]]]] = {}
    provenance: dict[str, _Provenance] = {}


class _Kind(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """profiles/clusters/KIND.json: what all clusters of a kind share."""

    name: str
    device: str | _Device
    devices_per_host: Count
    intra_host: str | _Link
    inter_host: str | _Link | None = None
    nics_per_host: Count = 1
    fast_pairs: tuple[tuple[int, ...], ...] | None = None
    pair_link: str | _Link | None = None
    price_per_device_hour: Number | None = None
    provenance: dict[str, _Provenance] = {}


class _Cluster(_Kind, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A user's cluster file, and what `Cluster.to_json` writes."""

    name: str = "custom"
    num_hosts: Count
    rank_hosts: tuple[int, ...] | None = None


_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def profiles_dir() -> Path:
    """The folder of shipped profiles: inside the installed package, or beside it in a checkout.

    Raises:
        ProfileError: Neither is there.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "profiles", package.parent / "profiles"):
        if (folder / "clusters").is_dir():
            return folder
    raise ProfileError(
        f"no profiles folder in {package} or beside it: expected one. Reinstall autoplan."
    )


def known_clusters() -> tuple[str, ...]:
    """The shipped kinds of cluster, as in `KIND-HxD`."""
    return _known("clusters")


def known_devices() -> tuple[str, ...]:
    """The shipped devices, as a cluster file may name them."""
    return _known("devices")


def known_links() -> tuple[str, ...]:
    """The shipped links, as a cluster file may name them."""
    return _known("links")


def _known(folder: str) -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in (profiles_dir() / folder).glob("*.json")))


def _read_json(path: Path, error: type[AutoplanError]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as problem:
        raise error(
            f"cannot read {path}: {problem.strerror}. Give the path of a JSON file."
        ) from problem
    except msgspec.DecodeError as problem:
        raise error(f"{path} is not JSON: {problem}. Correct the file.") from problem


def _convert(data: Any, kind: type[_Struct], source: str, error: type[AutoplanError]) -> _Struct:
    """The document as a struct; a refusal names the path and, for an unknown key, near ones."""
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as problem:
        text = str(problem)
        unknown = re.search(r"unknown field `([^`]+)`", text)
        hint = f"Near: {_near(unknown[1], _all_fields())}" if unknown else "Correct the value"
        raise error(f"{source}: {text}. {hint}; the schema is in profiles/README.md.") from problem


def _all_fields() -> tuple[str, ...]:
    structs = (_Cluster, _Device, _Kernel, _Curve, _Link, _Provenance)
    return tuple(dict.fromkeys(name for s in structs for name in s.__struct_fields__))


def _near(word: str, known: tuple[str, ...]) -> str:
    return ", ".join(difflib.get_close_matches(word, known, n=3, cutoff=0.4)) or "nothing"


def _shipped(folder: str, name: str, kind: type[_Struct]) -> _Struct:
    known = _known(folder)
    if name not in known:
        raise ClusterError(
            f"unknown {folder[:-1]} {name!r}: near {_near(name, known)}; "
            f"known are {', '.join(known)}. Name one of them or give your own in a cluster file."
        )
    path = profiles_dir() / folder / f"{name}.json"
    return _convert(_read_json(path, ProfileError), kind, str(path), ProfileError)


def _load_kind(name: str) -> Cluster:
    """`KIND-HxD`, or `local-cpu-N`: one host of N processes."""
    match = re.fullmatch(r"(.+)-(\d+)x(\d+)", name) or re.fullmatch(r"(local-cpu)()-(\d+)", name)
    if match is None or match[1] not in known_clusters():
        kinds = known_clusters()
        near = _near(match[1] if match else name, kinds)
        raise ClusterError(
            f"unknown cluster {name!r}: near {near}; known kinds are {', '.join(kinds)}. "
            "Write KIND-HxD, H hosts of D devices, as in dgx-h100-2x8; local-cpu-N; a .json file."
        )
    kind = _shipped("clusters", match[1], _Kind)
    hosts, size = int(match[2] or 1), int(match[3])
    _require(
        hosts >= 1 and 1 <= size <= kind.devices_per_host,
        f"cluster {name!r}: {hosts} hosts of {size} devices",
        f"1 host or more of 1..{kind.devices_per_host} devices",
    )
    _require(
        hosts == 1 or kind.inter_host is not None, f"cluster {name!r}: {hosts} hosts", "1 host"
    )
    return _build(kind, name=name, num_hosts=hosts, devices_per_host=size)


def _convert_cluster(data: Any, source: str) -> Cluster:
    document = _convert(data, _Cluster, source, ClusterError)
    return _build(
        document,
        name=document.name,
        num_hosts=document.num_hosts,
        devices_per_host=document.devices_per_host,
        rank_hosts=document.rank_hosts,
    )


def _build(
    kind: _Kind,
    *,
    name: str,
    num_hosts: int,
    devices_per_host: int,
    rank_hosts: tuple[int, ...] | None = None,
) -> Cluster:
    device = (
        _shipped("devices", kind.device, _Device) if isinstance(kind.device, str) else kind.device
    )
    inter = _link(kind.inter_host)
    if inter is not None and inter.device_bytes_per_s is None and kind.nics_per_host > 1:
        # A device reaches its own NICs only: several where there are more NICs than devices.
        own = max(1, kind.nics_per_host // kind.devices_per_host)
        inter = replace(
            inter,
            bytes_per_s=inter.bytes_per_s * kind.nics_per_host,
            device_bytes_per_s=inter.bytes_per_s * own,
        )
    intra = _link(kind.intra_host)
    assert intra is not None, "the schema requires intra_host"
    return Cluster(
        name=name,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        device=_device_of(device),
        intra_host=intra,
        inter_host=inter,
        rank_hosts=rank_hosts,
        fast_pairs=kind.fast_pairs,
        pair_link=_link(kind.pair_link),
        price_per_device_hour=kind.price_per_device_hour,
    )


def _source(provenance: Mapping[str, _Provenance], key: str) -> str:
    """Source of a number: that of its own path, or of the nearest one above it."""
    while key and key not in provenance:
        key = key.rpartition(".")[0]
    return provenance[key].source if key else "given"


def _device_of(document: _Device) -> DeviceSpec:
    given = document.kernel.efficiency
    curves = {}
    for family in _CURVES:
        curve = given.get(family, 1.0) if isinstance(given, dict) else given
        curve = _Curve(share=curve) if isinstance(curve, float) else curve
        half = _si(curve.half_MB, 6) if family == "memory" else _si(curve.half_GFLOP, 9)
        curves[family] = Curve(
            curve.share, half, _source(document.provenance, f"kernel.efficiency.{family}")
        )
    kernel = KernelSpec(
        launch_s=_si(document.kernel.launch_us, -6),
        **curves,
        launch_source=_source(document.provenance, "kernel.launch_us"),
    )
    return DeviceSpec(
        name=document.name,
        memory_bytes=int(document.memory_GiB * GIB),
        memory_bytes_per_s=_si(document.memory_GBps, 9),
        kernel=kernel,
        peak_flop_per_s={d: _si(p, 12) for d, p in document.peak_TFLOPs.items()},
    )


def _link(document: str | _Link | None) -> Link | None:
    if document is None:
        return None
    if isinstance(document, str):
        document = _shipped("links", document, _Link)
    given = document.efficiency
    tables = (
        (kind, num_ranks, tuple((_si(size, 6), _si(time, -6)) for size, time in rows))
        for kind, by_ranks in document.tables_MB_us.items()
        for num_ranks, rows in by_ranks.items()
    )
    return Link(
        name=document.name,
        latency_s=_si(document.latency_us, -6),
        launch_s=_si(document.launch_us, -6),
        bytes_per_s=_si(document.bandwidth_GBps, 9),
        device_bytes_per_s=None if document.device_GBps is None else _si(document.device_GBps, 9),
        efficiency=tuple(sorted(({"all": given} if isinstance(given, float) else given).items())),
        rank_efficiency=tuple(sorted(document.rank_efficiency.items())),
        switch_share=document.switch_share,
        tables=tuple(sorted(tables)),
        source=_source(document.provenance, "efficiency"),
    )


def _si(value: float | None, exponent: int) -> float:
    """value * 10**exponent, exact to the last decimal digit (None: unlimited)."""
    return math.inf if value is None else float(Decimal(repr(float(value))).scaleb(exponent))


def _unit(value: float, exponent: int) -> float | None:
    return None if math.isinf(value) else _si(value, -exponent)


def _device_json(device: DeviceSpec) -> dict[str, Any]:
    kernel, provenance = (
        device.kernel,
        {"kernel.launch_us": {"source": device.kernel.launch_source}},
    )
    efficiency = {}
    for family in _CURVES:
        curve: Curve = getattr(kernel, family)
        half = (
            {"half_MB": _si(curve.half, -6)}
            if family == "memory"
            else {"half_GFLOP": _si(curve.half, -9)}
        )
        efficiency[family] = {"share": curve.share, **half}
        provenance[f"kernel.efficiency.{family}"] = {"source": curve.source}
    return {
        "name": device.name,
        "memory_GiB": device.memory_bytes / GIB,
        "memory_GBps": _unit(device.memory_bytes_per_s, 9),
        "peak_TFLOPs": {dtype: _unit(peak, 12) for dtype, peak in device.peak_flop_per_s.items()},
        "kernel": {"launch_us": _si(kernel.launch_s, 6), "efficiency": efficiency},
        "provenance": provenance,
    }


def _link_json(link: Link) -> dict[str, Any]:
    tables: dict[str, dict[str, list[list[float]]]] = {}
    for kind, num_ranks, rows in link.tables:
        tables.setdefault(kind, {})[str(num_ranks)] = [[_si(s, -6), _si(t, 6)] for s, t in rows]
    return {
        "name": link.name,
        "latency_us": _si(link.latency_s, 6),
        "launch_us": _si(link.launch_s, 6),
        "bandwidth_GBps": _unit(link.bytes_per_s, 9),
        "device_GBps": None
        if link.device_bytes_per_s is None
        else _unit(link.device_bytes_per_s, 9),
        "efficiency": dict(link.efficiency),
        "rank_efficiency": {str(n): share for n, share in link.rank_efficiency},
        "switch_share": link.switch_share,
        "tables_MB_us": tables,
        "provenance": {"efficiency": {"source": link.source}},
    }
