# SPDX-License-Identifier: Apache-2.0
"""A plan as wide as a page must bear: 64 stages on 1,024 devices, 512 microbatches.

Made of the Llama of `sample_plans.py` with made-up seconds that differ from stage to stage, so that
every stage waits now and then.
"""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace
from sample_plans import HIDDEN, LLAMA_BLOCK, SEQ, llama_plan

from autoplan.cluster import Cluster
from autoplan.plan import BoundaryTensor, ParameterPlan, Plan, StagePlan
from autoplan.plan_estimates import Alternative, CutRunnerUp
from autoplan.render.timeline import step_timeline

NUM_STAGES, NUM_MICROBATCHES, LAYERS_PER_STAGE = 64, 512, 2
NUM_HOSTS, DEVICES_PER_HOST, DP, TP = 128, 8, 2, 8


@cache
def wide_plan(num_stages: int = NUM_STAGES, num_microbatches: int = NUM_MICROBATCHES) -> Plan:
    """A plan of dp=2 tp=8 under 1F1B; its step time is that of the replayed schedule."""
    base = llama_plan()
    num_hosts = num_stages * DP * TP // DEVICES_PER_HOST
    cluster = Cluster.load(f"dgx-h100-{num_hosts}x{DEVICES_PER_HOST}")
    stages = tuple(_stage(base, i, num_stages) for i in range(num_stages))
    used, stored = "RS(0)~PS(0)", "S(0)S(0)"
    parameters = {
        f"model.layers.{i}.{name}": ParameterPlan(
            shape=entry[0],
            dtype="bfloat16",
            spec=stored,
            used=used,
            zero=3,
            trainable=True,
            stages=(i // LAYERS_PER_STAGE,),
        )
        for i in range(num_stages * LAYERS_PER_STAGE)
        for name, entry in LLAMA_BLOCK.items()
    }
    plan = replace(
        base,
        cluster=replace(
            base.cluster,
            name=cluster.name,
            num_hosts=num_hosts,
            num_devices=cluster.num_devices,
            description=cluster.to_json(),
        ),
        layout=replace(base.layout, dp=DP, tp=TP, pp=num_stages),
        schedule=replace(base.schedule, num_microbatches=num_microbatches),
        model=replace(base.model, batch_size=num_microbatches * DP),
        stages=stages,
        parameters=parameters,
        shared=(),
        buffers={},
        settings=replace(base.settings, pins={}),
    )
    timeline = step_timeline(plan)

    def share_s(*activities: str) -> float:
        busy = (lane.busy_s(what) for lane in timeline.lanes for what in activities)
        return sum(busy) / num_stages

    parts = {
        "compute_s": share_s("forward", "recompute", "backward"),
        "communication_s": share_s("communication", "reduction"),
        "optimizer_s": share_s("optimizer"),
    }
    bubble_s = timeline.end_s - sum(parts.values())
    estimate = replace(base.estimate, step_time_s=timeline.end_s, bubble_s=bubble_s, **parts)
    return replace(plan, estimate=estimate, alternatives=_alternatives(base, timeline.end_s))


def _alternatives(base: Plan, step_s: float) -> tuple[Alternative, ...]:
    slower, refused = base.alternatives
    terms = {"compute_s": 0.7, "communication_s": 0.2, "bubble_s": 0.2, "optimizer_s": 0.1}
    seconds = {term: share * step_s for term, share in terms.items()}
    return replace(slower, step_time_s=1.2 * step_s, **seconds), refused


def _stage(base: Plan, index: int, num_stages: int) -> StagePlan:
    model, size = base.stages[0], DP * TP
    labels = [f"model.layers.{LAYERS_PER_STAGE * index + i}" for i in range(LAYERS_PER_STAGE)]
    uneven = 1 + 0.03 * ((7 * index) % 5)
    e = replace(
        model.estimate,
        forward_s=0.0042 * uneven,
        backward_s=0.0101 * uneven,
        recompute_s=0.003 * (index % 2),
        send_s=0.0007 if index + 1 < num_stages else 0.0,
    )
    receives = BoundaryTensor(
        name=f"add_{2 * index}",
        from_stage=index - 1,
        shape=(4, SEQ, HIDDEN),
        dtype="bfloat16",
        layout="S(0)R",
        size_bytes=2 * SEQ * HIDDEN * 2,
    )
    moved = {index: LAYERS_PER_STAGE - 1, index + 1: LAYERS_PER_STAGE + 1}
    cut = CutRunnerUp(
        stage_layers=tuple(moved.get(i, LAYERS_PER_STAGE) for i in range(num_stages)),
        step_time_s=0.01,
        peak_memory_bytes=0,
        reason="",
    )
    last = index + 1 == num_stages
    return replace(
        model,
        index=index,
        ranks=tuple(range(index * size, (index + 1) * size)),
        layers=tuple(labels),
        recompute=tuple(labels[: index % 2]),
        receives=(receives,) if index else (),
        estimate=e,
        traffic=tuple(t for t in model.traffic if not (last and t.axis == "pp")),
        runner_up=None if last else cut,
        mesh={"dp": DP, "tp": TP},
    )
