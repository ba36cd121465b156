# SPDX-License-Identifier: Apache-2.0
"""Cluster documents: what a JSON file or a shipped profile says, as the plain fields of a Cluster.

In comes a name (`dgx-h100-2x8`), a path or JSON data; out go fields in SI units, from which
cluster.py builds its types (`cluster_json.py` is the way back). The structs are the schema of
profiles/README.md, whose keys carry their units: msgspec refuses unknown keys and wrong types.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args

import msgspec

from autoplan.errors import AutoplanError, ClusterError, ProfileError
from autoplan.units import GIB

Curved = Literal["matmul", "convolution", "attention", "memory"]
CURVES: tuple[Curved, ...] = get_args(Curved)
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

Fields = dict[str, Any]  # keyword arguments of a type of cluster.py, in SI units

Number = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Provenance(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    source: Literal["datasheet", "measured", "published", "fitted", "assumed", "given"]
    document: str = ""
    note: str = ""


class _Curve(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    share: Share
    half_GFLOP: Number = 0.0
    half_MB: Number = 0.0


class _Tiles(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    units: Count
    lead: Number = 0.0
    side: Number = 0.0


class _Flash(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    share: Share
    half: Number = 0.0
    causal_half: Number = 0.0
    narrow: Share = 1.0


class _Host(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    op: tuple[Number, Number] = (0.0, 0.0)
    conversion: tuple[Number, Number] = (0.0, 0.0)
    parameter: Number = 0.0
    microbatch: Number = 0.0


class _Kernel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    launch_us: Number = 0.0
    efficiency: Share | dict[Curved, Share | _Curve] = 1.0
    tiles: _Tiles | None = None
    flash: dict[str, _Flash] = {}
    sustained: Share = 1.0
    elementwise_GFLOPs: dict[str, tuple[Positive, Positive]] = {}
    host_us: _Host = _Host()
    packing_GBps: Positive | None = None
    update_factor: Positive = 1.0


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
    fill_us: Number = 0.0
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
    cores_per_host: Count | Literal["local"] | None = None
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


def read_cluster(name_or_path: str | Path) -> Fields:
    """Fields of the cluster of a name (KIND-HxD; local-cpu-N), or of the file at a path.

    Raises:
        ClusterError: Unknown kind (known ones are listed), impossible sizes, malformed file.
    """
    text = str(name_or_path)
    if text.endswith(".json"):
        return convert_cluster(_read_json(Path(text), ClusterError), text)
    return _read_kind(text)


def convert_cluster(data: Any, source: str) -> Fields:
    """Fields of the cluster that JSON data describe; `source` is what messages call them.

    Raises:
        ClusterError: An unknown key, a wrong type or value, with its path in the document.
    """
    if isinstance(data, Mapping) and isinstance(data.get("device"), list | tuple):
        _refuse_mixed(data["device"], source)
    document = _convert(data, _Cluster, source, ClusterError)
    return _fields(
        document,
        name=document.name,
        num_hosts=document.num_hosts,
        devices_per_host=document.devices_per_host,
        rank_hosts=document.rank_hosts,
    )


def _refuse_mixed(given: list[Any], source: str) -> NoReturn:
    """A list of devices: a plan uses one kind, and the smallest one limits all.

    Raises:
        ClusterError: Names it, and the memory of the others that it leaves unused.
    """
    devices = [
        _shipped("devices", d, _Device)
        if isinstance(d, str)
        else _convert(d, _Device, source, ClusterError)
        for d in given
    ]
    sizes = sorted((d.memory_GiB, d.name) for d in devices)
    least, name = sizes[0] if sizes else (0.0, "none")
    unused = sum(size - least for size, _ in sizes)
    found = ", ".join(f"{n} {g:g} GiB" for g, n in reversed(sizes))
    raise ClusterError(
        f"{source}: device is a list ({found}): expected one device, a plan uses one kind. The "
        f"limiting device is {name} with {least:g} GiB: describe all of them as that one, which "
        f"leaves {unused:g} GiB of the others unused, or leave {name} out."
    )


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


def read_kind(kind: str) -> tuple[str, int, bool]:
    """(device, most devices of a host, whether hosts are joined) of a shipped kind.

    Raises:
        ClusterError: There is no such kind.
    """
    if kind not in known_clusters():
        raise ClusterError(
            f"unknown kind of cluster {kind!r}: near {_near(kind, known_clusters())}; known kinds "
            f"are {', '.join(known_clusters())}. Name one of those."
        )
    document = _shipped("clusters", kind, _Kind)
    device = document.device if isinstance(document.device, str) else document.device.name
    return device, document.devices_per_host, document.inter_host is not None


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


def _read_kind(name: str) -> Fields:
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
    most = kind.devices_per_host
    if hosts < 1 or not 1 <= size <= most:
        raise ClusterError(
            f"cluster {name!r}: {hosts} hosts of {size} devices: expected 1 host or more of "
            f"1..{most} devices. Correct the cluster description."
        )
    if hosts > 1 and kind.inter_host is None:
        raise ClusterError(
            f"cluster {name!r}: {hosts} hosts: expected 1 host. Correct the cluster description."
        )
    return _fields(kind, name=name, num_hosts=hosts, devices_per_host=size)


def _fields(
    kind: _Kind,
    *,
    name: str,
    num_hosts: int,
    devices_per_host: int,
    rank_hosts: tuple[int, ...] | None = None,
) -> Fields:
    device = kind.device
    device = _shipped("devices", device, _Device) if isinstance(device, str) else device
    inter = _link_fields(kind.inter_host)
    if inter is not None and inter["device_bytes_per_s"] is None and kind.nics_per_host > 1:
        # A device reaches its own NICs only: several where there are more NICs than devices.
        own = max(1, kind.nics_per_host // kind.devices_per_host)
        inter["device_bytes_per_s"] = inter["bytes_per_s"] * own
        inter["bytes_per_s"] *= kind.nics_per_host
    return {
        "name": name,
        "num_hosts": num_hosts,
        "devices_per_host": devices_per_host,
        "device": _device_fields(device),
        "intra_host": _link_fields(kind.intra_host),
        "inter_host": inter,
        "rank_hosts": rank_hosts,
        "fast_pairs": kind.fast_pairs,
        "pair_link": _link_fields(kind.pair_link),
        "cores_per_host": local_cores() if kind.cores_per_host == "local" else kind.cores_per_host,
        "price_per_device_hour": kind.price_per_device_hour,
    }


def _source(provenance: Mapping[str, _Provenance], key: str) -> str:
    """Source of a number: that of its own path, or of the nearest one above it."""
    while key and key not in provenance:
        key = key.rpartition(".")[0]
    return provenance[key].source if key else "given"


def local_cores() -> int:
    """Cores of this machine that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device_fields(document: _Device) -> Fields:
    given = document.kernel.efficiency
    curves = {}
    for family in CURVES:
        curve = given.get(family, 1.0) if isinstance(given, dict) else given
        curve = _Curve(share=curve) if isinstance(curve, float) else curve
        half = si(curve.half_MB, 6) if family == "memory" else si(curve.half_GFLOP, 9)
        source = _source(document.provenance, f"kernel.efficiency.{family}")
        curves[family] = {"share": curve.share, "half": half, "source": source}
    return {
        "name": document.name,
        "memory_bytes": int(document.memory_GiB * GIB),
        "memory_bytes_per_s": si(document.memory_GBps, 9),
        "peak_flop_per_s": {d: si(p, 12) for d, p in document.peak_TFLOPs.items()},
        "launch_s": si(document.kernel.launch_us, -6),
        "launch_source": _source(document.provenance, "kernel.launch_us"),
        "curves": curves,
        "sustained": document.kernel.sustained,
        "tiles": msgspec.structs.asdict(document.kernel.tiles) if document.kernel.tiles else None,
        "flash": [
            {"name": name, **msgspec.structs.asdict(flash)}
            for name, flash in sorted(document.kernel.flash.items())
        ],
        "elementwise": tuple(
            (op, si(ahead, 9), si(back, 9))
            for op, (ahead, back) in sorted(document.kernel.elementwise_GFLOPs.items())
        ),
        "packing_bytes_per_s": si(document.kernel.packing_GBps, 9),
        "update_factor": document.kernel.update_factor,
        "host": {
            f"{key}_s": tuple(si(t, -6) for t in us) if isinstance(us, tuple) else si(us, -6)
            for key, us in msgspec.structs.asdict(document.kernel.host_us).items()
        },
    }


def _link_fields(document: str | _Link | None) -> Fields | None:
    if document is None:
        return None
    if isinstance(document, str):
        document = _shipped("links", document, _Link)
    given, device = document.efficiency, document.device_GBps
    shares = {"all": given} if isinstance(given, float) else given
    tables = (
        (kind, num_ranks, tuple((si(size, 6), si(time, -6)) for size, time in rows))
        for kind, by_ranks in document.tables_MB_us.items()
        for num_ranks, rows in by_ranks.items()
    )
    return {
        "name": document.name,
        "latency_s": si(document.latency_us, -6),
        "launch_s": si(document.launch_us, -6),
        "fill_s": si(document.fill_us, -6),
        "bytes_per_s": si(document.bandwidth_GBps, 9),
        "device_bytes_per_s": None if device is None else si(device, 9),
        "efficiency": tuple(sorted(shares.items())),
        "rank_efficiency": tuple(sorted(document.rank_efficiency.items())),
        "switch_share": document.switch_share,
        "tables": tuple(sorted(tables)),
        "source": _source(document.provenance, "efficiency"),
    }


def si(value: float | None, exponent: int) -> float:
    """value * 10**exponent, exact to the last decimal digit (None: unlimited)."""
    return math.inf if value is None else float(Decimal(repr(float(value))).scaleb(exponent))
