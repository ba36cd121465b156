# SPDX-License-Identifier: Apache-2.0
"""Clusters: loading, refusing, numbering, taking apart, and the shapes of communication groups."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from autoplan.cluster import (
    Cluster,
    Curve,
    DeviceSpec,
    Group,
    KernelSpec,
    Link,
    axis_group,
    group_of,
)
from autoplan.cluster_format import known_clusters
from autoplan.errors import ClusterError
from autoplan.units import GIB

PLAIN: dict[str, Any] = {
    "name": "two-nodes",
    "num_hosts": 2,
    "devices_per_host": 4,
    "device": {
        "name": "ten-teraflop",
        "memory_GiB": 6,
        "memory_GBps": None,
        "peak_TFLOPs": {"float32": 10},
        "kernel": {"launch_us": 0, "efficiency": 1.0},
    },
    "intra_host": {"latency_us": 10, "bandwidth_GBps": 200},
    "inter_host": {"latency_us": 10, "bandwidth_GBps": 1},
}


def make(num_hosts: int = 2, devices_per_host: int = 4, **extra: Any) -> Cluster:
    device = DeviceSpec(
        name="d", memory_bytes=2**30, memory_bytes_per_s=1e12, peak_flop_per_s={"float32": 1e13}
    )
    link = Link(latency_s=1e-5, bytes_per_s=1e10)
    return Cluster(
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        device=device,
        intra_host=link,
        inter_host=link,
        **extra,
    )


def test_user_cluster_numbers_arrive_in_si() -> None:
    cluster = Cluster.from_json(PLAIN)
    assert cluster.num_devices == 8
    assert cluster.device.memory_bytes == 6 * GIB
    assert math.isinf(cluster.device.memory_bytes_per_s)
    assert dict(cluster.device.peak_flop_per_s) == {"float32": 1e13}
    assert cluster.device.kernel == KernelSpec()
    assert cluster.intra_host.latency_s == 1e-5
    assert cluster.inter_host is not None
    assert cluster.inter_host.bytes_per_s == 1e9


def test_named_cluster_shares_its_nics() -> None:
    cluster = Cluster.load("dgx-h100-2x8")
    assert (cluster.name, cluster.num_hosts, cluster.devices_per_host) == ("dgx-h100-2x8", 2, 8)
    assert cluster.inter_host is not None
    assert cluster.inter_host.bytes_per_s == 8 * 50e9
    assert cluster.inter_host.device_bytes_per_s == 50e9
    p5 = Cluster.load("aws-p5-2x8").inter_host
    assert p5 is not None
    assert p5.device_bytes_per_s == 4 * 12.5e9


@pytest.mark.parametrize("count", [2, 4])
def test_local_cpu_is_one_host(count: int) -> None:
    cluster = Cluster.load(f"local-cpu-{count}")
    assert (cluster.num_hosts, cluster.devices_per_host) == (1, count)


@pytest.mark.parametrize("kind", known_clusters())
def test_json_round_trip_is_identity(kind: str) -> None:
    cluster = Cluster.load("local-cpu-4" if kind == "local-cpu" else f"{kind}-1x1")
    again = Cluster.from_json(json.loads(json.dumps(cluster.to_json(), allow_nan=False)))
    assert again == cluster
    assert again.digest == cluster.digest


def test_json_round_trip_keeps_any_number() -> None:
    rng = random.Random(0)
    for _ in range(200):
        device = DeviceSpec(
            name="d",
            memory_bytes=rng.randrange(1, 2**40),
            memory_bytes_per_s=rng.random() * 1e13,
            peak_flop_per_s={"float32": rng.random() * 1e15, "bfloat16": 1e15 / 3},
            kernel=KernelSpec(launch_s=rng.random() * 1e-5, matmul=Curve(1 / 3, 7.0, "measured")),
        )
        link = Link(
            latency_s=rng.random() * 1e-5,
            bytes_per_s=rng.random() * 1e11,
            device_bytes_per_s=rng.random() * 1e10,
            rank_efficiency=((2, 0.5),),
            tables=(("all_reduce", 2, ((1048576.0, 1e-5), (2097152.0, 2e-5))),),
        )
        cluster = Cluster(num_hosts=1, devices_per_host=2, device=device, intra_host=link)
        assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_clusters_pickle_copy_and_hash() -> None:
    cluster = Cluster.load("dgx-a100-2x8")
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert copy.deepcopy(cluster) == cluster
    assert hash(Cluster.load("dgx-a100-2x8")) == hash(cluster)


def test_digest_sees_every_number() -> None:
    faster = copy.deepcopy(PLAIN)
    faster["device"]["peak_TFLOPs"]["float32"] = 11
    assert Cluster.from_json(PLAIN).digest != Cluster.from_json(faster).digest
    assert len(Cluster.from_json(PLAIN).digest) == 16


def test_file_may_name_shipped_parts(tmp_path: Any) -> None:
    path = tmp_path / "mine.json"
    document = {**PLAIN, "device": "a100-80g", "intra_host": "nvlink3", "inter_host": "ib-hdr"}
    path.write_text(json.dumps({**document, "nics_per_host": 4}))
    cluster = Cluster.load(str(path))
    assert cluster.device == Cluster.load("dgx-a100-1x8").device
    assert cluster.inter_host is not None
    assert cluster.inter_host.bytes_per_s == 4 * 25e9


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dgx-h10-2x8", ["dgx-h100", "known kinds", "local-cpu"]),
        ("nonsense", ["known kinds", "KIND-HxD"]),
        ("dgx-h100-2x9", ["2 hosts of 9", "1..8"]),
        ("dgx-h100-0x8", ["0 hosts"]),
        ("local-cpu-17", ["1..16"]),
        ("local-cpu-2x2", ["2 hosts", "1 host"]),
        ("missing/file.json", ["missing/file.json", "cannot read"]),
    ],
)
def test_unknown_names_are_refused_with_a_way_out(name: str, words: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.load(name)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("devise",), 1, ["devise", "device"]),
        (("device", "memori_GiB"), 1, ["$.device", "memory_GiB"]),
        (("device", "kernel", "launch"), 1, ["$.device.kernel", "launch_us"]),
        (("device", "memory_GiB"), "6", ["$.device.memory_GiB"]),
        (("device", "memory_GiB"), True, ["$.device.memory_GiB"]),
        (("device", "kernel", "efficiency"), 1.5, ["$.device.kernel.efficiency"]),
        (("intra_host", "latency_us"), -1, ["$.intra_host.latency_us"]),
        (("intra_host", "efficiency"), {"all_redcue": 0.5}, ["$.intra_host.efficiency"]),
        (("num_hosts",), 0, ["$.num_hosts"]),
        (("device", "peak_TFLOPs"), {"fp32": 1}, ["fp32", "float32"]),
        (("device", "peak_TFLOPs"), {}, ["no peaks"]),
        (("inter_host",), None, ["inter_host"]),
        (("rank_hosts",), [0, 0, 0, 0, 0, 1, 1, 1], ["exactly 4 times"]),
        (("fast_pairs",), [[0, 1]], ["pair_link"]),
        (("device",), "h100-80", ["h100-80g"]),
    ],
)
def test_malformed_documents_are_refused(path: tuple[str, ...], value: Any, words: Any) -> None:
    document = copy.deepcopy(PLAIN)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ClusterError) as caught:
        Cluster.from_json(document)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_r72_mixed_devices_are_refused_with_the_limiting_one() -> None:
    """Of 32, 20 and 20 GB the small ones limit, and 12 stay unused."""
    kinds = [
        {**PLAIN["device"], "name": n, "memory_GiB": g} for n, g in (("big", 32), ("small", 20))
    ]
    document = {**PLAIN, "num_hosts": 1, "device": [kinds[0], kinds[1], kinds[1]]}
    with pytest.raises(ClusterError) as caught:
        Cluster.from_json(document)
    message = str(caught.value)
    assert "big 32 GiB, small 20 GiB, small 20 GiB" in message
    assert "limiting device is small with 20 GiB" in message
    assert "leaves 12 GiB of the others unused" in message
    with pytest.raises(ClusterError, match=r"limiting device is l4-24g .*leaves 56 GiB"):
        Cluster.from_json({**document, "device": ["h100-80g", "l4-24g"]})


def test_files_that_are_not_json_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"name": ')
    with pytest.raises(ClusterError, match="not JSON"):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("latency_s", -1.0), ("bytes_per_s", 0.0), ("switch_share", 1.5), ("launch_s", math.inf)],
)
def test_links_refuse_impossible_numbers(field: str, value: Any) -> None:
    with pytest.raises(ClusterError, match="expected"):
        replace(Link(latency_s=0.0, bytes_per_s=1.0), **{field: value})


def test_tables_must_rise() -> None:
    falling = (("all_reduce", 2, ((1.0, 2e-6), (2.0, 1e-6))),)
    with pytest.raises(ClusterError, match="never falling"):
        Link(latency_s=0.0, bytes_per_s=1.0, tables=falling)


def test_ranks_follow_hosts_when_interleaved() -> None:
    """USERS T06d: 0,2,4,6 on one node."""
    cluster = make(rank_hosts=(0, 1) * 4)
    assert cluster.ranks == (0, 2, 4, 6, 1, 3, 5, 7)
    assert [cluster.host_of(r) for r in range(4)] == [0, 1, 0, 1]
    assert make().ranks == tuple(range(8))


def test_ranks_follow_fast_pairs() -> None:
    """USERS R67: fast links (0,2) and (1,3); the tensor-parallel groups are exactly those pairs."""
    cluster = make(
        1, 4, fast_pairs=((0, 2), (1, 3)), pair_link=Link(latency_s=0.0, bytes_per_s=1e11)
    )
    assert cluster.ranks == (0, 2, 1, 3)
    assert axis_group(cluster, cluster.ranks, (2, 2), 1).local_link == "pair"
    assert axis_group(cluster, cluster.ranks, (2, 2), 0).local_link == "intra"
    assert axis_group(cluster, (0, 1, 2, 3), (2, 2), 1).local_link == "intra"
    assert cluster.take(2).fast_pairs == ((0, 1),)
    assert cluster.take(3).fast_pairs == ((0, 2),)
    assert cluster.take(1).pair_link is None


def test_take_gives_whole_hosts_or_part_of_one() -> None:
    cluster = make(4, 8)
    assert cluster.take(32) is cluster
    assert (cluster.take(16).num_hosts, cluster.take(16).devices_per_host) == (2, 8)
    assert (cluster.take(3).num_hosts, cluster.take(3).devices_per_host) == (1, 3)
    interleaved = make(4, 2, rank_hosts=(0, 1, 2, 3, 0, 1, 2, 3)).take(4)
    assert interleaved.rank_hosts == (0, 1, 0, 1)
    for count in (0, 9, 12, 33):
        with pytest.raises(ClusterError, match=r"1\.\.8"):
            cluster.take(count)


@pytest.mark.parametrize(
    ("axis_sizes", "axis", "expected"),
    [
        ((2, 4), 1, Group(num_ranks=4, ranks_per_host=4)),
        ((2, 4), 0, Group(num_ranks=2, num_hosts=2, ranks_per_host=1, groups_per_host=4)),
        ((8,), 0, Group(num_ranks=8, num_hosts=2, ranks_per_host=4)),
        ((4, 2), 0, Group(num_ranks=4, num_hosts=2, ranks_per_host=2, groups_per_host=2)),
        ((8, 1), 1, Group(num_ranks=1, ranks_per_host=1)),
    ],
)
def test_axis_groups(axis_sizes: tuple[int, ...], axis: int, expected: Group) -> None:
    assert axis_group(make(), tuple(range(8)), axis_sizes, axis) == expected
    interleaved = make(rank_hosts=(0, 1) * 4)
    assert axis_group(interleaved, interleaved.ranks, axis_sizes, axis) == expected


def test_axis_group_is_the_worst_one() -> None:
    """Ranks 2..5 of hosts of 4: the inner axis (2,3), (4,5) stays inside, the outer one leaves."""
    assert axis_group(make(), (2, 3, 4, 5), (2, 2), 1).num_hosts == 1
    assert axis_group(make(), (1, 2, 3, 4), (2, 2), 1).num_hosts == 2
    uneven = axis_group(make(), (1, 2, 3, 4), (4,), 0)
    assert uneven == Group(num_ranks=4, num_hosts=2, ranks_per_host=1)


def test_groups_refuse_wrong_ranks() -> None:
    cluster = make()
    for ranks in ((), (0, 0), (8,), (-1,)):
        with pytest.raises(ClusterError):
            group_of(cluster, ranks)
    with pytest.raises(ClusterError, match="product"):
        axis_group(cluster, tuple(range(8)), (4, 8), 0)
    assert group_of(cluster, (3, 4), 4).groups_per_host == 4
    assert group_of(cluster, (0, 1), 4).groups_per_host == 1
