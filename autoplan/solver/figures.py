# SPDX-License-Identifier: Apache-2.0
"""The numbers a plan reports of its decision: per stage and overall, time by kind, memory by term,
conversions by name.

All of them are sums of what the search has priced; nothing is estimated a second way.
"""

from __future__ import annotations

from autoplan.accuracy import expected_error
from autoplan.cluster import Cluster
from autoplan.costs.kernels import backward_kernels, forward_kernels
from autoplan.costs.profile import DeviceProfile
from autoplan.graph import Graph, TensorMeta
from autoplan.plan_estimates import (
    Conversion,
    Estimate,
    MemoryEstimate,
    OpEstimate,
    SearchReport,
    StageEstimate,
)
from autoplan.sharding.resharding import transition
from autoplan.solver.assemble import Figures
from autoplan.solver.candidate import Priced
from autoplan.solver.evaluate import CandidateSolver
from autoplan.solver.traffic import AXES, stage_traffic


def make_figures(
    graph: Graph,
    priced: Priced,
    solver: CandidateSolver,
    limit_bytes: float,
    cluster: Cluster,
    report: SearchReport,
) -> Figures:
    """Figures of the priced decision.

    Args:
        graph: Of the whole batch, for FLOPs.
        priced, solver: The decision and what priced it.
        limit_bytes: What a device has after the reserve.
        cluster: For capacity and peak rates.
        report: The search's account.
    """
    stages = tuple(
        _stage(priced, solver, s, cluster.device.memory_bytes - limit_bytes)
        for s in range(priced.candidate.pp)
    )
    peaks = [s.memory.total for s in stages]
    candidate = priced.candidate
    devices, step, terms = candidate.num_devices, priced.step_s, priced.terms
    flop = flop_per_step(graph, training=solver.training)
    dtype = dtype_of_work(graph)
    peak = DeviceProfile.of(cluster.device).peak(dtype)[0]
    error, runs = expected_error(cluster.device.name, solver.work.runtime.name)
    estimate = Estimate(
        step_time_s=step,
        compute_s=terms["compute"],
        communication_s=terms["communication"],
        bubble_s=terms["bubble"],
        optimizer_s=terms["optimizer"],
        peak_memory_bytes=max(peaks),
        peak_stage=peaks.index(max(peaks)),
        mfu=flop / (step * devices * peak) if step > 0 else 0.0,
        sources=_sources(priced),
        expected_error=error,
        expected_error_source=runs,
        crowding=solver.crowding,
    )
    return Figures(
        stages=stages,
        estimate=estimate,
        conversions=_conversions(priced, solver),
        op_estimates=_op_estimates(priced, solver),
        traffic=stage_traffic(priced, solver),
        search=report,
        flop_per_step=flop,
    )


def _stage(priced: Priced, solver: CandidateSolver, stage: int, reserve: float) -> StageEstimate:
    first, last = priced.assignment.bounds[stage]
    prices = priced.prices[first:last]
    in_flight = (
        solver.in_flight
        if priced.candidate.schedule != "1f1b"
        else min(priced.candidate.num_microbatches, priced.candidate.pp - stage)
    )
    activations = sum(p.activation_bytes for p in prices) * in_flight
    transient = max(p.transient_bytes for p in prices)
    held = {
        key: sum(getattr(p, key) for p in prices)
        for key in ("parameter_bytes", "gradient_bytes", "state_bytes")
    }
    for key, size in _held_again(priced, solver, first, last).items():
        held[key] -= size
    memory = MemoryEstimate(
        parameters=int(held["parameter_bytes"]),
        gradients=int(held["gradient_bytes"]),
        optimizer_state=int(held["state_bytes"]),
        activations=int(activations),
        transient=int(transient),
        reserve=int(max(reserve, 0.0)) if reserve != float("inf") else 0,
    )
    has_next = stage < priced.candidate.pp - 1
    return StageEstimate(
        forward_s=sum(p.forward_s for p in prices),
        backward_s=sum(p.backward_s for p in prices),
        forward_communication_s=sum(p.forward_communication_s for p in prices),
        backward_communication_s=sum(p.communication_s - p.forward_communication_s for p in prices),
        recompute_s=sum(p.recompute_s for p in prices),
        send_s=priced.send_s[last - 1] if has_next else 0.0,
        reduction_s=sum(p.step_s - p.optimizer_s for p in prices),
        optimizer_s=sum(p.optimizer_s for p in prices),
        memory=memory,
    )


def _op_estimates(priced: Priced, solver: CandidateSolver) -> tuple[OpEstimate, ...]:
    """Every representative op that takes time or keeps bytes, in the order of the graph."""
    found = []
    for name, table in solver.tables.ops.items():
        choice = table.strategies.index(priced.strategies[name])
        times = table.forward_s[choice], table.backward_s[choice], table.communication_s[choice]
        if not any(times) and not table.saved_bytes[choice]:
            continue
        shares = table.sources[choice]
        found.append(
            OpEstimate(
                name=name,
                module_path=table.op.module_path,
                kind=table.op.target,
                forward_s=times[0],
                backward_s=times[1],
                communication_s=times[2],
                saved_bytes=int(table.saved_bytes[choice]),
                source=max(sorted(shares), key=lambda k: shares[k]) if shares else "",
                count=solver.folded.count[name],
            )
        )
    return tuple(found)


def _held_again(priced: Priced, solver: CandidateSolver, first: int, last: int) -> dict[str, float]:
    """Bytes by term that layers `first` to `last` count of a parameter beyond the one copy that
    their stage holds.
    """
    kinds, ops = solver.graph.values, {op.name: op for op in solver.graph.ops}
    users: dict[str, int] = {}
    for layer in solver.layers.layers[first:last]:
        for value in {v for n in layer.ops for v in ops[n].inputs if kinds[v].kind == "parameter"}:
            users[value] = users.get(value, 0) + 1
    again = dict.fromkeys(("parameter_bytes", "gradient_bytes", "state_bytes"), 0.0)
    for value, count in users.items():
        name = solver.folded.representative.get(value, value)
        table = solver.tables.parameters[name]
        choice = table.strategies.index(priced.parameters[name])
        for key in again:
            again[key] += (count - 1) * getattr(table, key)[choice]
    return again


def _sources(priced: Priced) -> dict[str, float]:
    """Share of the priced seconds by kind of number."""
    total: dict[str, float] = {}
    for price in priced.prices:
        for source, seconds in price.sources.items():
            total[source] = total.get(source, 0.0) + seconds
        total["alpha-beta"] = total.get("alpha-beta", 0.0) + price.communication_s
    whole = sum(total.values())
    return {k: round(v / whole, 6) for k, v in sorted(total.items()) if v > 0} if whole else {}


def flop_per_step(graph: Graph, *, training: bool) -> float:
    """FLOPs of matrix products, convolutions and attention over the whole batch, without
    recomputation.
    """
    total = 0.0
    for op in graph.ops:
        inputs = tuple(graph.values[n].meta for n in op.inputs)
        outputs = tuple(graph.values[n].meta if n else TensorMeta((), "bool") for n in op.outputs)
        grads = tuple(graph.values[n].requires_grad for n in op.inputs)
        kernels = forward_kernels(op, inputs, outputs) + (
            backward_kernels(op, inputs, outputs, grads) if training and any(grads) else ()
        )
        total += sum(k.flop for k in kernels if k.family in ("matmul", "convolution", "attention"))
    return total


def dtype_of_work(graph: Graph) -> str:
    """The dtype of most parameter elements: what products run in."""
    sizes: dict[str, int] = {}
    for value in graph.of_kind("parameter"):
        sizes[value.meta.dtype] = sizes.get(value.meta.dtype, 0) + value.meta.numel
    return max(sizes, key=lambda k: sizes[k]) if sizes else "float32"


def _conversions(priced: Priced, solver: CandidateSolver) -> tuple[Conversion, ...]:
    """Every conversion that moves bytes, once per representative, with how often the model has
    it.
    """
    folded, tables = solver.folded, solver.tables
    sizes = tables.mesh.axis_sizes
    makers = {n: op for op in folded.ops for n in op.outputs if n}
    made = {
        n: priced.strategies[op.name].outputs[i]
        for op in folded.ops
        for i, n in enumerate(op.outputs)
        if n
    }
    made.update({n: s.used for n, s in priced.parameters.items()})
    found: dict[tuple[str, str, str], Conversion] = {}
    by_name = {op.name: op for op in folded.ops}
    for (value, consumer, slot), count in folded.edges.items():
        if value not in made:
            continue
        source, target = made[value], priced.strategies[consumer].inputs[slot]
        carries = folded.graph.values[value].requires_grad and solver.training
        ahead = transition(source.value, target.value, sizes)
        back = transition(target.grad, source.grad, sizes) if carries else ()
        if all(m.is_local for m in (*ahead, *back)):
            continue
        key = (value, str(source), str(target))
        table = tables.values[value]
        p, q = table.made.index(source), table.wanted.index(target)
        before = found.get(key)
        found[key] = Conversion(
            value=value,
            module_path=(
                makers[value].module_path if value in makers else by_name[consumer].module_path
            ),
            source=str(source),
            target=str(target),
            forward=tuple(f"{m.kind} {AXES[m.axis]}" for m in ahead),
            backward=tuple(f"{m.kind} {AXES[m.axis]}" for m in back),
            size_bytes=int(
                folded.graph.values[value].meta.size_bytes / source.value.num_shards(sizes)
            ),
            time_s=table.forward_s[p][q] + table.backward_s[p][q],
            count=max(count, before.count if before else 0),
        )
    return tuple(found[k] for k in sorted(found))
