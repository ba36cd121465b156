# SPDX-License-Identifier: Apache-2.0
"""A decision -> a Plan document.

In: what was chosen (degrees, strategies, storage, cuts, schedule) and its estimates. Out: a
complete, verified `Plan`. No choice is made here, except the layout in which a tensor crosses a
stage boundary: as its producer makes it, sums taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.graph import Graph
from autoplan.placements import Layout, Partial, R, Replicate, Shard, ShardingSpec
from autoplan.plan import (
    SCHEMA_VERSION,
    BoundaryTensor,
    BufferPlan,
    ClusterSummary,
    Fingerprint,
    MeshLayout,
    ModelSummary,
    ParameterPlan,
    Plan,
    ScheduleSpec,
    Settings,
    Signature,
    StagePlan,
)
from autoplan.plan import Strategy as StrategyRecord
from autoplan.plan_estimates import (
    Alternative,
    Conversion,
    CutRunnerUp,
    Estimate,
    MemoryEstimate,
    OpEstimate,
    ParameterRunnerUp,
    SearchReport,
    StageEstimate,
    Traffic,
)
from autoplan.sharding.batch import Batch, cut_batch
from autoplan.sharding.cutting import StageCut, cut_stages
from autoplan.sharding.strategies import ParameterStrategy, Strategy, without_gradient
from autoplan.units import DTYPE_BYTES

TOOL_VERSION = "0.1.0"


@dataclass(frozen=True)
class Decision:
    """Everything that was chosen.

    Attributes:
        dp, tp, pp: Degrees.
        num_microbatches, schedule: "gpipe", "1f1b" or "infer".
        strategies: Op name -> strategy, for every op of the cut graph.
        parameters: Parameter name -> how it is stored.
        bounds: First and last chain op of each stage.
        layers: Labels of each stage's layers.
        recompute: Labels of each stage's recomputed layers.
        ranks: Each stage's ranks, in mesh order.
        share_boundaries: Tensor parallel ranks each send a part of what they all hold.
    """

    dp: int
    tp: int
    pp: int
    num_microbatches: int
    schedule: str
    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, ParameterStrategy]
    bounds: tuple[tuple[str, str], ...]
    layers: tuple[tuple[str, ...], ...]
    recompute: tuple[tuple[str, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    share_boundaries: bool = False


@dataclass(frozen=True)
class Figures:
    """The estimates and the search's account that go with a decision."""

    stages: tuple[StageEstimate, ...]
    estimate: Estimate
    conversions: tuple[Conversion, ...] = ()
    op_estimates: tuple[OpEstimate, ...] = ()
    traffic: tuple[tuple[Traffic, ...], ...] = ()  # per stage
    cuts: Mapping[int, CutRunnerUp] = field(default_factory=dict)  # by stage
    parameters: Mapping[str, ParameterRunnerUp] = field(default_factory=dict)  # by name
    alternatives: tuple[Alternative, ...] = ()
    search: SearchReport | None = None
    flop_per_step: float = 0.0


@dataclass(frozen=True)
class Setting:
    """What the plan is for: model, inputs, cluster, wishes."""

    graph: Graph
    batch: Batch
    signature: Signature
    settings: Settings
    cluster: ClusterSummary
    cluster_digest: str
    profiles_digest: str
    torch_version: str
    unruled_ops: tuple[str, ...] = ()
    non_persistent: frozenset[str] = field(default_factory=frozenset)


def no_figures(num_stages: int) -> Figures:
    """Figures of a plan that nothing has priced: zero everywhere."""
    nothing = StageEstimate(
        forward_s=0.0,
        backward_s=0.0,
        forward_communication_s=0.0,
        backward_communication_s=0.0,
        recompute_s=0.0,
        send_s=0.0,
        reduction_s=0.0,
        optimizer_s=0.0,
        memory=MemoryEstimate(
            parameters=0,
            gradients=0,
            optimizer_state=0,
            activations=0,
            transient=0,
            reserve=0,
        ),
    )
    estimate = Estimate(
        step_time_s=0.0,
        compute_s=0.0,
        communication_s=0.0,
        bubble_s=0.0,
        optimizer_s=0.0,
        peak_memory_bytes=0,
        peak_stage=0,
        mfu=0.0,
        sources={},
    )
    return Figures((nothing,) * num_stages, estimate)


def assemble(setting: Setting, decision: Decision, figures: Figures) -> Plan:
    """The plan document of a decision.

    Raises:
        ValueError: The decision does not fit the graph.
    """
    graph = setting.graph
    cut_graph = cut_batch(graph, setting.batch, decision.num_microbatches)
    stages = cut_stages(cut_graph, decision.bounds)
    records: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
    op_strategies = {}
    for op in cut_graph.ops:
        strategy = decision.strategies[op.name]
        key = (tuple(map(str, strategy.inputs)), tuple(map(str, strategy.outputs)))
        op_strategies[op.name] = records.setdefault(key, len(records))
    plan = Plan(
        schema_version=SCHEMA_VERSION,
        tool_version=TOOL_VERSION,
        torch_version=setting.torch_version,
        fingerprint=fingerprint(setting),
        model=ModelSummary(
            name=graph.name,
            num_parameters=graph.num_parameters,
            num_trainable_parameters=sum(
                v.meta.numel for v in graph.of_kind("parameter") if v.requires_grad
            ),
            num_ops=len(graph.ops),
            flop_per_step=figures.flop_per_step,
            batch_size=setting.batch.size,
        ),
        signature=setting.signature,
        settings=setting.settings,
        cluster=setting.cluster,
        layout=MeshLayout(dp=decision.dp, tp=decision.tp, pp=decision.pp),
        schedule=ScheduleSpec(name=decision.schedule, num_microbatches=decision.num_microbatches),
        stages=_stages(cut_graph, stages, decision, figures),
        parameters=_parameters(graph, stages, decision, figures),
        buffers=_buffers(graph, stages, setting.non_persistent),
        shared=_shared(graph),
        strategies=tuple(StrategyRecord(inputs=i, outputs=o) for i, o in records),
        op_strategies=op_strategies,
        op_estimates=figures.op_estimates,
        conversions=figures.conversions,
        unruled_ops=setting.unruled_ops,
        estimate=figures.estimate,
        alternatives=figures.alternatives,
        search=figures.search
        or SearchReport(
            num_candidates=1,
            num_rejected=0,
            gap=0.0,
            optimal=False,
            idle_devices=_idle(setting, decision),
            idle_reason="",
        ),
    )
    plan.verify()
    return plan


def _idle(setting: Setting, decision: Decision) -> int:
    return setting.cluster.num_devices - decision.dp * decision.tp * decision.pp


def fingerprint(setting: Setting) -> Fingerprint:
    """Stable digests of all that decides whether a plan still holds."""
    signature = [(t.path, t.shape, t.dtype) for t in setting.signature.tensors]
    inputs = json.dumps(
        [
            signature,
            sorted(setting.signature.constants.items(), key=str),
            setting.signature.positional,
        ],
        default=str,
    )
    settings = setting.settings
    wishes = json.dumps(
        [
            settings.mode,
            settings.optimizer,
            settings.precision,
            settings.memory_reserve,
            settings.pins,
        ],
        sort_keys=True,
        default=str,
    )
    return Fingerprint(
        graph=setting.graph.digest,
        inputs=hashlib.sha256(inputs.encode()).hexdigest()[:16],
        cluster=setting.cluster_digest,
        profiles=setting.profiles_digest,
        settings=hashlib.sha256(wishes.encode()).hexdigest()[:16],
    )


def boundary_layout(
    made: Layout, shape: tuple[int, ...], axis_sizes: tuple[int, ...], *, share: bool
) -> Layout:
    """The layout in which a value crosses to the next stage: as made, with sums taken on both ways.

    Args:
        made: As its producer makes it.
        shape: Of one microbatch, whole.
        axis_sizes: (dp, tp).
        share: Tensor parallel ranks that hold the same value send a part each, along its last dim
            that divides, and the next stage gathers it.
    """
    value = ShardingSpec(tuple(R if isinstance(p, Partial) else p for p in made.value))
    if share and axis_sizes[1] > 1 and isinstance(value[1], Replicate):
        for dim in reversed(range(len(shape))):
            parted = value.replace(1, Shard(dim))
            local = value.local_shape(shape, axis_sizes)
            if local[dim] % axis_sizes[1] == 0:
                value = parted
                break
    return Layout(value, without_gradient(value))


def _stages(
    graph: Graph, stages: tuple[StageCut, ...], decision: Decision, figures: Figures
) -> tuple[StagePlan, ...]:
    made = {
        n: layout
        for op in graph.ops
        for n, layout in zip(op.outputs, decision.strategies[op.name].outputs)
        if n
    }
    home = {
        n: s
        for s, cut in reversed(list(enumerate(stages)))
        for op in cut.ops
        for n in op.outputs
        if n
    }
    found = []
    for index, cut in enumerate(stages):
        receives = []
        for name in cut.receives:
            meta = graph.values[name].meta
            sizes = (decision.dp, decision.tp)
            layout = boundary_layout(made[name], meta.shape, sizes, share=decision.share_boundaries)
            local = 1
            for size in layout.value.local_shape(meta.shape, (decision.dp, decision.tp)):
                local *= size
            receives.append(
                BoundaryTensor(
                    name=name,
                    from_stage=home[name],
                    shape=meta.shape,
                    dtype=meta.dtype,
                    layout=str(layout),
                    size_bytes=local * DTYPE_BYTES[meta.dtype],
                )
            )
        found.append(
            StagePlan(
                index=index,
                ranks=decision.ranks[index],
                layers=decision.layers[index],
                first_op=decision.bounds[index][0],
                last_op=decision.bounds[index][1],
                num_ops=len(cut.ops),
                recompute=decision.recompute[index],
                receives=tuple(receives),
                estimate=figures.stages[index],
                traffic=figures.traffic[index] if figures.traffic else (),
                runner_up=figures.cuts.get(index),
            )
        )
    return tuple(found)


def _holders(name: str, stages: tuple[StageCut, ...]) -> tuple[int, ...]:
    """Stages that use a leaf value; the first one holds what nobody uses."""
    return tuple(s for s, cut in enumerate(stages) if name in cut.values) or (0,)


def _parameters(
    graph: Graph, stages: tuple[StageCut, ...], decision: Decision, figures: Figures
) -> dict[str, ParameterPlan]:
    entries = {}
    aliases = {group[0]: group for group in graph.shared}
    for value in graph.of_kind("parameter"):
        chosen = decision.parameters[value.name]
        entry = ParameterPlan(
            shape=value.meta.shape,
            dtype=value.stored_dtype or value.meta.dtype,
            spec=str(chosen.spec),
            used=str(chosen.used),
            zero=chosen.zero,
            trainable=value.requires_grad,
            stages=_holders(value.name, stages),
            runner_up=figures.parameters.get(value.name),
        )
        for name in aliases.get(value.name, (value.name,)):
            entries[name] = entry
    return entries


def _buffers(
    graph: Graph, stages: tuple[StageCut, ...], non_persistent: frozenset[str]
) -> dict[str, BufferPlan]:
    entries = {}
    aliases = {group[0]: group for group in graph.shared}
    for value in graph.of_kind("buffer"):
        for name in aliases.get(value.name, (value.name,)):
            entries[name] = BufferPlan(
                shape=value.meta.shape,
                dtype=value.meta.dtype,
                persistent=name not in non_persistent,
                stages=_holders(value.name, stages),
            )
    return entries


def _shared(graph: Graph) -> tuple[tuple[str, ...], ...]:
    parameters = {v.name for v in graph.of_kind("parameter")}
    return tuple(group for group in graph.shared if group[0] in parameters)
