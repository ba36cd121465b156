# SPDX-License-Identifier: Apache-2.0
"""Graph -> Graph: rows that are sorted, worked on and put back are worked on in their own order.

Mixtures of experts sort their rows by expert, multiply each run of rows by its expert's matrix, and
undo the sorting. A sort mixes the rows of the whole batch, so as it stands nothing of it could be
split. But whatever works row by row gives the same rows in another order, so every value whose rows
are permuted has a *twin* with the rows where they were; where the permutation is undone, the twin
is the result. The sorted originals are then used by nothing and are dropped by `graph.prune`.

    sort(ids) -> (ids', perm)     twins: ids, 0 1 2 ...
    row by row: f(x', y', w)      twin: f(x, y, w); the sharding rule says what works row by row
    grouped product(x', w, ends)  twin: `autoplan.grouped_mm`(x, w, ids): row r times w[ids[r]]
    x'[inverse of perm]           is x

A chain in which one link is not of these forms keeps its sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autoplan.graph import Graph, Op, Ref, TensorMeta, Value
from autoplan.sharding.factors import OpRule
from autoplan.sharding.rules import resolve

_PRODUCTS = {  # target -> names of its rows, matrices and ends of the groups
    "aten._grouped_mm.default": ("self", "mat2", "offs"),
    "transformers.grouped_mm_fallback.default": ("input", "weight", "offs"),
}
_COPY = "aten._to_copy.default"


def unsort(graph: Graph) -> Graph:
    """The same computation with rows in their own order where nothing needs the sorted one.

    The originals stay in it, unused.
    """
    if not any(op.target == "aten.sort.default" for op in graph.ops):
        return graph
    pass_ = _Unsorter(graph)
    for op in graph.ops:
        pass_.visit(op)
    return pass_.graph()


@dataclass(frozen=True, slots=True)
class _Twin:
    """A value with its rows (dim 0) in their own order, and the sort that permuted them."""

    name: str
    sort: str


class _Unsorter:
    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.values: dict[str, Value] = dict(graph.values)
        self.ops: list[Op] = []
        self.twins: dict[str, _Twin] = {}
        self.sorted_ids: dict[str, str] = {}  # sort -> the value that it sorted
        self.permutation: dict[str, str] = {}  # value -> the sort whose permutation it is
        self.inverse: dict[str, str] = {}  # value -> the sort whose permutation it undoes
        self.counts: dict[str, tuple[str, int]] = {}  # rows per group -> (sort, groups)
        self.ends: dict[str, tuple[str, int]] = {}  # their running sum -> (sort, groups)
        self.alias: dict[str, str] = {}
        self.maker: dict[str, Op] = {}

    def visit(self, op: Op) -> None:
        inputs = tuple(self.alias.get(name, name) for name in op.inputs)
        op = replace(op, inputs=inputs)
        if self.is_undone(op):
            return
        self.ops.append(op)
        self.maker.update((name, op) for name in op.outputs if name)
        if op.target == "aten.sort.default":
            self.sort(op)
        elif any(name in self.twins or name in self.permutation for name in op.inputs):
            self.follow(op)
        elif op.target == "aten.cumsum.default" and op.inputs[0] in self.counts:
            self.ends[op.outputs[0]] = self.counts[op.inputs[0]]
        elif op.target == _COPY and op.inputs[0] in self.counts:
            self.counts[op.outputs[0]] = self.counts[op.inputs[0]]
        elif op.target == _COPY and op.inputs[0] in self.ends:
            self.ends[op.outputs[0]] = self.ends[op.inputs[0]]

    # -- what a sort gives, and what undoes it

    def sort(self, op: Op) -> None:
        """A sort of one dim of whole numbers: its results, and where their rows were."""
        source = self.values[op.inputs[0]]
        if len(source.meta.shape) != 1 or source.meta.is_floating or source.name in self.twins:
            return
        self.sorted_ids[op.name] = source.name
        if op.outputs[0]:
            self.twins[op.outputs[0]] = _Twin(source.name, op.name)
        permutation = op.outputs[1]
        if permutation:
            self.permutation[permutation] = op.name
            iota = self.emit(
                f"{op.name}.rows",
                "aten.arange.default",
                (),
                TensorMeta(source.meta.shape, "int64"),
                {"end": source.meta.shape[0], "dtype": None},
                op,
            )
            self.twins[permutation] = _Twin(iota, op.name)

    def is_undone(self, op: Op) -> bool:
        """Whether this is x'[inverse]; its result is then x."""
        if op.target != "autoplan.index" or len(op.inputs) != 2:
            return False
        twin, sort = self.twins.get(op.inputs[0]), self.inverse.get(op.inputs[1])
        if twin is None or twin.sort != sort or op.arguments["indices"] != (Ref(1),):
            return False
        self.alias[op.outputs[0]] = twin.name
        return True

    def follow(self, op: Op) -> None:
        """An op of which an input has permuted rows."""
        if op.target in _PRODUCTS:
            self.product(op)
        elif op.target == "aten.histc.default":
            self.histogram(op)
        elif op.target in ("aten.index_put.default", "aten.argsort.default"):
            self.inversion(op)
        elif op.target == _COPY and op.inputs[0] in self.permutation:
            self.permutation[op.outputs[0]] = self.permutation[op.inputs[0]]
            self.row_by_row(op)
        else:
            self.row_by_row(op)

    def histogram(self, op: Op) -> None:
        """Rows per group: one bin per whole number. The order of the rows does not matter."""
        bins, given = op.arguments["bins"], op.arguments
        assert isinstance(bins, int), "histc takes a number of bins"
        twin = self.twins.get(op.inputs[0])
        if twin is not None and (given["min"], given["max"]) == (0, bins - 1):
            made = self.origin(twin.name)
            if made == self.sorted_ids[twin.sort]:
                self.counts[op.outputs[0]] = (twin.sort, bins)

    def origin(self, name: str) -> str:
        """The value behind casts: whole numbers as large as groups are the same in any dtype."""
        while name in self.maker and self.maker[name].target == _COPY:
            name = self.maker[name].inputs[0]
        return name

    def inversion(self, op: Op) -> None:
        """empty[perm] = 0 1 2 ..., or the order that sorts the permutation, undoes it."""
        if op.target == "aten.argsort.default":
            sort = self.permutation.get(op.inputs[0])
        else:
            where = op.arguments["indices"]
            values = op.arguments["values"]
            if not isinstance(where, tuple) or len(where) != 1 or not isinstance(values, Ref):
                return
            assert isinstance(where[0], Ref), "an index that is there is a tensor"
            sort = self.permutation.get(op.inputs[where[0].index])
            size = self.values[op.outputs[0]].meta.shape
            full = self.values[op.inputs[values.index]].meta.shape == size
            if op.arguments.get("accumulate") or not full or not self.is_iota(op, values.index):
                return
        if sort is not None:
            self.inverse[op.outputs[0]] = sort

    def is_iota(self, op: Op, slot: int) -> bool:
        """Whether an input is 0 1 2 ..."""
        return self.repeats_of(op.inputs[slot]) == 1

    # -- twins of what is computed

    def product(self, op: Op) -> None:
        """Runs of rows, each times its group's matrix -> each row times its own."""
        rows_name, matrices_name, ends_name = _PRODUCTS[op.target]
        slots = [op.arguments.get(name) for name in (rows_name, matrices_name, ends_name)]
        if op.arguments.get("bias") is not None or not all(isinstance(s, Ref) for s in slots):
            return
        rows, matrices, ends = (op.inputs[s.index] for s in slots if isinstance(s, Ref))
        twin, groups = self.twins.get(rows), self.ends.get(ends)
        out, weight = self.values[op.outputs[0]], self.values[matrices]
        if twin is None or groups is None or groups[0] != twin.sort:
            return
        if len(weight.meta.shape) != 3 or weight.meta.shape[0] != groups[1]:
            return
        if out.meta.dtype != weight.meta.dtype:  # it would be cast on the way: another op
            return
        arguments = {"input": Ref(0), "weight": Ref(1), "group": Ref(2), "num_groups": groups[1]}
        inputs = (twin.name, matrices, self.sorted_ids[twin.sort])
        name = self.emit(
            f"{op.name}.rows", "autoplan.grouped_mm", inputs, out.meta, arguments, op,
            out.requires_grad,
        )  # fmt: skip
        self.twins[op.outputs[0]] = _Twin(name, twin.sort)

    def row_by_row(self, op: Op) -> None:
        """The same op on the twins, if its rule gives the rows a letter of their own."""
        twins = [self.twins.get(name) for name in op.inputs]
        sorts = {twin.sort for twin in twins if twin is not None}
        metas = tuple(self.values[n].meta for n in op.inputs)
        outs = tuple(self.values[n].meta if n else None for n in op.outputs)
        rule = resolve(op, metas, outs)
        if len(sorts) != 1 or rule is None or not _keeps_rows(rule, twins):
            return
        (sort,) = sorts
        inputs = tuple(t.name if t else n for n, t in zip(op.inputs, twins))
        names = tuple(f"{n}.rows" if n else "" for n in op.outputs)
        for name, twin in zip(op.outputs, names):
            if name:
                self.values[twin] = replace(self.values[name], name=twin)
                self.twins[name] = _Twin(twin, sort)
        self.ops.append(replace(op, name=f"{op.name}.rows", inputs=inputs, outputs=names))
        self.maker.update((name, self.ops[-1]) for name in names if name)
        if op.target == "autoplan.index":
            self.look_up(self.ops[-1])

    def look_up(self, op: Op) -> None:
        """x[0 1 2 ...] is x, x[0 0 1 1 2 2 ...] is x with every row repeated."""
        if op.arguments["indices"] != (Ref(1),):
            return
        source, result = self.values[op.inputs[0]].meta, self.values[op.outputs[0]].meta
        repeats = self.repeats_of(op.inputs[1])
        if repeats == 0 or source.shape[0] * repeats != result.shape[0]:
            return
        self.ops.pop()
        if repeats == 1:
            self.rename(op.outputs[0], op.inputs[0])
            return
        arguments = {"self": Ref(0), "repeats": repeats, "dim": 0, "output_size": None}
        self.ops.append(
            replace(
                op,
                target="aten.repeat_interleave.self_int",
                inputs=op.inputs[:1],
                arguments=MappingProxyType(arguments),
            )
        )

    def repeats_of(self, name: str) -> int:
        """How often 0 1 2 ... has each number, 0 if this is no such value."""
        maker = self.maker.get(name)
        if maker is None:
            return 0
        given = maker.arguments
        if maker.target.startswith("aten.arange"):
            return int(given.get("start", 0) == 0 and given.get("step", 1) == 1)
        divides = maker.target.startswith("aten.floor_divide") or (
            maker.target == "aten.div.Tensor_mode" and given["rounding_mode"] == "floor"
        )
        divisor = given.get("other")
        if divides and isinstance(divisor, int) and self.repeats_of(maker.inputs[0]) == 1:
            return divisor
        return 0

    def rename(self, twin: str, name: str) -> None:
        for key, held in self.twins.items():
            if held.name == twin:
                self.twins[key] = _Twin(name, held.sort)

    def emit(
        self,
        name: str,
        target: str,
        inputs: tuple[str, ...],
        meta: TensorMeta,
        arguments: Mapping[str, object],
        origin: Op,
        requires_grad: bool = False,
    ) -> str:
        self.values[name] = Value(name, meta, "activation", requires_grad)
        self.ops.append(
            replace(
                origin,
                name=name,
                target=target,
                inputs=inputs,
                outputs=(name,),
                arguments=MappingProxyType(dict(arguments)),
            )
        )
        self.maker[name] = self.ops[-1]
        return name

    def graph(self) -> Graph:
        source = self.source
        return replace(
            source,
            values=MappingProxyType(self.values),
            ops=tuple(self.ops),
            outputs=tuple(self.alias.get(o, o) if o else None for o in source.outputs),
            loss=self.alias.get(source.loss, source.loss) if source.loss else None,
            buffer_updates=MappingProxyType(
                {k: self.alias.get(v, v) for k, v in source.buffer_updates.items()}
            ),
        )


def _keeps_rows(rule: OpRule, twins: list[_Twin | None]) -> bool:
    """Whether dim 0 of every permuted input, and of every output, is one letter that stands nowhere
    else: rows then go through the op one by one.
    """
    num_inputs = len(rule.inputs)
    permuted = {slot for slot, twin in enumerate(twins) if twin is not None}
    letters = {rule.inputs[slot][0][0].letter for slot in permuted if rule.inputs[slot]}
    if len(letters) != 1 or None in letters:
        return False
    (letter,) = letters
    assert letter is not None, "checked above"
    if letter in rule.contiguous or letter in rule.completes:
        return False
    places = {(tensor, dim, atom) for tensor, dim, atom, _, _ in rule.places[letter]}
    results = {num_inputs + i for i, dims in enumerate(rule.outputs) if dims}
    if places != {(tensor, 0, 0) for tensor in permuted | results}:
        return False
    tensors = (*rule.inputs, *rule.outputs)
    return all(len(tensors[tensor][0]) == 1 for tensor in permuted | results)
