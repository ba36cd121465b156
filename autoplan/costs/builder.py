# SPDX-License-Identifier: Apache-2.0
"""From a folded graph on a mesh to its `CostTables`.

In: the graph that one microbatch runs, with equal layers folded onto representatives, its rules
and the batch; a mesh (dp, tp) on a cluster; what the user wishes. Out: the tables. What each op may
choose is said here, and what its kernels and own collectives cost; parameters are priced in
`storage.py`, conversions in `conversions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoplan.costs.collectives import collective_time
from autoplan.costs.compute import kernel_time
from autoplan.costs.conversions import Conversions, from_parameters
from autoplan.costs.fusion import Fusion, stem_of
from autoplan.costs.kernels import Kernel, backward_kernels, forward_kernels
from autoplan.costs.saved import saved_by
from autoplan.costs.storage import parameter_table
from autoplan.costs.tables import (
    CostTables,
    Folded,
    MeshCosts,
    OpTable,
    OpTables,
    ParameterTable,
    ValueTable,
    Wishes,
)
from autoplan.graph import Op, TensorMeta
from autoplan.placements import Layout, Shard, ShardingSpec
from autoplan.sharding.batch import SLICE, Batch
from autoplan.sharding.factors import OpRule
from autoplan.sharding.strategies import (
    NONE,
    Choice,
    Strategy,
    axis_choices,
    enumerate_strategies,
)
from autoplan.units import DTYPE_BYTES

Blocks = Mapping[str, Mapping[str, tuple[int, ...]]]  # op name -> letter -> block counts

NORMS = frozenset({"layer_norm", "rms_norm"})
# collectives of ops whose ranks exchange among neighbours, forward and backward
EXCHANGES = {
    "autoplan.exchange": ("all_to_all", "all_to_all"),
    "autoplan.context": ("all_gather", "reduce_scatter"),
}
WITH_COLLECTIVES = frozenset(
    {"autoplan.cross_entropy", "autoplan.cross_entropy_sum", "autoplan.batch_norm", *EXCHANGES}
)


def build_tables(
    folded: Folded,
    rules: Mapping[str, OpRule],
    blocks: Blocks,
    batch: Batch,
    mesh: MeshCosts,
    wishes: Wishes,
    *,
    rows: int,
    known: OpTables,
) -> CostTables:
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

    Raises:
        PinnedPlacementError: A pinned placement is not among a parameter's choices.
    """
    builder = _TableBuilder(folded, rules, blocks, batch, mesh, wishes)
    ops = {op.name: builder.op_table(op, rows, known) for op in folded.ops}
    wanted = _wanted(folded, ops)
    parameters = {}
    for value in folded.graph.of_kind("parameter"):
        if folded.representative.get(value.name, value.name) == value.name:
            layouts = tuple(wanted.get(value.name, ()))
            apart = wishes.apart is not None and value.name in wishes.apart[0]
            own = wishes.apart[1] if apart and wishes.apart else mesh
            parameters[value.name] = parameter_table(value, layouts, own, wishes)
    conversions = Conversions(
        folded, mesh, ops, training=wishes.training, again=wishes.runtime.gathers_again
    )
    values: dict[str, ValueTable] = {}
    for name, layouts in wanted.items():
        made = _made(name, folded, ops, parameters, len(mesh.axis_sizes))
        values[name] = conversions.table(name, made, layouts)
    return CostTables(folded, mesh, ops, parameters, values)


def _wanted(folded: Folded, ops: Mapping[str, OpTable]) -> dict[str, tuple[Layout, ...]]:
    """Value -> every layout in which some strategy of some consumer wants it."""
    wanted: dict[str, dict[Layout, None]] = {}
    for value, consumer, slot in folded.edges:
        into = wanted.setdefault(value, {})
        for strategy in ops[consumer].strategies:
            into[strategy.inputs[slot]] = None
    return {value: tuple(layouts) for value, layouts in wanted.items()}


def _made(
    name: str,
    folded: Folded,
    ops: Mapping[str, OpTable],
    parameters: Mapping[str, ParameterTable],
    num_axes: int,
) -> tuple[Layout, ...]:
    """Every layout in which a value may be made; inputs and buffers are whole everywhere."""
    if name in parameters:
        return tuple(dict.fromkeys(s.used for s in parameters[name].strategies))
    graph = folded.graph
    if name in graph.producers:
        maker = graph.ops[graph.producers[name]].name
        table = ops[folded.representative.get(maker, maker)]
        at = table.op.outputs.index(name)
        return tuple(dict.fromkeys(s.outputs[at] for s in table.strategies))
    whole = ShardingSpec.replicated(num_axes)
    return (Layout(whole, whole),)


class _TableBuilder:
    """Op tables of one folded graph on one mesh."""

    def __init__(
        self,
        folded: Folded,
        rules: Mapping[str, OpRule],
        blocks: Blocks,
        batch: Batch,
        mesh: MeshCosts,
        wishes: Wishes,
    ) -> None:
        self.graph, self.rules, self.blocks = folded.graph, rules, blocks
        self.batch, self.mesh, self.wishes = batch, mesh, wishes
        self.from_parameters = from_parameters(folded)
        known_kernels = mesh.profiles.device.flash
        self.attention = next((a for a in wishes.runtime.attention if a in known_kernels), "")
        self.device = mesh.profiles.device.sustained(wishes.runtime.products)
        self.joined = replace(self.device, launch_s=0.0)
        self.kernel_cache: dict[tuple[Kernel, bool, float | None], tuple[float, str]] = {}
        self.fusion = Fusion(folded, wishes.runtime)
        self.passes = dict.fromkeys(NORMS, wishes.runtime.norm_passes)
        self.passes["softmax"] = wishes.runtime.softmax_passes
        self.loss = _loss_ops(folded) if wishes.runtime.loss_bytes else frozenset()

    def op_table(self, op: Op, rows: int, known: OpTables) -> OpTable:
        """The op's table, from `known` where an equal one is there; see `build_tables`."""
        dp, tp = self.mesh.axis_sizes
        groups = self.mesh.groups if op.target in WITH_COLLECTIVES else ()
        whole: tuple[int, ...] = ()
        if op.name in self.batch.prologue:
            whole = self.graph.values[next(n for n in op.outputs if n)].meta.shape
        key = (op.name, rows, tp, dp > 1, groups, whole)
        if key not in known:
            known[key] = self._op_table(op)
        # the same prices; input names differ between cut and uncut graphs
        return replace(known[key], op=op)

    # -- choices

    def choices(self, op: Op) -> tuple[tuple[Choice, ...], ...]:
        """Per axis what may be chosen: the batch on dp; every other letter on tp."""
        if op.name in self.batch.prologue or op.target == SLICE:
            return (NONE,), (NONE,)
        carries = any(self.graph.values[n].requires_grad for n in op.inputs)
        on_parameters = carries and all(n in self.from_parameters for n in op.inputs)
        return (
            self._choices_on_dp(op, on_parameters),
            self._choices_on_tp(op, carries, on_parameters),
        )

    def _choices_on_dp(self, op: Op, on_parameters: bool) -> tuple[Choice, ...]:
        rule, letter, dp = self.rules[op.name], self.batch.letters.get(op.name), self._size(0)
        if dp == 1:
            return (NONE,)
        if letter is not None and self._divides(rule, letter, dp):
            return (Choice("factor", *letter),)
        found = axis_choices(rule, {}, sums=True, grads=on_parameters)
        return tuple(c for c in found if c.kind != "factor")

    def _choices_on_tp(self, op: Op, carries: bool, on_parameters: bool) -> tuple[Choice, ...]:
        rule, letter, tp = self.rules[op.name], self.batch.letters.get(op.name), self._size(1)
        if tp == 1:
            return (NONE,)
        blocks = self.blocks.get(op.name, {})
        allowed = self.wishes.letters.get(op.name)
        found = tuple(
            c
            for c in axis_choices(rule, blocks, sums=carries, grads=on_parameters)
            if c.kind != "factor"
            or (
                (letter is None or (c.letter, c.blocks) != letter)
                and (allowed is None or c.letter in allowed)
            )
        )
        if not carries:
            found = tuple(c for c in found if c.kind in ("none", "factor"))
        if op.name in self.wishes.split:
            shared = tuple(
                c
                for c in found
                if c.kind == "factor" and self._divides(rule, (c.letter, c.blocks), tp)
            )
            return shared or found
        return found

    def _size(self, axis: int) -> int:
        return self.mesh.axis_sizes[axis]

    @staticmethod
    def _divides(rule: OpRule, letter: tuple[str, int], size: int) -> bool:
        name, blocks = letter
        return all(full % (blocks * size) == 0 for *_, full in rule.places[name])

    # -- prices

    def _op_table(self, op: Op) -> OpTable:
        strategies = enumerate_strategies(
            op, self.rules[op.name], self.graph, self.mesh.axis_sizes, self.choices(op)
        )
        table = OpTable(op, strategies)
        inputs = tuple(self.graph.values[n].meta for n in op.inputs)
        outputs = tuple(self.graph.values[n].meta if n else None for n in op.outputs)
        grads = tuple(self.graph.values[n].requires_grad for n in op.inputs)
        backward = self.wishes.training and any(grads)
        nothing = (False,) * len(grads)
        for strategy in strategies:
            local_in = tuple(self._local(m, lay) for m, lay in zip(inputs, strategy.inputs))
            local_out = tuple(
                self._local(m, lay) if m else TensorMeta((), "bool")
                for m, lay in zip(outputs, strategy.outputs)
            )
            shares: dict[str, float] = {}
            kernels = forward_kernels(op, local_in, local_out)
            later = backward_kernels(op, local_in, local_out, grads) if backward else ()
            if op.name in self.wishes.float8:
                kernels, later = self._in_float8(kernels), self._in_float8(later)
            passes = self.passes.get(stem_of(op), 1.0)
            kernels, later = _written_out(kernels, passes), _written_out(later, passes)
            kernels = self.fusion.fused(op, kernels, local_in, local_out)
            later = self.fusion.fused(op, later, local_in, local_out)
            ahead = self._kernels_s(op, kernels, shares, 0)
            back = self._kernels_s(op, later, shares, 1)
            table.launches.append((self._launches(op, kernels), self._launches(op, later)))
            own = self._own_collectives_s(op, strategy, local_in, backward, shares)
            table.forward_s.append(ahead)
            table.backward_s.append(back)
            table.communication_s.append(own)
            table.sources.append(shares)
            kept = saved_by(op, local_in, local_out, grads if backward else nothing)
            here = (local_out[i].size_bytes for i in kept.outputs if i < len(local_out))
            saved = kept.extra_bytes + sum(here)
            # the working set: its tensors, and in training their gradients; a view has no tensor of
            # its own, only a gradient
            made = sum(m.size_bytes for m, full in zip(local_out, outputs) if full is not None)
            if kept.alias_of is None:
                made += sum(m.size_bytes for m in local_in)
                made *= 2 if backward else 1
            elif not backward:
                made = 0
            transient = float(made)
            if backward and op.name in self.loss:
                transient = self._loss_bytes(op, strategy, local_in[0])
                saved = min(saved, transient)
                transient -= saved
            table.saved_bytes.append(saved)
            table.transient_bytes.append(transient)
        return table

    def _loss_bytes(self, op: Op, strategy: Strategy, logits: TensorMeta) -> float:
        """Bytes that live at the peak of the loss as the runtime computes it; nothing at what
        makes its logits, which is part of it.
        """
        if not op.target.startswith("autoplan.cross_entropy"):
            return 0.0
        split = isinstance(strategy.inputs[0].value[1], Shard)
        return self.wishes.runtime.loss_bytes[int(split)] * logits.numel

    def _local(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        return TensorMeta(layout.value.local_shape(meta.shape, self.mesh.axis_sizes), meta.dtype)

    def _kernels_s(
        self, op: Op, kernels: tuple[Kernel, ...], shares: dict[str, float], direction: int
    ) -> float:
        """Seconds of an op's kernels, forward (0) or backward (1), and of the host between them."""
        total, joins = 0.0, op.name in self.fusion.joining
        rates = self.device.elementwise.get(stem_of(op))
        rate = rates[direction] if rates else None
        host_s = self.device.host.op_s[direction] if kernels else 0.0
        if host_s:
            total += host_s
            shares["measured"] = shares.get("measured", 0.0) + host_s
        for kernel in kernels:
            known = self.kernel_cache.get((kernel, joins, rate))
            if known is None:
                cost = kernel_time(
                    self.joined if joins else self.device,
                    kernel.family,
                    kernel.flop,
                    kernel.num_bytes,
                    kernel.dtype,
                    kernel.shape,
                    self.attention,
                    rate,
                )
                known = self.kernel_cache[kernel, joins, rate] = (cost.time_s, cost.source)
            total += known[0]
            shares[known[1]] = shares.get(known[1], 0.0) + known[0]
        return total

    def _launches(self, op: Op, kernels: tuple[Kernel, ...]) -> int:
        """Kernels that the host launches for it; one that joins its neighbour's adds none."""
        if op.name in self.fusion.joining:
            return 0
        if op.target == "autoplan.expert_mm":  # libraries loop over the experts
            return sum(kernel.shape[0] if kernel.shape else 1 for kernel in kernels)
        return sum(kernel.family != "view" for kernel in kernels)

    def _in_float8(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """Products in float8, each behind passes that write its operands' copies.

        Source: Micikevicius et al., "FP8 formats for deep learning", 2022; Transformer Engine's
        cast and transpose kernels.
        """
        found: list[Kernel] = []
        for kernel in kernels:
            if kernel.family != "matmul":
                found.append(kernel)
                continue
            batch, m, n, k = kernel.shape
            width = DTYPE_BYTES[kernel.dtype]
            operands = batch * (m * k + n * k)
            saved = (width - 1.0) * operands
            cast_bytes = self.wishes.runtime.float8_casts * (width + 1.0) * operands
            found.append(Kernel("memory", 0.0, cast_bytes, kernel.dtype))
            product = replace(kernel, num_bytes=kernel.num_bytes - saved, dtype="float8_e4m3fn")
            found.append(product)
        return tuple(found)

    def _own_collectives_s(
        self,
        op: Op,
        strategy: Strategy,
        inputs: tuple[TensorMeta, ...],
        backward: bool,
        shares: dict[str, float],
    ) -> float:
        """Collectives inside a local form: class-split losses and synchronised statistics, as the
        executor runs them; exchanges among neighbours.
        """
        total = 0.0
        if op.target in EXCHANGES:
            ranks, made = op.arguments["ranks"], self.graph.values[op.outputs[0]].meta
            group = dict(self.mesh.near)[int(str(ranks))]
            size = float(self._local(made, strategy.outputs[0]).size_bytes)
            for kind in EXCHANGES[op.target][: 2 if backward else 1]:
                cost = collective_time(self.mesh.profiles, kind, size, group)
                total += cost.time_s
                shares[cost.source] = shares.get(cost.source, 0.0) + cost.time_s
            return total
        for axis, placement in enumerate(strategy.inputs[0].value if strategy.inputs else ()):
            if not isinstance(placement, Shard):
                continue
            for size in _own_sizes(op, inputs[0], placement.dim, backward):
                cost = collective_time(
                    self.mesh.profiles, "all_reduce", size, self.mesh.groups[axis]
                )
                total += cost.time_s
                shares[cost.source] = shares.get(cost.source, 0.0) + cost.time_s
        return total


def _written_out(kernels: tuple[Kernel, ...], passes: float) -> tuple[Kernel, ...]:
    """What one kernel could do, done by several that move its bytes `passes` times."""
    if passes == 1.0:
        return kernels
    return tuple(replace(k, num_bytes=k.num_bytes * passes) for k in kernels)


def _loss_ops(folded: Folded) -> frozenset[str]:
    """Losses over classes, and what makes their logits, back to the product with a parameter."""
    maker = {name: op for op in folded.ops for name in op.outputs if name}
    losses = [op for op in folded.ops if op.target.startswith("autoplan.cross_entropy")]
    found = {op.name for op in losses}
    for op in losses:
        while op.inputs and op.inputs[0] in maker:
            op = maker[op.inputs[0]]
            found.add(op.name)
            if any(folded.graph.values[n].kind == "parameter" for n in op.inputs):
                break
    return frozenset(found)


def _own_sizes(op: Op, local: TensorMeta, dim: int, backward: bool) -> list[float]:
    """Bytes of each all-reduce that an op's local form runs over an axis that splits its input.

    Args:
        op: Any op; most have none.
        local: Of its first input.
        dim: Of that input, which the axis splits.
        backward: Its backward runs too.
    """
    width = DTYPE_BYTES[local.dtype]
    if op.target.startswith("autoplan.cross_entropy"):
        classes = min(1, len(local.shape) - 1)
        if op.target == "autoplan.cross_entropy_count" or dim != classes:
            return []
        rows = local.numel // max(local.shape[dim], 1) * width
        return [float(rows), 3.0 * rows]
    if op.target == "autoplan.batch_norm" and dim != 1 and op.arguments["training"]:
        return [float(local.shape[1] * width)] * (4 if backward else 2)
    return []
