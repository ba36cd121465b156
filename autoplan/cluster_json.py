# SPDX-License-Identifier: Apache-2.0
"""A Cluster as a JSON document in the units of profiles/README.md; `cluster_format.py` reads it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autoplan.cluster_format import CURVES, si
from autoplan.units import GIB

if TYPE_CHECKING:
    from autoplan.cluster import Cluster, Curve, DeviceSpec, Link


def write_cluster(cluster: Cluster) -> dict[str, Any]:
    """The cluster as JSON data that needs no other file: `convert_cluster` reads it back."""
    links = {
        "intra_host": cluster.intra_host,
        "inter_host": cluster.inter_host,
        "pair_link": cluster.pair_link,
    }
    pairs = cluster.fast_pairs
    return {
        "name": cluster.name,
        "num_hosts": cluster.num_hosts,
        "devices_per_host": cluster.devices_per_host,
        "device": _device_json(cluster.device),
        **{key: _link_json(link) if link else None for key, link in links.items()},
        "rank_hosts": list(cluster.rank_hosts) if cluster.rank_hosts is not None else None,
        "fast_pairs": [list(p) for p in pairs] if pairs is not None else None,
        "cores_per_host": cluster.cores_per_host,
        "price_per_device_hour": cluster.price_per_device_hour,
    }


def _device_json(device: DeviceSpec) -> dict[str, Any]:
    kernel, provenance = (
        device.kernel,
        {"kernel.launch_us": {"source": device.kernel.launch_source}},
    )
    efficiency = {}
    for family in CURVES:
        curve: Curve = getattr(kernel, family)
        half = (
            {"half_MB": si(curve.half, -6)}
            if family == "memory"
            else {"half_GFLOP": si(curve.half, -9)}
        )
        efficiency[family] = {"share": curve.share, **half}
        provenance[f"kernel.efficiency.{family}"] = {"source": curve.source}
    return {
        "name": device.name,
        "memory_GiB": device.memory_bytes / GIB,
        "memory_GBps": _unit(device.memory_bytes_per_s, 9),
        "peak_TFLOPs": {dtype: _unit(peak, 12) for dtype, peak in device.peak_flop_per_s.items()},
        "kernel": {
            "launch_us": si(kernel.launch_s, 6),
            "efficiency": efficiency,
            "sustained": kernel.sustained,
            "tiles": asdict(kernel.tiles) if kernel.tiles else None,
            "flash": {
                flash.name: {k: v for k, v in asdict(flash).items() if k != "name"}
                for flash in kernel.flash
            },
            "elementwise_GFLOPs": {
                op: [si(ahead, -9), si(back, -9)] for op, ahead, back in kernel.elementwise
            },
            "packing_GBps": _unit(kernel.packing_bytes_per_s, 9),
            "update_factor": kernel.update_factor,
            "host_us": {
                key.removesuffix("_s"): [si(t, 6) for t in seconds]
                if isinstance(seconds, tuple)
                else si(seconds, 6)
                for key, seconds in asdict(kernel.host).items()
            },
        },
        "provenance": provenance,
    }


def _link_json(link: Link) -> dict[str, Any]:
    tables: dict[str, dict[str, list[list[float]]]] = {}
    for kind, num_ranks, rows in link.tables:
        tables.setdefault(kind, {})[str(num_ranks)] = [[si(s, -6), si(t, 6)] for s, t in rows]
    return {
        "name": link.name,
        "latency_us": si(link.latency_s, 6),
        "launch_us": si(link.launch_s, 6),
        "fill_us": si(link.fill_s, 6),
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


def _unit(value: float, exponent: int) -> float | None:
    return None if math.isinf(value) else si(value, -exponent)
