# SPDX-License-Identifier: Apache-2.0
"""The shipped profiles: every file loads, every number says where it comes from, sizes are sane."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoplan.cluster import Cluster
from autoplan.cluster_format import known_clusters, known_devices, known_links, profiles_dir

NUMBERS = {
    "devices": ("memory_GiB", "memory_GBps", "peak_TFLOPs", "kernel.launch_us"),
    "links": ("bandwidth_GBps", "latency_us", "launch_us", "efficiency"),
    "clusters": ("devices_per_host",),
    "runtimes": (),
}
FILES = sorted(profiles_dir().glob("*/*.json"))


def read(path: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def test_the_catalogue_is_there() -> None:
    assert {"v100-32g", "a100-40g", "a100-80g", "h100-80g", "h200-141g", "b200-192g"} <= set(
        known_devices()
    )
    assert {"nvlink2", "nvlink5", "pcie4-x16", "ib-ndr", "eth-25g", "loopback"} <= set(
        known_links()
    )
    assert {"dgx-v100", "dgx-h100", "aws-p5", "gcp-a3", "local-cpu"} <= set(known_clusters())


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_number_has_provenance(path: Any) -> None:
    data = read(path)
    assert data["name"] == path.stem
    provenance = data["provenance"]
    wanted = set(NUMBERS[path.parent.name])
    wanted |= {"switch_share", "rank_efficiency", "price_per_device_hour"} & set(data)
    kernel = data.get("kernel", {})
    wanted |= {f"kernel.{k}" for k in ("tiles", "flash", "sustained") if k in kernel}
    wanted |= {f"kernel.efficiency.{f}" for f in data.get("kernel", {}).get("efficiency", {})}
    assert wanted <= set(provenance)
    for entry in provenance.values():
        if entry["source"] in ("datasheet", "published"):
            assert entry["document"]
        if entry["source"] == "measured":
            assert "torch" in entry["note"]


@pytest.mark.parametrize("kind", known_clusters())
def test_every_kind_loads_at_every_size(kind: str) -> None:
    full = read(profiles_dir() / "clusters" / f"{kind}.json")["devices_per_host"]
    for size in range(1, full + 1):
        cluster = Cluster.load(f"{kind}-1x{size}")
        assert cluster.num_devices == size
        assert 2**30 < cluster.device.memory_bytes < 2**38
        assert {"bfloat16", "float16", "float32", "float64"} <= set(cluster.device.peak_flop_per_s)
    if kind != "local-cpu":
        assert Cluster.load(f"{kind}-3x1").num_hosts == 3


def test_every_link_serves_a_cluster_or_a_user() -> None:
    """Each shipped link can be named in a cluster file."""
    base = Cluster.load("dgx-a100-1x8").to_json()
    for name in known_links():
        cluster = Cluster.from_json({**base, "intra_host": name, "nics_per_host": 1})
        assert cluster.intra_host.name == name
        assert cluster.intra_host.latency_s < 1e-3


def test_newer_generations_are_faster() -> None:
    order = ["v100-32g", "a100-80g", "h100-80g", "b200-192g"]
    kinds = {"v100-32g": "dgx-v100", "a100-80g": "dgx-a100", "h100-80g": "dgx-h100"}
    clusters = [Cluster.load(f"{kinds.get(name, 'dgx-b200')}-2x8") for name in order]
    assert [c.device.name for c in clusters] == order
    for values in (
        [c.device.peak_flop_per_s["float16"] for c in clusters],
        [c.device.memory_bytes_per_s for c in clusters],
        [c.intra_host.bytes_per_s for c in clusters],
        [c.inter_host.bytes_per_s for c in clusters if c.inter_host],
    ):
        assert values == sorted(values)
