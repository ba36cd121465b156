# SPDX-License-Identifier: Apache-2.0
"""Collectives: textbook closed forms on ideal links, monotonicity, published NCCL times."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from autoplan.cluster import Cluster, DeviceSpec, Group, Link, axis_group, group_of
from autoplan.cluster_format import COLLECTIVES
from autoplan.costs.collectives import collective_time
from autoplan.costs.profile import Profiles
from autoplan.errors import ProfileError

ALPHA, INSIDE, BETWEEN = 10e-6, 200e9, 1e9
S = 2.0**27


def make(
    num_hosts: int, devices: int, intra: Link | None = None, inter: Link | None = None, **extra: Any
) -> Cluster:
    device = DeviceSpec(
        name="d", memory_bytes=2**30, memory_bytes_per_s=1e12, peak_flop_per_s={"float32": 1e13}
    )
    return Cluster(
        num_hosts=num_hosts,
        devices_per_host=devices,
        device=device,
        intra_host=intra or Link(latency_s=ALPHA, bytes_per_s=INSIDE),
        inter_host=inter or Link(latency_s=ALPHA, bytes_per_s=BETWEEN),
        **extra,
    )


def seconds(cluster: Cluster, kind: str, size_bytes: float, group: Group) -> float:
    return collective_time(Profiles.of(cluster), kind, size_bytes, group).time_s


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_textbook_forms_inside_a_host(n: int) -> None:
    """PLANNERS 7.6."""
    cluster = make(1, n)
    group = group_of(cluster, tuple(range(n)))
    step = ALPHA + S / (n * INSIDE)
    assert seconds(cluster, "all_reduce", S, group) == pytest.approx(2 * (n - 1) * step, rel=1e-12)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert seconds(cluster, kind, S, group) == pytest.approx((n - 1) * step, rel=1e-12)


def test_send_is_alpha_plus_bytes_over_bandwidth() -> None:
    cluster = make(2, 4)
    near = seconds(cluster, "send", S, group_of(cluster, (0, 1)))
    far = seconds(cluster, "send", S, group_of(cluster, (3, 4)))
    assert near == pytest.approx(ALPHA + S / INSIDE, rel=1e-12)
    assert far == pytest.approx(ALPHA + S / BETWEEN, rel=1e-12)
    shared = seconds(cluster, "send", S, group_of(cluster, (3, 4), 4))
    assert shared == pytest.approx(ALPHA + 4 * S / BETWEEN, rel=1e-12)


def test_small_all_reduce_takes_the_tree() -> None:
    cluster = make(1, 16)
    small = seconds(cluster, "all_reduce", 1024, group_of(cluster, tuple(range(16))))
    assert small == pytest.approx(2 * 4 * ALPHA + 2 * 1024 / INSIDE, rel=1e-12)


def test_one_device_per_host_is_a_ring_over_the_nics() -> None:
    cluster = make(4, 1)
    group = group_of(cluster, (0, 1, 2, 3))
    ring = 2 * 3 * (ALPHA + S / (4 * BETWEEN))
    assert seconds(cluster, "all_reduce", S, group) == pytest.approx(ring, rel=1e-12)
    gather = 3 * (ALPHA + S / (4 * BETWEEN))
    assert seconds(cluster, "all_gather", S, group) == pytest.approx(gather, rel=1e-12)


def test_groups_that_leave_a_host_share_its_nics() -> None:
    """2 hosts of 4: the outer axis of a (2, 4) mesh is 4 groups of one device per host."""
    cluster = make(2, 4)
    group = axis_group(cluster, cluster.ranks, (2, 4), 0)
    shared = 2 * (ALPHA + S / (2 * BETWEEN / 4))
    assert seconds(cluster, "all_reduce", S, group) == pytest.approx(shared, rel=1e-12)
    alone = seconds(cluster, "all_reduce", S, dataclasses.replace(group, groups_per_host=1))
    assert alone == pytest.approx(2 * (ALPHA + S / (2 * BETWEEN)), rel=1e-12)


def test_a_device_reaches_only_its_own_nic() -> None:
    nic = Link(latency_s=0.0, bytes_per_s=8e9, device_bytes_per_s=1e9)
    cluster = make(2, 8, inter=nic)
    assert seconds(cluster, "send", S, group_of(cluster, (0, 8))) == pytest.approx(S / 1e9)
    assert seconds(cluster, "send", S, group_of(cluster, (0, 8), 8)) == pytest.approx(S / 1e9)
    whole = seconds(cluster, "all_gather", S, group_of(cluster, tuple(range(16))))
    assert whole == pytest.approx(14 * ALPHA + 15 / 16 * S / 8e9)


def test_across_two_hosts_each_direction_carries_the_tensor_once() -> None:
    cluster = make(2, 4)
    group = group_of(cluster, tuple(range(8)))
    latency = 2 * 2 * ALPHA + 2 * ALPHA
    assert seconds(cluster, "all_reduce", S, group) == pytest.approx(latency + S / BETWEEN)
    gather = (6 + 1) * ALPHA + 7 / 8 * S / BETWEEN
    assert seconds(cluster, "all_gather", S, group) == pytest.approx(gather)
    # 4 members send 4/8 of S each to the other host; 3/8 stay inside, at the same time
    exchange = (3 + 4) * ALPHA + 4 * 4 / 8 * S / BETWEEN
    assert seconds(cluster, "all_to_all", S, group) == pytest.approx(exchange)


def test_the_switch_sums_what_passes_through() -> None:
    switch = Link(latency_s=0.0, bytes_per_s=INSIDE, switch_share=1.0)
    cluster = make(1, 8, intra=switch)
    group = group_of(cluster, tuple(range(8)))
    assert seconds(cluster, "all_reduce", S, group) == pytest.approx(S / INSIDE)
    assert seconds(cluster, "all_gather", S, group) == pytest.approx(7 / 8 * S / INSIDE)


def test_fast_pairs_use_their_link() -> None:
    """USERS R67."""
    pair = Link(latency_s=0.0, bytes_per_s=1e12)
    cluster = make(1, 4, fast_pairs=((0, 2), (1, 3)), pair_link=pair)
    assert seconds(cluster, "all_reduce", S, group_of(cluster, (0, 2))) == pytest.approx(S / 1e12)
    slow = seconds(cluster, "all_reduce", S, group_of(cluster, (0, 1)))
    assert slow == pytest.approx(2 * ALPHA + S / INSIDE)


def test_a_measured_table_beats_the_declared_numbers() -> None:
    """USERS R68, R69."""
    rows = (("all_reduce", 2, ((S, 0.5),)),)
    cluster = make(1, 4, intra=Link(latency_s=ALPHA, bytes_per_s=INSIDE, tables=rows))
    cost = collective_time(Profiles.of(cluster), "all_reduce", S, group_of(cluster, (0, 1)))
    assert (cost.time_s, cost.source) == (0.5, "measured")
    assert seconds(cluster, "all_reduce", S, group_of(cluster, (0, 1, 2))) < 0.01
    assert seconds(cluster, "all_gather", S, group_of(cluster, (0, 1))) < 0.01


def test_one_rank_and_the_sources() -> None:
    cluster = Cluster.load("rtx4090-pcie-1x4")
    profiles = Profiles.of(cluster)
    assert collective_time(profiles, "all_reduce", S, group_of(cluster, (0,))).time_s == 0.0
    assert collective_time(profiles, "send", S, group_of(cluster, (0, 1))).source == "assumed"
    dgx = Cluster.load("dgx-a100-1x8")
    cost = collective_time(Profiles.of(dgx), "all_reduce", S, group_of(dgx, (0, 1)))
    assert cost.source == "alpha-beta"


def test_wrong_kinds_and_groups_are_refused() -> None:
    cluster = make(1, 2)
    with pytest.raises(ProfileError, match="all_reduce, all_gather"):
        collective_time(Profiles.of(cluster), "allreduce", S, group_of(cluster, (0, 1)))
    lonely = Profiles.of(Cluster.load("local-cpu-2"))
    with pytest.raises(ProfileError, match="inter_host"):
        collective_time(lonely, "send", S, Group(num_ranks=2, num_hosts=2, ranks_per_host=1))


SHIPPED = ("dgx-v100-2x8", "dgx-a100-4x8", "dgx-h100-16x8", "aws-p4d-2x8", "l4-single-8x1")


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_more_bytes_are_never_faster(name: str, kind: str) -> None:
    cluster = Cluster.load(name)
    n = cluster.num_devices
    meshes = [(n,), (2, n // 2), (n // 2, 2)]
    groups = {axis_group(cluster, cluster.ranks, m, a) for m in meshes for a in range(len(m))}
    sizes = [0.0, *(2.0**k for k in range(36))]
    for group in groups:
        times = [seconds(cluster, kind, size, group) for size in sizes]
        assert times == sorted(times)
        assert all(0 < t < math.inf for t in times if group.num_ranks > 1)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_faster_link_is_never_slower(kind: str) -> None:
    slow = Link(latency_s=20e-6, bytes_per_s=10e9, launch_s=5e-6, device_bytes_per_s=2e9)
    better: list[dict[str, Any]] = [
        {"latency_s": 1e-6},
        {"bytes_per_s": 20e9},
        {"device_bytes_per_s": 4e9},
        {"launch_s": 0.0},
        {"switch_share": 0.3},
        {"efficiency": ()},
    ]
    base = dataclasses.replace(slow, efficiency=(("all", 0.5),))
    for change, which in itertools.product(better, ("intra", "inter")):
        before = make(4, 4, intra=base, inter=base)
        after = make(
            4, 4, **{"intra": base, "inter": base, which: dataclasses.replace(base, **change)}
        )
        for ranks in (
            (0, 1),
            (0, 4),
            tuple(range(4)),
            tuple(range(8)),
            tuple(range(16)),
            (2, 3, 4),
        ):
            for size in (1e3, 1e6, 1e9):
                group = group_of(before, ranks, 2)
                assert seconds(after, kind, size, group) <= seconds(before, kind, size, group)


@pytest.mark.parametrize(
    ("name", "ranks", "kind", "size_bytes", "time_us"),
    [
        # VIA-Research/vTrain trace/a100/AR_GPU2_1M_1024M_LUT, .../AR_GPU8_1M_1024M_LUT
        ("dgx-a100-1x8", 2, "all_reduce", 67108864, 404.7),
        ("dgx-a100-1x8", 8, "all_reduce", 8388608, 134.3),
        ("dgx-a100-1x8", 8, "all_reduce", 1073741824, 8193.0),
        # VIA-Research/vTrain trace/v100/AR_GPU2_1M_1024M_LUT, .../AR_GPU8_1M_1024M_LUT
        ("dgx-v100-1x8", 2, "all_reduce", 67108864, 2998.9),
        ("dgx-v100-1x8", 8, "all_reduce", 268435456, 3527.4),
        # stas00/ml-engineering network/README.md, nccl-tests on one A100 node
        ("dgx-a100-1x8", 8, "all_reduce", 67108864, 684.6),
        # stas00/ml-engineering network/README.md, all_reduce_bench.py on one H200 node
        ("dgx-h200-1x8", 8, "all_reduce", 524288, 38.3251),
        ("dgx-h200-1x8", 8, "all_reduce", 67108864, 338.917),
        # stas00/ml-engineering network/README.md, SHARP by GPU count; collectives on one
        ("dgx-h200-1x8", 4, "all_reduce", 8589934592, 35466.3),
        ("dgx-h200-1x8", 8, "all_gather", 17179869184, 41594.9),
        ("dgx-h200-1x8", 8, "reduce_scatter", 17179869184, 41422.9),
        # stas00/ml-engineering network/README.md, P6-B200 one node against four nodes
        ("dgx-b200-1x8", 8, "all_reduce", 268435456, 727.062),
        ("dgx-b200-4x8", 32, "all_reduce", 4294967296, 22053.1),
        # aws-samples/awsome-distributed-training micro-benchmarks/nccl-tests, p4de and p5, 2 nodes
        ("aws-p4d-2x8", 16, "all_reduce", 1024, 165.0),
        ("aws-p4d-2x8", 16, "all_reduce", 268435456, 7201.7),
        ("aws-p5-2x8", 16, "all_reduce", 268435456, 1468.2),
        ("aws-p5-2x8", 16, "all_reduce", 4294967296, 17286.0),
        # coreweave/nccl-tests README.md, H100 with SHARP sample log
        ("dgx-h100-12x8", 96, "all_reduce", 2147483648, 11163.0),
    ],
)
def test_published_collectives(
    name: str, ranks: int, kind: str, size_bytes: int, time_us: float
) -> None:
    cluster = Cluster.load(name)
    time_s = seconds(cluster, kind, size_bytes, group_of(cluster, cluster.ranks[:ranks]))
    assert time_s * 1e6 == pytest.approx(time_us, rel=0.35)
