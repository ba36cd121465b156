# SPDX-License-Identifier: Apache-2.0
"""A folded graph on a mesh as tables: what every strategy of every op costs in seconds and bytes.

In: the graph that one microbatch runs, with equal layers folded onto representatives; a mesh (dp,
tp) on a cluster. Out: `CostTables`: per representative op its strategies with forward and backward
seconds and bytes; per parameter its storage choices with seconds per step; per value the price of
converting any layout its producer gives into any a consumer wants. Everything is per device.
Nothing is chosen here; the executor runs exactly what is priced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from autoplan.cluster import Cluster, Group, axis_group
from autoplan.costs.collectives import collective_time
from autoplan.costs.compute import kernel_time
from autoplan.costs.kernels import Kernel, backward_kernels, forward_kernels
from autoplan.costs.profile import Profiles
from autoplan.costs.saved import saved_by
from autoplan.graph import Graph, Op, TensorMeta, Value
from autoplan.placements import Layout, Shard, ShardingSpec
from autoplan.sharding.batch import SLICE, Batch
from autoplan.sharding.factors import OpRule
from autoplan.sharding.resharding import transition
from autoplan.sharding.strategies import (
    NONE,
    Choice,
    ParameterStrategy,
    Strategy,
    axis_choices,
    enumerate_strategies,
    parameter_strategies,
)
from autoplan.units import DTYPE_BYTES

STATE_TENSORS = {
    "adamw": 2,
    "adam": 2,
    "sgd": 0,
    "sgd-momentum": 1,
}  # tensors like the parameter that the optimizer keeps
STEP_PASSES = {
    "adamw": 7,
    "adam": 7,
    "sgd": 3,
    "sgd-momentum": 5,
}  # reads and writes of such tensors in one step


@dataclass(frozen=True)
class Folded:
    """A graph with equal layers counted once.

    Attributes:
        graph: The full graph that one microbatch runs.
        ops: Representative ops, in order.
        count: Representative op, or parameter name -> how many it stands for.
        edges: (value, consumer op, slot) of representatives -> how often that edge is in the graph.
        representative: Any name -> its representative.
        crossing: Representative values that a later layer uses.
    """

    graph: Graph
    ops: tuple[Op, ...]
    count: Mapping[str, int]
    edges: Mapping[tuple[str, str, int], int]
    representative: Mapping[str, str]
    crossing: frozenset[str]


@dataclass(frozen=True)
class MeshCosts:
    """A stage's mesh on a cluster, as prices.

    Attributes:
        axis_sizes: (dp, tp).
        groups: One communication group per axis.
        profiles: The cluster's.
    """

    axis_sizes: tuple[int, ...]
    groups: tuple[Group, ...]
    profiles: Profiles

    @staticmethod
    def of(cluster: Cluster, ranks: tuple[int, ...], axis_sizes: tuple[int, ...]) -> MeshCosts:
        """The prices of the mesh that these ranks form in row-major order."""
        groups = tuple(
            axis_group(cluster, ranks, axis_sizes, axis) for axis in range(len(axis_sizes))
        )
        return MeshCosts(axis_sizes, groups, Profiles.of(cluster))

    def move_s(
        self,
        source: ShardingSpec,
        target: ShardingSpec,
        size_bytes: float,
        shares: dict[str, float] | None = None,
    ) -> float:
        """Seconds to convert a tensor of `size_bytes` (whole) from one spec to the other; notes
        seconds by kind of number.
        """
        total = 0.0
        for move in transition(source, target, self.axis_sizes):
            if not move.is_local:
                cost = collective_time(
                    self.profiles, move.kind, size_bytes * move.fraction, self.groups[move.axis]
                )
                total += cost.time_s
                if shares is not None:
                    shares[cost.source] = shares.get(cost.source, 0.0) + cost.time_s
        return total


@dataclass
class OpTable:
    """One representative op: parallel lists over its strategies."""

    op: Op
    strategies: tuple[Strategy, ...]
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    communication_s: list[float] = field(
        default_factory=list
    )  # collectives of the op's own local form, both ways
    saved_bytes: list[float] = field(default_factory=list)  # outputs and extras that autograd keeps
    transient_bytes: list[float] = field(default_factory=list)
    sources: list[dict[str, float]] = field(default_factory=list)


@dataclass
class ParameterTable:
    """One representative parameter: parallel lists over its storage choices."""

    value: Value
    strategies: tuple[ParameterStrategy, ...]
    step_s: list[float] = field(
        default_factory=list
    )  # gradient reduction, gather, optimizer: once per step
    reduce_s: list[float] = field(
        default_factory=list
    )  # gradient reduction after every microbatch (ZeRO-2)
    parameter_bytes: list[float] = field(default_factory=list)  # as stored, and the copy in use
    gradient_bytes: list[float] = field(default_factory=list)
    state_bytes: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)

    def held_bytes(self, choice: int) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes[choice] + self.gradient_bytes[choice] + self.state_bytes[choice]


@dataclass
class ValueTable:
    """One value's conversions: from each layout its producer may give to each a consumer may
    want.
    """

    name: str
    made: tuple[Layout, ...]
    wanted: tuple[Layout, ...]
    forward_s: list[list[float]]
    backward_s: list[list[float]]
    saved_bytes: list[list[float]]


@dataclass(frozen=True)
class CostTables:
    """Everything a solver needs of one folded graph on one mesh; see the module."""

    folded: Folded
    mesh: MeshCosts
    ops: Mapping[str, OpTable]
    parameters: Mapping[str, ParameterTable]
    values: Mapping[str, ValueTable]


@dataclass(frozen=True)
class Wishes:
    """What the user has decided, as far as strategies go.

    Attributes:
        training: Backward is priced, gradients and optimizer state are held.
        optimizer: A key of STATE_TENSORS.
        zero_levels: Levels that may be chosen.
        placements: (pattern of parameter names, spec as text) pins.
        split: Ops that tensor parallel ranks must share out where any of their letters divides.
    """

    training: bool
    optimizer: str
    zero_levels: tuple[int, ...]
    placements: tuple[tuple[str, str], ...] = ()
    split: frozenset[str] = frozenset()


OpTables = dict[tuple[object, ...], OpTable]


def build_tables(folded: Folded, rules: Mapping[str, OpRule], blocks: Mapping[str, Mapping[str, tuple[int, ...]]], batch: Batch,
                 # fmt: skip
                 mesh: MeshCosts, wishes: Wishes, rows: int, known: OpTables) -> CostTables:
    """The tables of a folded graph on a mesh.

    Args:
        folded: At one microbatch's sizes.
        rules, blocks: Per representative op.
        batch: Where the batch lies: on the first axis it alone is split.
        mesh: The stage's.
        wishes: Pins.
        rows: Batch rows of one microbatch on one data parallel rank.
        known: Op tables of earlier calls for the same graph and wishes, and where this call's go:
            an op costs the same wherever it sees the same rows on the same tensor parallel ranks.
    """
    builder = _TableBuilder(folded, rules, blocks, batch, mesh, wishes)
    builder.rows, builder.known = rows, known
    return builder.build()


class _TableBuilder:
    def __init__(
        self, folded: Folded, rules, blocks, batch: Batch, mesh: MeshCosts, wishes: Wishes
    ) -> None:  # type: ignore[no-untyped-def]
        self.folded, self.rules, self.blocks, self.batch, self.mesh, self.wishes = (
            folded,
            rules,
            blocks,
            batch,
            mesh,
            wishes,
        )
        self.graph = folded.graph
        self.from_parameters = _from_parameters(self.graph, folded)
        self.kernel_cache: dict[Kernel, tuple[float, str]] = {}
        self.rows, self.known = 0, {}  # see build_tables
        self.roots: dict[str, str] = {}  # value -> the value whose storage it shares

    def build(self) -> CostTables:
        ops = {op.name: self.op_table(op) for op in self.folded.ops}
        wanted: dict[str, dict[Layout, None]] = {}
        for value, consumer, slot in self.folded.edges:
            into = wanted.setdefault(value, {})
            for strategy in ops[consumer].strategies:
                into[strategy.inputs[slot]] = None
        parameters = {}
        for value in self.graph.of_kind("parameter"):
            if self.folded.representative.get(value.name, value.name) == value.name:
                parameters[value.name] = self.parameter_table(
                    value, tuple(wanted.get(value.name, {}))
                )
        keeps = self.consumers_that_keep(ops)
        charged = self.charged_once(ops, keeps)
        values = {}
        whole = ShardingSpec.replicated(len(self.mesh.axis_sizes))
        for name, layouts in wanted.items():
            made: tuple[Layout, ...]
            if name in parameters:
                made = tuple(dict.fromkeys(s.used for s in parameters[name].strategies))
            elif name in self.graph.producers:
                maker = self.graph.ops[self.graph.producers[name]].name
                table = ops[self.folded.representative.get(maker, maker)]
                at = table.op.outputs.index(name)
                made = tuple(dict.fromkeys(s.outputs[at] for s in table.strategies))
            else:
                made = (Layout(whole, whole),)
            values[name] = self.value_table(
                name, made, tuple(layouts), name in keeps, name in charged, name in parameters
            )
        return CostTables(self.folded, self.mesh, ops, parameters, values)

    # -- ops
    # ------------------------------------------------------------------------------------------------------

    def choices(self, op: Op) -> tuple[tuple[Choice, ...], ...]:
        """Per axis what may be chosen: the batch on dp; every other letter on tp."""
        rule = self.rules[op.name]
        dp, tp = self.mesh.axis_sizes
        letter = self.batch.letters.get(op.name)
        alone = op.name in self.batch.prologue or op.target == SLICE
        carries = any(self.graph.values[n].requires_grad for n in op.inputs)
        on_parameters = carries and all(n in self.from_parameters for n in op.inputs)
        first: tuple[Choice, ...] = (NONE,)
        if dp > 1 and not alone:
            if letter is not None and self._divides(rule, letter, dp):
                first = (Choice("factor", *letter),)
            else:
                first = tuple(
                    c
                    for c in axis_choices(rule, {}, sums=True, grads=on_parameters)
                    if c.kind != "factor"
                )
        second: tuple[Choice, ...] = (NONE,)
        if tp > 1 and not alone:
            found = axis_choices(
                rule, self.blocks.get(op.name, {}), sums=carries, grads=on_parameters
            )
            second = tuple(
                c
                for c in found
                if c.kind != "factor"
                or letter is None
                or c.letter != letter[0]
                or c.blocks != letter[1]
            )
            if not carries:
                second = tuple(c for c in second if c.kind in ("none", "factor"))
            if op.name in self.wishes.split:
                shared = tuple(
                    c
                    for c in second
                    if c.kind == "factor" and self._divides(rule, (c.letter, c.blocks), tp)
                )
                second = shared or second
        return first, second

    @staticmethod
    def _divides(rule: OpRule, letter: tuple[str, int], size: int) -> bool:
        name, blocks = letter
        return all(full % (blocks * size) == 0 for *_, full in rule.places[name])

    def op_table(self, op: Op) -> OpTable:
        dp, tp = self.mesh.axis_sizes
        groups = self.mesh.groups if op.target in _WITH_COLLECTIVES else ()
        whole = (
            self.graph.values[next(n for n in op.outputs if n)].meta.shape
            if op.name in self.batch.prologue
            else ()
        )
        key = (op.name, self.rows, tp, dp > 1, groups, whole)
        if key not in self.known:
            self.known[key] = self._op_table(op)
        return replace(
            self.known[key], op=op
        )  # the same prices; input names differ between cut and uncut graphs

    def _op_table(self, op: Op) -> OpTable:
        strategies = enumerate_strategies(
            op, self.rules[op.name], self.graph, self.mesh.axis_sizes, self.choices(op)
        )
        table = OpTable(op, strategies)
        inputs = tuple(self.graph.values[n].meta for n in op.inputs)
        outputs = tuple(self.graph.values[n].meta if n else None for n in op.outputs)
        grads = tuple(self.graph.values[n].requires_grad for n in op.inputs)
        for strategy in strategies:
            local_in = tuple(self._local(m, lay) for m, lay in zip(inputs, strategy.inputs))
            local_out = tuple(
                self._local(m, lay) if m else TensorMeta((), "bool")
                for m, lay in zip(outputs, strategy.outputs)
            )
            shares: dict[str, float] = {}
            table.forward_s.append(
                self._kernels_s(forward_kernels(op, local_in, local_out), shares)
            )
            back = 0.0
            if self.wishes.training and any(grads):
                back = self._kernels_s(backward_kernels(op, local_in, local_out, grads), shares)
            table.backward_s.append(back)
            table.communication_s.append(
                self._own_collectives_s(op, strategy, local_in, local_out, any(grads), shares)
            )
            self._memory(table, op, local_in, local_out, grads, outputs)
            table.sources.append(shares)
        return table

    def _local(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        return TensorMeta(layout.value.local_shape(meta.shape, self.mesh.axis_sizes), meta.dtype)

    def _kernels_s(self, kernels: tuple[Kernel, ...], shares: dict[str, float]) -> float:
        total = 0.0
        for kernel in kernels:
            known = self.kernel_cache.get(kernel)
            if known is None:
                cost = kernel_time(
                    self.mesh.profiles.device,
                    kernel.family,
                    kernel.flop,
                    kernel.num_bytes,
                    kernel.dtype,
                    kernel.shape,
                )
                known = self.kernel_cache[kernel] = (cost.time_s, cost.source)
            total += known[0]
            shares[known[1]] = shares.get(known[1], 0.0) + known[0]
        return total

    def _own_collectives_s(self, op: Op, strategy: Strategy, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...], grads: bool,
                           shares: dict[str, float]) -> float:  # fmt: skip
        """Collectives inside a local form: class-split losses and synchronised statistics
        (`executor/local_ops.py`).
        """
        total = 0.0
        training = self.wishes.training and grads
        for axis, placement in enumerate(strategy.inputs[0].value if strategy.inputs else ()):
            if not isinstance(placement, Shard):
                continue
            if (
                op.target.startswith("autoplan.cross_entropy")
                and op.target != "autoplan.cross_entropy_count"
                and placement.dim == min(1, len(inputs[0].shape) - 1)
            ):
                rows = (
                    inputs[0].numel
                    // max(inputs[0].shape[placement.dim], 1)
                    * DTYPE_BYTES[inputs[0].dtype]
                )
                sizes = [float(rows), 3.0 * rows]
            elif (
                op.target == "autoplan.batch_norm"
                and placement.dim != 1
                and op.arguments["training"]
            ):
                channels = inputs[0].shape[1] * DTYPE_BYTES[inputs[0].dtype]
                sizes = [float(channels)] * (4 if training else 2)
            else:
                continue
            for size in sizes:
                cost = collective_time(
                    self.mesh.profiles, "all_reduce", size, self.mesh.groups[axis]
                )
                total += cost.time_s
                shares[cost.source] = shares.get(cost.source, 0.0) + cost.time_s
        return total

    def _memory(self, table: OpTable, op: Op, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...], grads: tuple[bool, ...],
                metas: tuple[TensorMeta | None, ...]) -> None:  # fmt: skip
        """Bytes autograd keeps of this op's own, and the working set: its tensors, and in training
        their gradients.
        """
        saved = 0.0
        if self.wishes.training and any(grads):
            kept = saved_by(op, inputs, outputs, grads)
            saved = kept.extra_bytes + sum(
                outputs[i].size_bytes for i in kept.outputs if i < len(outputs)
            )
        table.saved_bytes.append(saved)
        own = sum(m.size_bytes for m, full in zip(outputs, metas) if full is not None)
        total = own + sum(m.size_bytes for m in inputs)
        table.transient_bytes.append(
            float(2 * total if self.wishes.training and any(grads) else total)
        )

    # -- what autograd keeps of inputs
    # ------------------------------------------------------------------------------

    def consumers_that_keep(self, ops: Mapping[str, OpTable]) -> set[str]:
        """Values that some consumer's backward needs."""
        keeps: set[str] = set()
        if not self.wishes.training:
            return keeps
        slots: dict[str, tuple[int, ...]] = {}
        for table in ops.values():
            op = table.op
            grads = tuple(self.graph.values[n].requires_grad for n in op.inputs)
            if any(grads):
                inputs = tuple(self.graph.values[n].meta for n in op.inputs)
                outputs = tuple(
                    self.graph.values[n].meta if n else TensorMeta((), "bool") for n in op.outputs
                )
                slots[op.name] = saved_by(op, inputs, outputs, grads).inputs
        for value, consumer, slot in self.folded.edges:
            if slot in slots.get(consumer, ()):
                keeps.add(value)
        return keeps

    def charged_once(self, ops: Mapping[str, OpTable], keeps: set[str]) -> set[str]:
        """Of the kept values that share one storage (a tensor and its views), the one that is
        charged for it.
        """
        charged: set[str] = set()
        taken: set[str] = set()
        for table in ops.values():
            op = table.op
            inputs = tuple(self.graph.values[n].meta for n in op.inputs)
            outputs = tuple(
                self.graph.values[n].meta if n else TensorMeta((), "bool") for n in op.outputs
            )
            grads = tuple(self.graph.values[n].requires_grad for n in op.inputs)
            saved = saved_by(op, inputs, outputs, grads)
            for i, name in enumerate(op.outputs):
                if not name:
                    continue
                root = name
                if saved.alias_of is not None:
                    root = self.roots.get(op.inputs[saved.alias_of], op.inputs[saved.alias_of])
                self.roots[name] = root
                if i in saved.outputs and any(grads):
                    taken.add(root)
        for name in sorted(keeps, key=lambda n: self.graph.producers.get(n, -1)):
            root = self.roots.get(name, name)
            if root not in taken:
                taken.add(root)
                charged.add(name)
        return charged

    # -- parameters
    # -------------------------------------------------------------------------------------------------

    def parameter_table(self, value: Value, wanted: tuple[Layout, ...]) -> ParameterTable:
        whole = ShardingSpec.replicated(len(self.mesh.axis_sizes))
        trainable = value.requires_grad and self.wishes.training
        strategies = parameter_strategies(
            value.meta.shape,
            value.requires_grad,
            wanted or (Layout(whole, whole),),
            self.mesh.axis_sizes,
            self.wishes.zero_levels,
        )
        strategies = self._pinned(value.name, strategies)
        table = ParameterTable(value, strategies)
        stored_bytes = value.meta.numel * DTYPE_BYTES[value.stored_dtype or value.meta.dtype]
        states = STATE_TENSORS[self.wishes.optimizer] if trainable else 0
        for strategy in strategies:
            stored = stored_bytes / strategy.spec.num_shards(self.mesh.axis_sizes)
            in_use = value.meta.size_bytes / strategy.used.value.num_shards(self.mesh.axis_sizes)
            gradient = stored_bytes / strategy.used.grad.num_shards(self.mesh.axis_sizes)
            copied = strategy.spec != strategy.used.value or bool(value.stored_dtype)
            gather_s = (
                self.mesh.move_s(strategy.spec, strategy.used.value, value.meta.size_bytes)
                if copied
                else 0.0
            )
            reduce_s = (
                self.mesh.move_s(strategy.used.grad, strategy.spec, stored_bytes)
                if trainable
                else 0.0
            )
            passes = STEP_PASSES[self.wishes.optimizer] if trainable else 0
            cast_bytes = stored + in_use if value.stored_dtype else 0.0
            update = Kernel(
                "memory",
                4.0 * stored,
                passes * stored + cast_bytes,
                value.stored_dtype or value.meta.dtype,
            )
            optimizer_s = self._kernels_s((update,), {}) if passes or cast_bytes else 0.0
            table.optimizer_s.append(optimizer_s)
            table.step_s.append(gather_s + optimizer_s + (reduce_s if strategy.zero != 2 else 0.0))
            table.reduce_s.append(reduce_s if strategy.zero == 2 else 0.0)
            table.parameter_bytes.append(stored + (in_use if copied else 0.0))
            if trainable:
                table.gradient_bytes.append(
                    stored
                    if strategy.zero >= 2
                    else gradient
                    + (
                        stored
                        if strategy.spec != strategy.used.grad and strategy.zero == 1
                        else 0.0
                    )
                )
            else:
                table.gradient_bytes.append(0.0)
            table.state_bytes.append(stored * states)
        return table

    def _pinned(
        self, name: str, strategies: tuple[ParameterStrategy, ...]
    ) -> tuple[ParameterStrategy, ...]:
        for pattern, spec in self.wishes.placements:
            if fnmatchcase(name, pattern):
                kept = tuple(s for s in strategies if spec in (str(s.used.value), str(s.spec)))
                if not kept:
                    offered = sorted({str(s.used.value) for s in strategies})
                    raise PinnedPlacementError(f"{name} cannot be placed as {spec} on a mesh of dp={self.mesh.axis_sizes[0]} x tp={self.mesh.axis_sizes[1]}; "
                                               f"its users allow {', '.join(offered)}")  # fmt: skip
                return kept
        return strategies

    # -- conversions
    # ------------------------------------------------------------------------------------------------

    def value_table(
        self,
        name: str,
        made: tuple[Layout, ...],
        wanted: tuple[Layout, ...],
        kept: bool,
        charged: bool,
        parameter: bool,
    ) -> ValueTable:
        value = self.graph.values[name]
        size = float(value.meta.size_bytes)
        carries = value.requires_grad and self.wishes.training
        again = (
            parameter or name in self.from_parameters
        )  # gathered again in backward instead of kept
        forward, backward, saved = [], [], []
        for source in made:
            row_f, row_b, row_s = [], [], []
            for target in wanted:
                ahead = self.mesh.move_s(source.value, target.value, size)
                back = self.mesh.move_s(target.grad, source.grad, size) if carries else 0.0
                if again and carries and kept:
                    back += ahead
                row_f.append(ahead)
                row_b.append(back)
                same = not transition(source.value, target.value, self.mesh.axis_sizes)
                keep = (
                    kept
                    and not again
                    and value.kind == "activation"
                    and (charged if same else True)
                )
                row_s.append(size / target.value.num_shards(self.mesh.axis_sizes) if keep else 0.0)
            forward.append(row_f)
            backward.append(row_b)
            saved.append(row_s)
        return ValueTable(name, made, wanted, forward, backward, saved)


_WITH_COLLECTIVES = frozenset(
    {"autoplan.cross_entropy", "autoplan.cross_entropy_sum", "autoplan.batch_norm"}
)


class PinnedPlacementError(ValueError):
    """A pinned placement is not among what the parameter's users allow."""


def _from_parameters(graph: Graph, folded: Folded) -> frozenset[str]:
    found = {v.name for v in graph.of_kind("parameter")}
    for op in folded.ops:
        if op.inputs and all(n in found for n in op.inputs):
            found.update(n for n in op.outputs if n)
    return frozenset(found)
