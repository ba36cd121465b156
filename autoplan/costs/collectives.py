# SPDX-License-Identifier: Apache-2.0
"""Seconds of one collective over one group of ranks.

In comes a kind, bytes and a `Group` (how many members, on how many hosts, who shares the NICs); out
goes a `Cost`. A measured table beats every formula. The formulas are alpha-beta: a number of steps
times the latency, plus the bytes that cross the slowest place divided by its bandwidth. Rings pass
through hosts one after the other, trees and the switch work on both tiers at once, as NCCL does it.
"""

from __future__ import annotations

import math
from functools import lru_cache

from autoplan.cluster import Group
from autoplan.costs.profile import NOTHING, Cost, LinkProfile, Profiles, Source, require_collective
from autoplan.errors import ProfileError

_TWO_TIERS = ("all_reduce", "all_gather", "reduce_scatter")


@lru_cache(maxsize=1 << 16)
def collective_time(profiles: Profiles, kind: str, size_bytes: float, group: Group) -> Cost:
    """Seconds of one collective; 0 for a group of one.

    Args:
        profiles: The cluster's links.
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "send".
        size_bytes: all_reduce, all_to_all: of the local tensor. all_gather: of the gathered result.
            reduce_scatter: of the local input. send: of the message.
        group: Who takes part, from `group_of` or `axis_group`.

    Returns:
        The seconds; more bytes are never faster, nor is a slower link.

    Raises:
        ProfileError: An unknown kind, or a group across hosts on a cluster without a link for it.
    """
    require_collective(kind)
    if group.num_ranks == 1:
        return NOTHING
    local, inter = _links(profiles, group)
    table = (inter or local).measured(kind, group.num_ranks, size_bytes)
    if table is not None:
        return table
    slowest = inter or local
    source: Source = "assumed" if "assumed" in (local.source, slowest.source) else "alpha-beta"
    launch_s = max(local.link.launch_s, slowest.link.launch_s)
    time_s = _time(kind, size_bytes, group, local, inter)
    if inter is not None and group.ranks_per_host > 1 and kind in _TWO_TIERS:
        moving_s = time_s - _time(kind, 0.0, group, local, inter)
        time_s += _fill_time(moving_s, inter.link.fill_s)
    return Cost(launch_s + time_s, source)


def _time(
    kind: str, size_bytes: float, group: Group, local: LinkProfile, inter: LinkProfile | None
) -> float:
    """Seconds by the formula of a kind, without its launch."""
    if kind == "all_reduce":
        return _all_reduce_time(size_bytes, group, local, inter)
    if kind == "all_to_all":
        return _all_to_all_time(size_bytes, group, local, inter)
    if kind == "send":
        alpha = (inter or local).link.latency_s
        return alpha + size_bytes / _ring_rate(kind, group, local, inter)
    return _ring_time(kind, size_bytes, group, local, inter)


def _fill_time(moving_s: float, fill_s: float) -> float:
    """Seconds more than the bytes take, until the pipeline through both tiers is full.

        fill * t / (t + fill / 2)        short ones take three times as long, long ones fill more

    Source: the form and its one constant are a fit over nccl-tests of 2 to 4 hosts of 8
    (aws-samples/awsome-distributed-training, p4de and p5; stas00/ml-engineering, p6-b200).
    """
    return fill_s * moving_s / (moving_s + fill_s / 2.0) if moving_s > 0 else 0.0


def _links(profiles: Profiles, group: Group) -> tuple[LinkProfile, LinkProfile | None]:
    """The link inside a host, and the one between hosts if the group needs it."""
    local = profiles.pair if group.local_link == "pair" else profiles.intra
    if local is None or (group.num_hosts > 1 and profiles.inter is None):
        raise ProfileError(
            f"{group} needs a link that the cluster lacks: expected pair_link for fast pairs and "
            "inter_host for several hosts. Make the group and the profiles from one cluster."
        )
    return local, profiles.inter if group.num_hosts > 1 else None


def _ring_rate(kind: str, group: Group, local: LinkProfile, inter: LinkProfile | None) -> float:
    """Bytes/s at the slowest place of a ring: one device's link, or a host's share of its NICs.

    The groups that leave a host at the same time share its NICs, and a group reaches no more of
    them than its members there own (`Link.device_bytes_per_s`).

    Source: Zheng et al., "Alpa", OSDI 2022: bandwidth of a mesh axis = min(intra, NICs / rings).
    """
    inside = local.device_rate(kind, group.num_ranks)
    if inter is None:
        return inside
    outside = _nic_rate(kind, group, inter)
    return outside if group.num_ranks == group.num_hosts else min(inside, outside)


def _nic_rate(kind: str, group: Group, inter: LinkProfile) -> float:
    """Bytes/s by which one group leaves one host."""
    shared = inter.rate(kind, group.num_hosts) / group.groups_per_host
    return min(shared, inter.device_rate(kind, group.num_hosts) * group.ranks_per_host)


def _ring_time(
    kind: str, size_bytes: float, group: Group, local: LinkProfile, inter: LinkProfile | None
) -> float:
    """Seconds of an all-gather or a reduce-scatter around a ring.

        t = (n - h) alpha_intra + (h - 1) alpha_inter + (n - 1)/n * S / B        h hosts, n ranks

    and (n - 1) alpha + (n - 1)/n * S / B inside one host.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 2005; latency by hops of either tier as in NCCL's tuning model.
    """
    n, hosts = group.num_ranks, group.num_hosts
    hops_s = (n - hosts) * local.link.latency_s
    if inter is not None:
        hops_s += (hosts - 1) * inter.link.latency_s
    return hops_s + (n - 1) / n * size_bytes / _ring_rate(kind, group, local, inter)


def _all_reduce_time(
    size_bytes: float, group: Group, local: LinkProfile, inter: LinkProfile | None
) -> float:
    """Seconds of an all-reduce: the fastest of ring, tree and, where there is one, the switch.

        ring     2 (n - 1) (alpha + S / (n B))            reduce-scatter, then all-gather
        tree     2 log2(n) alpha + 2 S / B
        switch   2 alpha + S / (B * switch_share)         it sums what passes through

    Across hosts each direction of a host's NICs carries 2 S in a double binary tree, S where there
    are but two hosts; inside the hosts work goes on at the same time, so the slower tier counts.

    Source: Patarasuk and Yuan, JPDC 2009 (ring); Sanders, Speck and Traeff, "Two-tree algorithms
    for full bandwidth broadcast, reduction and scan", Parallel Computing 2009 (tree).
    """
    kind = "all_reduce"
    ring_s = 2 * _ring_time(kind, size_bytes, group, local, inter)
    on_host = math.ceil(group.num_ranks / group.num_hosts)
    alpha, rate = local.link.latency_s, local.device_rate(kind, group.num_ranks)
    inside = [(2 * math.ceil(math.log2(on_host)) * alpha, 2 * size_bytes / rate)]
    if on_host == 1:
        inside = [(0.0, 0.0)]
    elif local.link.switch_share is not None:
        inside.append((2 * alpha, size_bytes / (local.link.bytes_per_s * local.link.switch_share)))
    hops_s = across_s = 0.0
    if inter is not None:
        hops_s = 2 * math.ceil(math.log2(group.num_hosts)) * inter.link.latency_s
        passes = 1 if group.num_hosts == 2 else 2
        across_s = passes * size_bytes / _nic_rate(kind, group, inter)
    return min(
        ring_s, *(hops_s + steps_s + max(inside_s, across_s) for steps_s, inside_s in inside)
    )


def _all_to_all_time(
    size_bytes: float, group: Group, local: LinkProfile, inter: LinkProfile | None
) -> float:
    """Seconds of an all-to-all by direct messages of S/n to each of the others.

        t = (n - 1) alpha + (n - 1)/n * S / B

    Across hosts the k members on a host send k (n - k)/n * S over its NICs while (k - 1)/n * S of
    each stays inside; the slower of the two counts.

    Source: Thakur, Rabenseifner and Gropp, IJHPCA 2005, pairwise exchange.
    """
    n, k = group.num_ranks, group.ranks_per_host
    inside_s = (k - 1) / n * size_bytes / local.device_rate("all_to_all", n)
    hops_s = (k - 1) * local.link.latency_s
    if inter is None:
        return hops_s + inside_s
    across_s = k * (n - k) / n * size_bytes / _nic_rate("all_to_all", group, inter)
    return hops_s + (n - k) * inter.link.latency_s + max(inside_s, across_s)
