# SPDX-License-Identifier: Apache-2.0
"""What converting a value between layouts costs, and what autograd keeps of it for backward.

In: a folded graph with its op tables. Out: a `ValueTable` per value, from each layout that its
producer may give to each that a consumer may want. A value that backward needs is charged once for
its storage, whoever keeps it and under however many views.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.costs.saved import Saved, saved_by
from autoplan.costs.tables import Folded, MeshCosts, OpTable, ValueTable
from autoplan.graph import Graph, Op, TensorMeta
from autoplan.placements import Layout
from autoplan.sharding.resharding import transition

_Rows = tuple[list[list[float]], list[list[float]], list[list[float]]]


class Conversions:
    """Prices the conversions of one folded graph's values.

    Args:
        folded: At one microbatch's sizes.
        mesh: The stage's.
        ops: The op tables of the folded graph.
        training: Gradients are converted back, and tensors are kept for them.
        again: What is gathered from shards is kept as shards, and gathered again behind the
            products of backward.
    """

    def __init__(
        self,
        folded: Folded,
        mesh: MeshCosts,
        ops: Mapping[str, OpTable],
        *,
        training: bool,
        again: bool = False,
    ) -> None:
        self.folded, self.mesh, self.training, self.again = folded, mesh, training, again
        self.roots: dict[str, str] = {}
        """Value -> the value whose storage it shares."""
        self.graph = folded.graph
        self.from_parameters = from_parameters(folded)
        self._keepers = self._consumers_keep(ops) if training else {}
        """Values that some consumer's backward needs -> these consumers."""
        self._charged = self._charged_once(ops)
        """Of these, per storage the one that is charged for it."""
        self._known: dict[tuple[object, ...], _Rows] = {}
        """Tables by all that they depend on: many values are alike."""

    def table(self, name: str, made: tuple[Layout, ...], wanted: tuple[Layout, ...]) -> ValueTable:
        """Seconds both ways, and bytes kept, from each layout made to each wanted."""
        value = self.graph.values[name]
        size, kept = float(value.meta.size_bytes), name in self._keepers
        carries = value.requires_grad and self.training
        # what comes from parameters alone is gathered again in backward instead of kept
        again = name in self.from_parameters
        gathered_again = again and carries and kept
        root: float | None = None
        if kept and not again and value.kind == "activation":
            # unconverted, another's charge may cover it
            whole = self.graph.values[self.roots.get(name, name)].meta.size_bytes
            root = max(whole, size) if name in self._charged else 0.0
        key = (size, carries, gathered_again, root, made, wanted)
        if key not in self._known:
            self._known[key] = self._rows(size, carries, gathered_again, root, made, wanted)
        keepers = self._keepers.get(name, frozenset())
        return ValueTable(name, made, wanted, *self._known[key], keepers, gathered_again)

    def _rows(
        self,
        size: float,
        carries: bool,
        gathered_again: bool,
        root: float | None,
        made: tuple[Layout, ...],
        wanted: tuple[Layout, ...],
    ) -> _Rows:
        """Seconds forward and backward, and bytes kept, per layout made and wanted.

        Args:
            size: Bytes of the whole value.
            carries: Its gradient flows.
            gathered_again: It is converted again in backward instead of kept.
            root: Bytes of the storage that it is charged for where it is kept as made; None: it is
                not kept.
            made, wanted: Layouts.
        """
        host_s = self.mesh.profiles.device.host.conversion_s
        forward, backward, saved = [], [], []
        for source in made:
            row_f, row_b, row_s = [], [], []
            for target in wanted:
                ahead = self.mesh.move_s(source.value, target.value, size)
                back = self.mesh.move_s(target.grad, source.grad, size) if carries else 0.0
                if self._is_call(source, target, carries=carries):
                    ahead += host_s[0]
                    back += host_s[1] if carries else 0.0
                row_f.append(ahead)
                row_b.append(back + ahead if gathered_again else back)
                row_s.append(0.0 if root is None else self._kept_bytes(size, root, source, target))
            forward.append(row_f)
            backward.append(row_b)
            saved.append(row_s)
        return forward, backward, saved

    def _is_call(self, source: Layout, target: Layout, *, carries: bool) -> bool:
        """Whether the executor makes a conversion of it: something moves, forward or backward."""
        sizes = self.mesh.axis_sizes
        if transition(source.value, target.value, sizes):
            return True
        return carries and bool(transition(target.grad, source.grad, sizes))

    def _kept_bytes(self, size: float, root: float, source: Layout, target: Layout) -> float:
        """Bytes that a value holds where it is kept: converted, its own; else the whole storage
        that it lies in, once.
        """
        sizes = self.mesh.axis_sizes
        fewer = target.value.num_shards(sizes)
        if transition(source.value, target.value, sizes):
            return size / (max(source.value.num_shards(sizes), fewer) if self.again else fewer)
        return root / fewer

    def _consumers_keep(self, ops: Mapping[str, OpTable]) -> dict[str, frozenset[str]]:
        slots: dict[str, tuple[int, ...]] = {}
        for name, table in ops.items():
            if self._carries(table.op):
                slots[name] = self._saved(table.op).inputs
        keepers: dict[str, set[str]] = {}
        for value, consumer, slot in self.folded.edges:
            if slot in slots.get(consumer, ()):
                keepers.setdefault(value, set()).add(consumer)
        return {value: frozenset(consumers) for value, consumers in keepers.items()}

    def _charged_once(self, ops: Mapping[str, OpTable]) -> set[str]:
        """A tensor and its views share one storage; an op that saves its own output has paid."""
        roots = self.roots
        taken: set[str] = set()
        for table in ops.values():
            op, saved = table.op, self._saved(table.op)
            for i, name in enumerate(op.outputs):
                if not name:
                    continue
                roots[name] = name
                if saved.alias_of is not None:
                    source = op.inputs[saved.alias_of]
                    roots[name] = roots.get(source, source)
                if i in saved.outputs and self._carries(op):
                    taken.add(roots[name])
        charged: set[str] = set()
        for name in sorted(self._keepers, key=lambda n: self.graph.producers.get(n, -1)):
            root = roots.get(name, name)
            if root not in taken:
                taken.add(root)
                charged.add(name)
        return charged

    def _carries(self, op: Op) -> bool:
        return any(self.graph.values[n].requires_grad for n in op.inputs)

    def _saved(self, op: Op) -> Saved:
        values = self.graph.values
        return saved_by(
            op,
            tuple(values[n].meta for n in op.inputs),
            tuple(values[n].meta if n else TensorMeta((), "bool") for n in op.outputs),
            tuple(values[n].requires_grad for n in op.inputs),
        )


def from_parameters(folded: Folded) -> frozenset[str]:
    """Parameters, and values made from them alone."""
    graph: Graph = folded.graph
    found = {v.name for v in graph.of_kind("parameter")}
    for op in folded.ops:
        if op.inputs and all(n in found for n in op.inputs):
            found.update(n for n in op.outputs if n)
    return frozenset(found)
