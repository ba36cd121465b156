# SPDX-License-Identifier: Apache-2.0
"""What the HTML page knows: a Plan as small plain data for `web/*.js`.

In comes a Plan, out goes a dict that JSON can say. Names that repeat are folded, lists of names are
front-coded, and boxes of the timeline are numbers of a lane's distinct symbols, since a step may
have two hundred thousand. Seconds and bytes stay numbers, in SI units; the page formats them. Not
here: HTML (page.py), any number that the plan does not hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from autoplan.plan import ParameterPlan, Plan, StagePlan
from autoplan.plan_estimates import Alternative, Conversion, CutRunnerUp, OpEstimate
from autoplan.render.blocks import unnumbered
from autoplan.render.colours import ACTIVITY, AXES, IDLE, MEMORY, PLACEMENT, STAGES
from autoplan.render.explain import signed_bytes, signed_seconds
from autoplan.render.layout import (
    fold_names,
    format_dtype,
    format_flow,
    format_mesh,
    format_shape,
    natural_key,
    number_ranges,
)
from autoplan.render.network import host_traffic, hosts_of_ranks
from autoplan.render.text import alternative_name, plan_notes, proof
from autoplan.render.timeline import Lane, step_timeline
from autoplan.units import format_bytes, format_count, format_seconds

Json = dict[str, Any]

# terms of a step -> the activity whose colour they have
TERMS = {
    "compute": "backward",
    "communication": "communication",
    "bubble": "bubble",
    "optimizer": "optimizer",
}
TICKS = 1e12  # of the step: durations that agree to one tick are one symbol


def page_data(plan: Plan) -> Json:
    """Everything the page shows, as plain data."""
    places = _Places(plan)
    return {
        "title": plan.model.name,
        "subtitle": _subtitle(plan),
        "facts": _facts(plan),
        "notes": plan_notes(plan),
        "step_s": plan.estimate.step_time_s,
        "trains": plan.settings.mode == "train",
        "axes": [["dp", plan.layout.dp], ["tp", plan.layout.tp]],
        "colours": {
            "activity": ACTIVITY,
            "memory": MEMORY,
            "placement": PLACEMENT,
            "stages": STAGES,
            "axis": AXES,
            "term": {term: ACTIVITY[activity] for term, activity in TERMS.items()},
            "idle": IDLE,
        },
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "timeline": _timeline(plan),
        "capacity_bytes": plan.cluster.memory_bytes,
        "cluster": _cluster(plan),
        "parameters": _parameters(plan.parameters),
        "conversions": _conversions(plan.conversions, places),
        "ops": _ops(plan, places),
        "alternatives": [_chosen(plan), *map(_alternative, plan.alternatives)],
    }


def front_coded(names: Iterable[str]) -> list[str | int]:
    """Names, each as the number of characters it begins with of the one before, and the rest."""
    coded: list[str | int] = []
    before = ""
    for name in names:
        same, most = 0, min(len(name), len(before))
        while same < most and name[same] == before[same]:
            same += 1
        coded += [same, name[same:]]
        before = name
    return coded


# ---- the head of the page ----


def _subtitle(plan: Plan) -> str:
    s, cluster = plan.schedule, plan.cluster
    hosts = _counted(cluster.num_hosts, "host")
    microbatches = f"{s.num_microbatches} microbatch" + "es" * (s.num_microbatches != 1)
    return (
        f"{cluster.num_devices} {cluster.device} in {hosts} ({cluster.name}), "
        f"dp={plan.layout.dp} tp={plan.layout.tp} pp={plan.layout.pp}, {s.name}, {microbatches}"
    )


def _facts(plan: Plan) -> list[tuple[str, str, str]]:
    """(label, number, remark) of the tiles under the title."""
    e, model = plan.estimate, plan.model
    error = "error unknown: nothing comparable was measured"
    if e.expected_error is not None:
        error = f"expected error {e.expected_error:.1%} ({e.expected_error_source})"
    sources = sorted(e.sources.items(), key=lambda item: (-item[1], item[0]))
    first, *others = [f"{share:.0%} {name}" for name, share in sources if share > 0] or ["none"]
    rest = ", ".join(others)
    peak = f"of {format_bytes(plan.cluster.memory_bytes)}, on stage {e.peak_stage}"
    settings = f"{plan.settings.mode}, {plan.settings.precision or 'own dtypes'}"
    optimizer = f", {plan.settings.optimizer}" if plan.settings.mode == "train" else ""
    count = f"{format_count(model.num_parameters)} parameters, {settings}{optimizer}"
    search = plan.search
    tried = f"{_counted(search.num_candidates, 'layout')} tried, {search.num_rejected} refused"
    return [
        ("step", format_seconds(e.step_time_s), error),
        ("model FLOP utilisation", f"{e.mfu:.1%}", "of the used devices' peak"),
        ("fullest device", format_bytes(e.peak_memory_bytes), peak),
        ("batch", _counted(model.batch_size, "sample"), count),
        ("source of the seconds", first, rest),
        ("search", proof(plan), tried),
    ]


# ---- stages and time ----


def _stage(plan: Plan, stage: StagePlan) -> Json:
    e, memory = stage.estimate, stage.estimate.memory
    again = set(stage.recompute)
    return {
        "index": stage.index,
        "ranks": number_ranges(stage.ranks),
        "num_ranks": len(stage.ranks),
        "mesh": format_mesh(stage),
        "layers": [[label, int(label in again)] for label in stage.layers],
        "forward_s": e.forward_s,
        "backward_s": e.backward_s,
        "communication_s": e.communication_s,
        "recompute_s": e.recompute_s,
        "send_s": e.send_s,
        "reduction_s": e.reduction_s,
        "optimizer_s": e.optimizer_s,
        "sent_bytes": {
            axis: sum(t.sent_bytes for t in stage.traffic if t.axis == axis) for axis in AXES
        },
        "receives": [
            f"{t.name} {format_dtype(t.dtype)} {format_shape(t.shape)} {t.layout} from stage "
            f"{t.from_stage}, {format_bytes(t.size_bytes)} per microbatch and device"
            for t in stage.receives
        ],
        "memory": {term: getattr(memory, term) for term in MEMORY},
        "total_bytes": memory.total,
        "reserve_bytes": memory.reserve,
        "cut": _cut(plan, stage.runner_up),
    }


def _cut(plan: Plan, runner_up: CutRunnerUp | None) -> str:
    """What the next best cut is and costs: the stages whose number of layers changes."""
    if runner_up is None:
        return ""
    changed = [
        f"{_counted(number, 'layer')} in stage {stage.index}"
        for number, stage in zip(runner_up.stage_layers, plan.stages)
        if number != len(stage.layers)
    ]
    price = f"refused, {runner_up.reason}"
    if runner_up.step_time_s is not None and runner_up.peak_memory_bytes is not None:
        price = (
            f"step {signed_seconds(runner_up.step_time_s)}, "
            f"peak {signed_bytes(runner_up.peak_memory_bytes)}"
        )
    return f"next best cut, {' and '.join(changed)}: {price}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _timeline(plan: Plan) -> Json:
    timeline = step_timeline(plan)
    activities = list(ACTIVITY)
    tick = timeline.end_s / TICKS or 1.0
    return {
        "end_s": timeline.end_s,
        "tick_s": tick,
        "activities": activities,
        "num_microbatches": plan.schedule.num_microbatches,
        "lanes": [coded_lane(lane, activities, tick) for lane in timeline.lanes],
    }


def coded_lane(lane: Lane, activities: Sequence[str], tick_s: float) -> Json:
    """The boxes of a lane as numbers of its distinct symbols.

    A symbol is (activity, seconds, step of the microbatch): what its box does, for how long, and
    how far its microbatch is from the box before; null where it has none. A wait is a box too, of
    the activity "bubble". Boxes follow each other without gaps from 0.

    Args:
        lane: What one stage does.
        activities: Names in the order of their numbers.
        tick_s: Durations that agree to this are one symbol.
    """
    number_of = {name: i for i, name in enumerate(activities)}
    symbols: dict[tuple[int, int, int | None], int] = {}
    boxes: list[int] = []

    def add(activity: str, seconds: float, step: int | None) -> bool:
        symbol = (number_of[activity], round(seconds / tick_s), step)
        if symbol[1] > 0:
            boxes.append(symbols.setdefault(symbol, len(symbols)))
        return symbol[1] > 0

    end_s, microbatch = 0.0, 0
    for box in lane.boxes:
        add("bubble", box.start_s - end_s, None)
        step = None if box.microbatch is None else box.microbatch - microbatch
        if add(box.activity, box.end_s - box.start_s, step):
            microbatch += step or 0
        end_s = box.end_s
    return {"stage": lane.stage, "symbols": [list(s) for s in symbols], "boxes": boxes}


# ---- the cluster ----


def _cluster(plan: Plan) -> Json:
    """The tree: the network, kinds of hosts, their devices; bytes of one step by mesh axis."""
    cluster, description = plan.cluster, plan.cluster.description
    host_of = hosts_of_ranks(plan)
    hosts_of_stage = {s.index: {host_of[r] for r in s.ranks} for s in plan.stages}
    kinds = []
    for kind in host_traffic(plan):
        members = set(kind.hosts)
        kinds.append(
            {
                "hosts": number_ranges(kind.hosts),
                "first": kind.hosts[0],
                "count": len(kind.hosts),
                "devices": list(kind.stages),
                "ranks": number_ranges(r for r, h in enumerate(host_of) if h == kind.hosts[0]),
                "stages": [s for s, hosts in hosts_of_stage.items() if hosts & members],
                "inside": kind.inside,
                "outside": kind.outside,
            }
        )
    return {
        "name": cluster.name,
        "device": cluster.device,
        "num_hosts": cluster.num_hosts,
        "num_devices": cluster.num_devices,
        "intra": _link(description.get("intra_host")),
        "inter": _link(description.get("inter_host")),
        "kinds": kinds,
    }


def _link(link: Any) -> str:
    """A link's name and bandwidth, as its profile states it."""
    if not isinstance(link, dict):
        return ""
    name, bandwidth = link.get("name", ""), link.get("bandwidth_GBps")
    return f"{name}, {bandwidth:g} GB/s" if isinstance(bandwidth, int | float) else str(name)


# ---- the tables ----


class _Places:
    """Which stages a dotted name belongs to, by the layers of the stages."""

    def __init__(self, plan: Plan) -> None:
        self.exact: dict[str, set[int]] = {}
        self.alike: dict[str, set[int]] = {}
        for stage in plan.stages:
            for label in stage.layers:
                self.exact.setdefault(label, set()).add(stage.index)
                self.alike.setdefault(unnumbered(label), set()).add(stage.index)
        for name, parameter in plan.parameters.items():
            for place in (name, name.rpartition(".")[0]):
                if place not in self.exact:
                    self.exact[place] = set(parameter.stages)
        self.only = [0] if len(plan.stages) == 1 else []

    def stages(self, name: str, count: int) -> list[int]:
        """Stages of the layer that the name lies in, or of its parameter; one that stands for
        several equal ones (by its count) is in the stages of every layer numbered otherwise. Empty
        where a plan of several stages does not say."""
        table = self.exact if count == 1 else self.alike
        parts = (name if count == 1 else unnumbered(name)).split(".")
        for size in range(len(parts), 0, -1):
            found = table.get(".".join(parts[:size]))
            if found:
                return sorted(found)
        return self.only


def _parameters(parameters: dict[str, ParameterPlan]) -> list[list[Any]]:
    """(pattern, names, shape, dtype, stored, used, ZeRO, stages, runner-up) of equal parameters."""

    def key(p: ParameterPlan) -> Hashable:
        r = p.runner_up
        words = ""
        if r is not None:
            zero = f" zero {r.zero}" if r.zero else ""
            words = (
                f"{r.spec} used {r.used}{zero}: step {signed_seconds(r.step_time_s)}, "
                f"peak {signed_bytes(r.peak_memory_bytes)}"
            )
        dtype = format_dtype(p.dtype) + ("" if p.trainable else ", frozen")
        return (format_shape(p.shape), dtype, p.spec, p.used, p.zero, p.stages, words)

    folds = fold_names((name, key(p)) for name, p in parameters.items())
    folds.sort(key=lambda fold: natural_key(fold.pattern))
    return [[f.pattern, front_coded(f.names), *f.first] for f in folds]  # type: ignore[misc]


def _conversions(conversions: Sequence[Conversion], places: _Places) -> list[list[Any]]:
    """(pattern, names, source, target, forward, backward, bytes, seconds, how many, seconds in
    all, stages, whether it stands for equal ones elsewhere) of equal conversions, dearest first."""
    number: dict[tuple[str, tuple[Any, ...]], int] = {}
    for c in conversions:
        name = c.module_path or c.value
        stages = places.stages(c.module_path, c.count) or places.stages(c.value, c.count)
        passes = (", ".join(c.forward), ", ".join(c.backward))
        key = (c.source, c.target, *passes, c.size_bytes, c.time_s, c.count, tuple(stages))
        number[name, key] = number.get((name, key), 0) + 1
    folds = fold_names((name, (key, many)) for (name, key), many in number.items())
    rows = []
    for fold in folds:
        (*about, size, time_s, count, stages), many = fold.first
        total, names = count * many * len(fold.names), front_coded(fold.names)
        seconds = (time_s, total, time_s * total)
        rows.append([fold.pattern, names, *about, size, *seconds, stages, int(count > 1)])
    return sorted(rows, key=lambda row: (-row[-3], natural_key(row[0])))


def _ops(plan: Plan, places: _Places) -> list[list[Any]]:
    """(module, op, kind, layouts, forward, backward, own collectives, saved bytes, how many,
    source, stages) of each distinct op."""

    def row(op: OpEstimate) -> list[Any]:
        index = plan.op_strategies.get(op.name)
        chosen = None if index is None else plan.strategies[index]
        flow = format_flow(chosen.inputs, chosen.outputs) if chosen else ""
        seconds = (op.forward_s, op.backward_s, op.communication_s)
        stages = places.stages(op.module_path, op.count)
        about = (
            op.module_path,
            op.name,
            op.kind.removeprefix("aten.").removesuffix(".default"),
            flow,
        )
        return [*about, *seconds, op.saved_bytes, op.count, op.source, stages]

    return [row(op) for op in plan.op_estimates]


# ---- alternatives ----


def _chosen(plan: Plan) -> Json:
    e, s, layout = plan.estimate, plan.schedule, plan.layout
    again = any(stage.recompute for stage in plan.stages)
    zero = max((p.zero for p in plan.parameters.values()), default=0)
    name = f"dp={layout.dp} tp={layout.tp} pp={layout.pp}" + (f" zero={zero}" if zero else "")
    name += f" {s.name}:{s.num_microbatches}" + (" recompute" if again else "")
    return {
        "name": name,
        "step_s": e.step_time_s,
        "terms": [getattr(e, f"{term}_s") for term in TERMS],
        "peak_bytes": e.peak_memory_bytes,
        "reason": "this plan",
    }


def _alternative(a: Alternative) -> Json:
    return {
        "name": alternative_name(a),
        "step_s": a.step_time_s,
        "terms": [getattr(a, f"{term}_s") for term in TERMS],
        "peak_bytes": a.peak_memory_bytes,
        "reason": a.reason,
    }
