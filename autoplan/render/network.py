# SPDX-License-Identifier: Apache-2.0
"""Which links carry what: the plan's traffic laid over the hosts of its cluster.

In comes a Plan, out go hosts with the bytes that their inner links and their network carry in one
step, by mesh axis. Members of a group form a ring in rank order, as the costs assume; a boundary
goes from each rank to the one in its place of the next stage, forward, and back. Hosts that carry
the same are one entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoplan.plan import Plan, StagePlan

AXES = ("dp", "tp")
Sums = dict[str, float]  # mesh axis, or "pp" -> bytes of one step


@dataclass(slots=True)
class HostTraffic:
    """What the devices of equal hosts send in one step.

    Attributes:
        hosts: Their numbers.
        stages: Stage of each device of the first of them, in rank order; None for an idle one.
        stage_numbers: Every stage on any of them.
        inside: Bytes over links inside the host, all devices together, by axis.
        outside: Bytes that leave the host, by axis.
    """

    hosts: tuple[int, ...]
    stages: tuple[int | None, ...]
    inside: Sums = field(default_factory=dict)
    outside: Sums = field(default_factory=dict)
    stage_numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.stage_numbers = tuple(sorted({s for s in self.stages if s is not None}))


def host_traffic(plan: Plan) -> tuple[HostTraffic, ...]:
    """One entry per kind of host, in the order of their first members."""
    ranks = range(plan.cluster.num_devices)
    host_of = hosts_of_ranks(plan)
    stage_of = {r: s.index for s in plan.stages for r in s.ranks}
    hosts = [
        HostTraffic((h,), tuple(stage_of.get(r) for r in ranks if host_of[r] == h))
        for h in range(plan.cluster.num_hosts)
    ]
    for stage in plan.stages:
        for source, target, axis, sent in _edges(plan, stage):
            mine = hosts[host_of[source]]
            sums = mine.inside if host_of[source] == host_of[target] else mine.outside
            sums[axis] = sums.get(axis, 0.0) + sent
    return _folded(hosts)


def hosts_of_ranks(plan: Plan) -> list[int]:
    """The number of the host that each rank is on."""
    given = plan.cluster.description.get("rank_hosts")
    if given is not None:
        return [int(h) for h in given]
    size = plan.cluster.devices_per_host
    return [r // size for r in range(plan.cluster.num_devices)]


def _edges(plan: Plan, stage: StagePlan) -> list[tuple[int, int, str, float]]:
    """(from, to, axis, bytes of a step) of every pair of ranks between which bytes move."""
    sent = dict.fromkeys((*AXES, "pp"), 0.0)
    for traffic in stage.traffic:
        sent[traffic.axis] += traffic.sent_bytes
    sizes = (plan.layout.dp, plan.layout.tp)
    found = []
    for axis, name in enumerate(AXES):
        stride, size = math.prod(sizes[axis + 1 :]), sizes[axis]
        if size == 1 or not sent[name]:
            continue
        for i, rank in enumerate(stage.ranks):
            place = i // stride % size
            neighbour = i + (1 - size if place == size - 1 else 1) * stride
            found.append((rank, stage.ranks[neighbour], name, sent[name]))
    if sent["pp"] and stage.index + 1 < len(plan.stages):
        passes = 2 if plan.settings.mode == "train" else 1
        for here, there in zip(stage.ranks, plan.stages[stage.index + 1].ranks):
            found.append((here, there, "pp", sent["pp"] / passes))
            if passes == 2:
                found.append((there, here, "pp", sent["pp"] / passes))
    return found


def _folded(hosts: list[HostTraffic]) -> tuple[HostTraffic, ...]:
    """Hosts whose devices are split among stages alike and that carry the same bytes, as one."""
    kinds: dict[object, HostTraffic] = {}
    for host in hosts:
        pattern = tuple(host.stages.index(s) for s in host.stages)
        key = (
            pattern,
            tuple(s is None for s in host.stages),
            tuple(sorted((k, round(v)) for k, v in host.inside.items())),
            tuple(sorted((k, round(v)) for k, v in host.outside.items())),
        )
        if key in kinds:
            known = kinds[key]
            known.hosts += host.hosts
            known.stage_numbers = tuple(sorted({*known.stage_numbers, *host.stage_numbers}))
        else:
            kinds[key] = host
    return tuple(kinds.values())
