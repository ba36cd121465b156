# SPDX-License-Identifier: Apache-2.0
"""One stage of a plan as a module of local ops and explicit collectives.

`build_stage` cuts the captured graph as the plan says and rewrites this rank's stage into three
`torch.fx` modules: the prologue (what the whole batch needs once), the training body (one
microbatch to boundary tensors and loss) and the full body (one microbatch to the model's outputs).
Their printed code shows every collective by name. Values travel in the layout that their producer
gives; a use in another layout is one `Conversion` node, shared by all uses in that layout.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autoplan.errors import PlanError
from autoplan.executor.collectives import Conversion, Regather
from autoplan.executor.local_op import LocalOp
from autoplan.executor.local_ops import local_call
from autoplan.executor.meshes import Ranks
from autoplan.executor.segments import Recomputed, find_segments
from autoplan.graph import Graph, Op, Ref, TensorMeta
from autoplan.placements import Layout, R, ShardingSpec, parse_layout
from autoplan.plan import Plan
from autoplan.sharding.batch import Batch, cut_batch, find_batch
from autoplan.sharding.cutting import StageCut, cut_stages, free_ops
from autoplan.sharding.rules import find_rule, kept_whole
from autoplan.sharding.strategies import without_gradient

Tensor = torch.Tensor
MOMENT = "moment"


@dataclass(frozen=True)
class Returned:
    """A value that a body returns.

    Attributes:
        name: The value.
        layout: The layout it is returned in.
        over_time: "S" (rows of one microbatch), "R" or "P" (see `sharding/batch.py`).
        dim, blocks: Where its rows lie, for "S".
    """

    name: str
    layout: Layout
    over_time: str
    dim: int = 0
    blocks: int = 1


@dataclass(frozen=True)
class Body:
    """A rewritten piece of a stage.

    Attributes:
        module: Takes the fed values in order, gives a tuple of the returned ones.
        feeds: Names of the fed values; MOMENT first.
        returns: What comes out.
    """

    module: fx.GraphModule
    feeds: tuple[str, ...]
    returns: tuple[Returned, ...]


@dataclass(frozen=True)
class StageProgram:
    """All that one rank runs of a plan.

    Attributes:
        cut: The stage's ops and boundaries.
        prologue: Runs once per step, or None.
        training: Boundary tensors to the next stage, the loss if it is made here, buffer updates.
        full: Boundary tensors to the next stage, and the model outputs that are made here.
        receives: Boundary values with the local meta of one microbatch, in order.
        sends: The same towards the next stage.
        regather: Saved-tensor hooks for gathered parameters, or None when nothing is gathered.
    """

    cut: StageCut
    prologue: Body | None
    training: Body
    full: Body
    receives: tuple[tuple[str, TensorMeta, bool], ...]
    sends: tuple[tuple[str, TensorMeta, bool], ...]
    regather: Regather | None


def _from_parameters(graph: Graph, cut: StageCut) -> frozenset[str]:
    """Values that parameters alone decide.

    What a gather of them gives can be had again at any time.
    """
    found = {n for n in cut.values if graph.values[n].kind == "parameter"}
    for op in cut.ops:
        if op.inputs and all(n in found for n in op.inputs):
            found.update(n for n in op.outputs if n)
    return frozenset(found)


def build_stage(graph: Graph, plan: Plan, ranks: Ranks) -> StageProgram:
    """This rank's program.

    Args:
        graph: The captured graph; the plan's fingerprint has been checked against it.
        plan: The plan.
        ranks: This process's place.

    Raises:
        PlanError: The plan does not fit the graph.
    """
    found = {op.name: find_rule(op, graph) for op in graph.ops}
    _check_rules(graph, plan, [name for name, rule in found.items() if rule is None])
    rules = {op.name: found[op.name] or kept_whole(op, graph) for op in graph.ops}
    batch = find_batch(graph, rules)
    try:
        cut_graph = cut_batch(graph, batch, plan.schedule.num_microbatches)
        stages = cut_stages(cut_graph, [(s.first_op, s.last_op) for s in plan.stages])
    except ValueError as error:
        raise PlanError(f"the plan does not fit the model: {error}. Plan again.") from error
    return _StageBuilder(graph, cut_graph, batch, plan, ranks, stages).build()


def _check_rules(graph: Graph, plan: Plan, unruled: list[str]) -> None:
    """Raises PlanError if this process knows rules for other ops than the one that planned."""
    differing = sorted(set(unruled) ^ set(plan.unruled_ops))
    if differing:
        target = next(op.target for op in graph.ops if op.name == differing[0])
        with_rule = "without" if differing[0] in plan.unruled_ops else "with"
        raise PlanError(
            f"the plan was made {with_rule} a rule for {target} ({differing[0]}), this process has "
            "it otherwise. Call the same autoplan.register_rule before planning and in every "
            "process before parallelize."
        )


class _StageBuilder:
    def __init__(
        self,
        graph: Graph,
        cut_graph: Graph,
        batch: Batch,
        plan: Plan,
        ranks: Ranks,
        stages: tuple[StageCut, ...],
    ) -> None:
        self.graph, self.cut_graph, self.batch = graph, cut_graph, batch
        self.plan, self.ranks = plan, ranks
        self.stage_plan = plan.stages[ranks.stage]
        self.cut = stages[ranks.stage]
        self.next_cut = plan.stages[ranks.stage + 1] if ranks.stage + 1 < len(plan.stages) else None
        self.is_cut = plan.schedule.num_microbatches > 1
        self.made: dict[str, Layout] = {}
        self.regather, self.has_regather = Regather(), False
        self.from_parameters = _from_parameters(cut_graph, self.cut)
        self.numbers = {op.name: i for i, op in enumerate(graph.ops)}
        self._note_layouts()

    # -- layouts

    def _note_layouts(self) -> None:
        whole = ShardingSpec((R, R))
        for name in self.cut.values:
            entry = self.plan.parameters.get(name)
            self.made[name] = parse_layout(entry.used) if entry else Layout(whole, whole)
        for tensor in self.stage_plan.receives:
            self.made[tensor.name] = parse_layout(tensor.layout)
        for op in self.cut.ops:
            for name, layout in zip(op.outputs, self.strategy(op)[1]):
                if name:
                    self.made[name] = layout

    def strategy(self, op: Op) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The op's input and output layouts in the plan."""
        index = self.plan.op_strategies.get(op.name)
        if index is None:
            raise PlanError(
                f"the plan has no strategy for op {op.name} ({op.target}). It was made for another "
                "model: plan again."
            )
        chosen = self.plan.strategies[index]
        return tuple(map(parse_layout, chosen.inputs)), tuple(map(parse_layout, chosen.outputs))

    def local_meta(self, name: str, layout: Layout) -> TensorMeta:
        meta = self.cut_graph.values[name].meta
        return TensorMeta(layout.value.local_shape(meta.shape, self.ranks.axis_sizes), meta.dtype)

    def local_op(self, op: Op) -> LocalOp:
        inputs, outputs = self.strategy(op)
        original = self.graph.values
        return LocalOp(
            op=op,
            inputs=inputs,
            outputs=outputs,
            global_inputs=tuple(original[n.removesuffix("@rows")].meta for n in op.inputs),
            global_outputs=tuple(
                original[n.removesuffix("@rows")].meta if n else None for n in op.outputs
            ),
            local_inputs=tuple(self.local_meta(n, layout) for n, layout in zip(op.inputs, inputs)),
            local_outputs=tuple(
                self.local_meta(n, layout) if n else None for n, layout in zip(op.outputs, outputs)
            ),
            index=self.numbers.get(op.name, len(self.numbers)),
            over_time=any(self.batch.over_time.get(n) == "S" for n in op.outputs if n),
        )

    # -- programs

    def build(self) -> StageProgram:
        sends = [Returned(n, layout, "S") for n, layout in self._sent()]
        here = self._made_here()
        graph = self.graph
        loss = [self._returned(graph.loss, whole=False)] if graph.loss in here else []
        updates = [
            self._returned(n, whole=True)
            for n in dict.fromkeys(graph.buffer_updates.values())
            if n in here
        ]
        sent = {s.name for s in sends}
        made_outputs = [n for n in dict.fromkeys(self.cut_graph.outputs) if n in here]
        made_outputs.sort(key=lambda n: n in sent)
        outputs = [self._returned(n, whole=True) for n in made_outputs]
        prologue_names = self.batch.prologue if self.is_cut else frozenset()
        body_ops = [op for op in self.cut.ops if op.name not in prologue_names]
        prologue_ops = [op for op in self.cut.ops if op.name in prologue_names]
        prologue = self._prologue(prologue_ops, body_ops, [*loss, *updates, *outputs])
        training = self._body(body_ops, [*sends, *loss, *updates], recompute=True)
        received = ((t.name, self.made[t.name]) for t in self.stage_plan.receives)
        full = self._body(body_ops, [*sends, *outputs], recompute=False)
        return StageProgram(
            cut=self.cut,
            prologue=prologue,
            training=training,
            full=full,
            receives=tuple(self._boundary(n, layout) for n, layout in received),
            sends=tuple(self._boundary(r.name, r.layout) for r in sends),
            regather=self.regather if self.has_regather else None,
        )

    def _boundary(self, name: str, layout: Layout) -> tuple[str, TensorMeta, bool]:
        return name, self.local_meta(name, layout), self._carries(name)

    def _sent(self) -> list[tuple[str, Layout]]:
        if self.next_cut is None:
            return []
        return [(t.name, parse_layout(t.layout)) for t in self.next_cut.receives]

    def _made_here(self) -> set[str]:
        """Values whose op is this stage's own.

        Those of free ops and leaves count for the last stage.
        """
        last = self.ranks.stage == len(self.plan.stages) - 1
        received = {t.name for t in self.stage_plan.receives}
        chain = {n for op in self.cut.ops for n in op.outputs if n} - received
        free = free_ops(self.cut_graph)
        own = {n for op in self.cut.ops if op.name not in free for n in op.outputs if n}
        return chain | set(self.cut.values) if last else own & chain

    def _returned(self, name: str | None, *, whole: bool) -> Returned:
        assert name is not None, "only values that exist are returned"
        layout = self.made[name]
        if whole:
            spec = ShardingSpec((R,) * len(layout.value))
            layout = Layout(spec, spec)
        else:  # backward starts with the same 1 on every rank
            layout = Layout(layout.value, without_gradient(layout.grad))
        base = name.removesuffix("@rows")
        state = "S" if name != base else self.batch.over_time[base]
        dim, blocks = self.batch.positions.get(base, (0, 1))
        return Returned(name, layout, state, dim, blocks)

    def _carries(self, name: str) -> bool:
        return self.cut_graph.values[name].requires_grad

    def _prologue(self, ops: list[Op], body_ops: list[Op], returned: list[Returned]) -> Body | None:
        if not ops:
            return None
        made = {n for op in ops for n in op.outputs if n}
        used = {n for op in body_ops for n in op.inputs} | {r.name for r in returned}
        wanted = [self._as_made(n) for n in sorted(made & used)]
        return self._body(ops, wanted, recompute=False) if wanted else None

    def _as_made(self, name: str) -> Returned:
        return Returned(name, self.made[name], "R")

    def _body(self, ops: list[Op], returns: Sequence[Returned], *, recompute: bool) -> Body:
        needed = _needed(ops, [r.name for r in returns])
        root = nn.Module()
        scope = _Scope(self, root)
        segments = find_segments(needed, self.stage_plan.recompute if recompute else ())
        made_inside = {n for op in needed for n in op.outputs if n}
        feeds = [
            n for n in dict.fromkeys(n for op in needed for n in op.inputs) if n not in made_inside
        ]
        feeds += [r.name for r in returns if r.name not in made_inside and r.name not in feeds]
        for name in feeds:
            scope.feed(name)
        for number, (label, segment) in enumerate(segments):
            if label is None:
                for op in segment:
                    scope.emit(op)
            else:
                later = [op for _, part in segments[number + 1 :] for op in part]
                used_later = {n for op in later for n in op.inputs} | {r.name for r in returns}
                scope.emit_recomputed(label, segment, used_later)
        scope.graph.output(tuple(scope.in_layout(r.name, r.layout) for r in returns))
        module = fx.GraphModule(root, scope.graph, class_name=f"Stage{self.ranks.stage}")
        return Body(module, (MOMENT, *feeds), tuple(returns))


def _needed(ops: list[Op], wanted: Iterable[str]) -> list[Op]:
    needed = set(wanted)
    kept = []
    for op in reversed(ops):
        if any(n in needed for n in op.outputs if n):
            kept.append(op)
            needed.update(op.inputs)
    return kept[::-1]


class _Scope:
    """One fx graph being written: values by name as they were made, and their conversions."""

    def __init__(self, builder: _StageBuilder, root: nn.Module) -> None:
        self.builder, self.root = builder, root
        self.graph = fx.Graph()
        self.moment = self.graph.placeholder(MOMENT)
        self.nodes: dict[str, fx.Node] = {}
        self.converted: dict[tuple[str, Layout], fx.Node] = {}
        self.module_names: dict[str, int] = {}

    def feed(self, name: str) -> None:
        self.nodes[name] = self.graph.placeholder(_identifier(name))

    def module(self, name: str, module: nn.Module) -> str:
        count = self.module_names[name] = self.module_names.get(name, 0) + 1
        unique = name if count == 1 else f"{name}_{count}"
        self.root.add_module(unique, module)
        return unique

    def in_layout(self, name: str, layout: Layout) -> fx.Node:
        """The value in this layout: as made, or through one conversion that all uses share."""
        made = self.builder.made[name]
        carries = self.builder._carries(name)
        if not carries:
            layout = Layout(layout.value, without_gradient(layout.value))
        key = (name, layout)
        if made == layout or (not carries and made.value == layout.value):
            return self.nodes[name]
        if key not in self.converted:
            conversion = Conversion(made, layout, self.builder.ranks, carries_gradient=carries)
            if conversion.is_nothing:
                return self.nodes[name]
            if conversion.is_gather and name in self.builder.from_parameters:
                conversion.regather = self.builder.regather
                self.builder.has_regather = True
            unique = self.module(conversion.describe(), conversion)
            self.converted[key] = self.graph.call_module(unique, (self.nodes[name],))
        return self.converted[key]

    def emit(self, op: Op) -> None:
        local = self.builder.local_op(op)
        call = local_call(local, self.builder.ranks)
        inputs = [self.in_layout(n, layout) for n, layout in zip(op.inputs, local.inputs)]

        def fill(argument: object) -> Any:
            if isinstance(argument, Ref):
                return inputs[argument.index]
            return [fill(a) for a in argument] if isinstance(argument, list | tuple) else argument

        args = tuple(fill(a) for a in call.args)
        kwargs = {k: fill(v) for k, v in call.kwargs.items()}
        if call.needs_moment:
            args = (self.moment, *args)
        if isinstance(call.function, nn.Module):
            name = self.module(_identifier(op.name), call.function)
            node = self.graph.call_module(name, args, kwargs)
        else:
            node = self.graph.call_function(call.function, args, kwargs)
        self.bind(op, node, call.function)

    def bind(self, op: Op, node: fx.Node, function: object) -> None:
        several = len(op.outputs) > 1
        if isinstance(function, torch._ops.OpOverload):
            several = several or isinstance(function._schema.returns[0].type, torch.ListType)
        for i, name in enumerate(op.outputs):
            if name:
                self.nodes[name] = (
                    self.graph.call_function(operator.getitem, (node, i)) if several else node
                )

    def emit_recomputed(self, label: str, ops: list[Op], used_later: set[str]) -> None:
        """A layer as a module of its own, run under recomputation."""
        made = [n for op in ops for n in op.outputs if n]
        feeds = [n for n in dict.fromkeys(n for op in ops for n in op.inputs) if n not in made]
        results = [n for n in made if n in used_later]
        root = nn.Module()
        inner = _Scope(self.builder, root)
        for name in feeds:
            inner.feed(name)
        for op in ops:
            inner.emit(op)
        inner.graph.output(tuple(inner.nodes[n] for n in results))
        module = Recomputed(fx.GraphModule(root, inner.graph, class_name="RecomputedLayer"))
        node = self.graph.call_module(
            self.module(_identifier(label), module), (self.moment, *(self.nodes[n] for n in feeds))
        )
        for i, name in enumerate(results):
            self.nodes[name] = self.graph.call_function(operator.getitem, (node, i))


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name)
    return text if text[:1].isalpha() else f"v_{text}"
