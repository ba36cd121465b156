# SPDX-License-Identifier: Apache-2.0
"""The step in time and the bytes on links, against sums made another way."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from models import MLP
from sample_plans import GIB, llama_plan, mlp_plan

import autoplan
from autoplan.cluster import Cluster
from autoplan.plan import Plan
from autoplan.render.colours import ACTIVITY
from autoplan.render.network import host_traffic
from autoplan.render.steady import find_cuts, place
from autoplan.render.timeline import step_timeline
from autoplan.render.trace import trace_json


@pytest.mark.parametrize("plan", [llama_plan(), mlp_plan()], ids=["train", "infer"])
def test_each_activity_takes_what_the_stage_says(plan: Plan) -> None:
    count = plan.schedule.num_microbatches
    for stage, lane in zip(plan.stages, step_timeline(plan).lanes):
        e = stage.estimate
        expected = {
            "forward": count * (e.forward_s - e.forward_communication_s),
            "recompute": count * e.recompute_s,
            "backward": count * (e.backward_s - e.backward_communication_s - e.recompute_s),
            "communication": count * e.communication_s,
            "reduction": e.reduction_s,
            "optimizer": e.optimizer_s,
        }
        assert set(expected) | {"bubble"} == set(ACTIVITY)
        for activity, seconds in expected.items():
            assert lane.busy_s(activity) == pytest.approx(seconds, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("plan", [llama_plan(), mlp_plan()], ids=["train", "infer"])
def test_a_stage_does_one_thing_at_a_time(plan: Plan) -> None:
    timeline = step_timeline(plan)
    for lane in timeline.lanes:
        for before, after in zip(lane.boxes, lane.boxes[1:]):
            assert after.start_s >= before.end_s - 1e-12
        assert lane.boxes[-1].end_s <= timeline.end_s * (1 + 1e-12)


def test_the_middle_of_a_long_step_is_cut_and_its_ends_are_whole() -> None:
    plan = llama_plan()
    timeline = step_timeline(plan)
    assert find_cuts(timeline, 16) == ()
    schedule = msgspec.structs.replace(plan.schedule, num_microbatches=256)
    long = msgspec.structs.replace(plan, schedule=schedule)
    timeline = step_timeline(long)
    (cut,) = find_cuts(timeline, 256)
    kept = len(timeline.lanes) + 4
    for lane in timeline.lanes:
        for box in lane.boxes:
            if cut.start_s < box.end_s and box.start_s < cut.end_s:
                assert box.microbatch is not None
                assert kept <= box.microbatch < 256 - kept
    assert place(0.0, (cut,)) == 0.0
    assert place(cut.end_s, (cut,)) - place(cut.start_s, (cut,)) == pytest.approx(cut.gap)
    assert place(timeline.end_s, (cut,)) < timeline.end_s / 4


def test_traffic_of_two_hosts() -> None:
    """2 stages of dp=2 tp=4 on 2 hosts of 8: tp and dp stay inside, the pipeline crosses."""
    (hosts,) = host_traffic(llama_plan())
    assert hosts.hosts == (0, 1)
    # per device: 36 GiB along tp, 3 GiB along dp; 4 GiB over the boundary, half of it each way
    assert hosts.inside == {"tp": 8 * 36 * GIB, "dp": 8 * 3 * GIB}
    assert hosts.outside == {"pp": 8 * 2 * GIB}
    assert (hosts.stages, hosts.stage_numbers) == ((0,) * 8, (0, 1))


def test_hosts_that_carry_different_bytes_are_apart() -> None:
    plan = llama_plan()
    first = msgspec.structs.replace(plan.stages[0], traffic=plan.stages[0].traffic[:2])
    one, two = host_traffic(msgspec.structs.replace(plan, stages=(first, plan.stages[1])))
    assert (one.hosts, two.hosts) == ((0,), (1,))
    assert one.inside == {"dp": 8 * 3 * GIB}


def test_a_trace_has_every_box_in_microseconds() -> None:
    plan = llama_plan()
    events = json.loads(trace_json(plan))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(lane.boxes) for lane in step_timeline(plan).lanes)
    end_s = max(e["ts"] + e["dur"] for e in slices) * 1e-6
    assert end_s == pytest.approx(step_timeline(plan).end_s, rel=1e-6)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"stage 0, ranks 0-7", "stage 1, ranks 8-15"}


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_the_step_ends_when_the_plan_says_also_where_stages_share_cores(cores: int) -> None:
    description = Cluster.load("local-cpu-4").to_json() | {"cores_per_host": cores}
    pins = autoplan.Pins(pp=4, dp=1, tp=1, num_microbatches=4)
    batch = {"x": torch.randn(16, 64), "target": torch.randn(16, 4)}
    cluster = Cluster.from_json(description)
    plan = autoplan.optimize(MLP(64, 8), cluster, batch, pins=pins)
    assert plan.estimate.crowding == 4 / cores
    timeline = step_timeline(plan)
    assert timeline.end_s == pytest.approx(plan.estimate.step_time_s, rel=1e-9)
    for lane in timeline.lanes:
        for before, after in zip(lane.boxes, lane.boxes[1:]):
            assert after.start_s >= before.end_s - 1e-12
