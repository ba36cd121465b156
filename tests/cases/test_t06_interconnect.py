# SPDX-License-Identifier: Apache-2.0
"""T06: what the links decide. Closed forms with wide margins: any sane cost model agrees."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from cases.models import linears, mean_square, wide_blocks
from cases.running import plain_cluster

import autoplan
from autoplan.plan import Plan
from autoplan.plan_estimates import Alternative

GIB = 2**30


@lru_cache
def slow_link() -> Plan:
    """a: eight linears of 1024, 262,144 rows, two devices on 0.25 GB/s."""
    return autoplan.optimize(
        linears(8, 1024),
        plain_cluster(2, memory_bytes=40 * GIB, bytes_per_s=0.25e9),
        {"input": torch.empty(262144, 1024, device="meta")},
        loss_fn=mean_square,
        optimizer="sgd",
    )


@lru_cache
def too_big() -> Plan:
    """b: 32 GiB of weights and gradients, 16 rows, two devices of 24 GiB on 200 GB/s."""
    return autoplan.optimize(
        wide_blocks(2, 16384, 65536),
        plain_cluster(2, memory_bytes=24 * GIB, bytes_per_s=200e9),
        {"input": torch.empty(16, 16384, device="meta")},
        loss_fn=mean_square,
        optimizer="sgd",
        memory_reserve=0.0,
        pins=autoplan.Pins(num_microbatches=1),
    )


@lru_cache
def two_hosts(rank_hosts: tuple[int, ...] | None) -> Plan:
    """c and d: 32 GiB over two hosts of four devices of 6 GiB, 200 GB/s inside and 1 GB/s
    between."""
    cluster = plain_cluster(
        8,
        num_hosts=2,
        memory_bytes=6 * GIB,
        bytes_per_s=200e9,
        between_bytes_per_s=1e9,
        rank_hosts=rank_hosts,
    )
    return autoplan.optimize(
        wide_blocks(8, 8192, 32768),
        cluster,
        {"input": torch.empty(4096, 8192, device="meta")},
        loss_fn=mean_square,
        optimizer="sgd",
        memory_reserve=0.0,
        pins=autoplan.Pins(num_microbatches=8),
    )


def _layout(plan: Plan) -> tuple[int, int, int]:
    return plan.layout.dp, plan.layout.tp, plan.layout.pp


def _alternative(plan: Plan, dp: int, tp: int, pp: int) -> Alternative:
    return next(a for a in plan.alternatives if (a.dp, a.tp, a.pp) == (dp, tp, pp))


def test_slow_link_and_big_batch_give_data_parallelism() -> None:
    """Products 6 * 262144 * 8 * 1024^2 / 2e13 = 0.66 s, one all-reduce of 33.6 MB at 0.25 GB/s =
    0.13 s."""
    plan = slow_link()
    assert _layout(plan) == (2, 1, 1)
    assert plan.estimate.step_time_s == pytest.approx(0.79, rel=0.10)
    others = {(a.dp, a.tp, a.pp): a.step_time_s for a in plan.alternatives}
    for layout, step in others.items():
        assert step is None or step > plan.estimate.step_time_s, layout


def test_fast_link_and_too_big_a_model_give_tensor_parallelism() -> None:
    """Products 6 * 16 * 4.29e9 / 2e13 = 20.6 ms."""
    plan = too_big()
    assert _layout(plan) == (1, 2, 1)
    assert plan.estimate.step_time_s == pytest.approx(20.6e-3, rel=0.10)
    assert plan.estimate.peak_memory_bytes <= 24 * GIB
    assert {p.spec for p in plan.parameters.values()} <= {"RS(0)", "RS(1)"}
    assert {(a.dp, a.tp, a.pp) for a in plan.alternatives} == {(1, 1, 1), (1, 1, 2), (2, 1, 1)}


@pytest.mark.parametrize(
    "rank_hosts", [None, (0, 1, 0, 1, 0, 1, 0, 1)], ids=["by host", "interleaved"]
)
def test_no_tensor_parallel_group_spans_hosts(rank_hosts: tuple[int, ...] | None) -> None:
    """One stage a host: exactly one boundary crosses, and the hosts' numbering does not matter."""
    plan = two_hosts(rank_hosts)
    host = rank_hosts or (0, 0, 0, 0, 1, 1, 1, 1)
    assert plan.layout.tp > 1
    crossing = 0
    for stage in plan.stages:
        rows = [
            stage.ranks[i : i + plan.layout.tp] for i in range(0, len(stage.ranks), plan.layout.tp)
        ]
        assert all(len({host[r] for r in row}) == 1 for row in rows)
    for before, after in zip(plan.stages, plan.stages[1:]):
        crossing += any(host[a] != host[b] for a, b in zip(before.ranks, after.ranks))
    assert crossing == 1
    assert plan.estimate.peak_memory_bytes <= 6 * GIB


def test_numbering_of_ranks_changes_the_ranks_alone() -> None:
    plain, interleaved = two_hosts(None), two_hosts((0, 1, 0, 1, 0, 1, 0, 1))
    assert _layout(plain) == _layout(interleaved)
    assert plain.estimate == interleaved.estimate
    assert [s.ranks for s in interleaved.stages] != [s.ranks for s in plain.stages]


def test_two_hosts_step_is_below_two_seconds() -> None:
    """Products 1.32 s over eight devices and a bubble of one microbatch in eight: 1.48 s."""
    assert two_hosts(None).estimate.step_time_s < 2.0


def test_losers_say_what_dominates() -> None:
    """Time by kind for what was priced, bytes for what does not fit, a bound for the rest."""
    plans = (slow_link(), too_big(), two_hosts(None))
    assert all(len(p.alternatives) >= 3 for p in plans)
    words = ("communication", "compute", "bubble", "available", "memory", "products alone")
    for plan in plans:
        for loser in plan.alternatives:
            assert any(word in loser.reason for word in words), loser.reason
    across = _alternative(two_hosts(None), 1, 8, 1)
    assert "communication" in across.reason
