# SPDX-License-Identifier: Apache-2.0
"""The batch: where it lies in every tensor, and how a graph is cut into microbatches (DESIGN 8).

Microbatches are one more mesh axis, in time, assigned to the batch's letter in every op.
`find_batch` follows that letter through the rules and says what each value is over time: "S" (cut),
"R" (the same in every microbatch), "P" (a sum over microbatches). What needs the whole batch but
depends on inputs alone runs once before the first microbatch (the prologue: a count of labels);
what needs it and depends on parameters hinders cutting and is named. `cut_batch` writes the graph
that one microbatch runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoplan.graph import Graph, Op, Ref, TensorMeta, Value
from autoplan.sharding.factors import OpRule

SLICE = "autoplan.microbatch"  # value of the whole batch -> its rows of one microbatch


@dataclass(frozen=True)
class Batch:
    """The batch of a graph.

    Attributes:
        size: Rows of the global batch; 1 when no input has a batch dim.
        positions: value -> (dim, blocks) where the batch lies in it.
        letters: op -> (letter, blocks) of the batch in its rule.
        over_time: value -> "S", "R" or "P".
        prologue: Ops that run once, on the whole batch.
        hindrances: op -> why it keeps the batch from being cut; empty when it can be cut.
    """

    size: int
    positions: Mapping[str, tuple[int, int]]
    letters: Mapping[str, tuple[str, int]]
    over_time: Mapping[str, str]
    prologue: frozenset[str]
    hindrances: Mapping[str, str]


def batch_inputs(graph: Graph) -> dict[str, int]:
    """The inputs that have the batch as their dim 0: those that share the commonest leading size,
    and that size.
    """
    sizes = [graph.values[n].meta.shape[0] for n in graph.inputs if graph.values[n].meta.shape]
    if not sizes:
        return {}
    size = max(dict.fromkeys(sizes), key=sizes.count)
    return {n: size for n in graph.inputs if graph.values[n].meta.shape[:1] == (size,)}


def find_batch(
    graph: Graph, rules: Mapping[str, OpRule], inputs: Mapping[str, int] | None = None
) -> Batch:
    """Follows the batch through the graph.

    Args:
        graph: At global sizes.
        rules: op name -> rule.
        inputs: Batch inputs and the batch's size; default `batch_inputs(graph)`.
    """
    inputs = batch_inputs(graph) if inputs is None else inputs
    size = next(iter(inputs.values()), 1)
    positions: dict[str, tuple[int, int]] = {name: (0, 1) for name in inputs} if size > 1 else {}
    letters: dict[str, tuple[str, int]] = {}
    changed, rounds = True, 0
    while changed and rounds < 8:
        changed = False
        rounds += 1
        for op in graph.ops if rounds % 2 else reversed(graph.ops):
            changed |= _follow(op, rules[op.name], graph, positions, letters)
    tracker = _OverTime(graph, rules, positions, letters)
    for op in graph.ops:
        tracker.visit(op)
    tracker.check_ends()
    return Batch(
        size,
        positions,
        letters,
        MappingProxyType(tracker.over_time),
        frozenset(tracker.prologue),
        MappingProxyType(tracker.hindrances),
    )


def _follow(
    op: Op,
    rule: OpRule,
    graph: Graph,
    positions: dict[str, tuple[int, int]],
    letters: dict[str, tuple[str, int]],
) -> bool:
    """Spreads the batch from any tensor of the op to the others through its letter."""
    names = (*op.inputs, *op.outputs)
    if op.name not in letters:
        for letter in rule.letters:
            for tensor, dim, _, left, size in rule.places[letter]:
                at = positions.get(names[tensor])
                if (
                    at
                    and at[0] == dim
                    and at[1] % left == 0
                    and at[1] // left < size
                    and size % (at[1] // left) == 0
                ):
                    if at[1] // left > 1 and letter in rule.contiguous:
                        continue
                    letters[op.name] = (letter, at[1] // left)
                    break
            if op.name in letters:
                break
    if op.name not in letters:
        return False
    letter, blocks = letters[op.name]
    changed = False
    for tensor, dim, _, left, _ in rule.places[letter]:
        name = names[tensor]
        if name and name not in positions and graph.values[name].kind == "activation":
            positions[name] = (dim, left * blocks)
            changed = True
    return changed


class _OverTime:
    """What every value is over the microbatches, op by op in order."""

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[str, OpRule],
        positions: Mapping[str, tuple[int, int]],
        letters: Mapping[str, tuple[str, int]],
    ) -> None:
        self.graph, self.rules, self.positions, self.letters = graph, rules, positions, letters
        self.over_time = {
            v.name: "S" if v.name in positions else "R"
            for v in graph.values.values()
            if v.kind != "activation"
        }
        self.from_inputs = {
            v.name: not v.requires_grad for v in graph.values.values() if v.kind != "activation"
        }
        self.prologue: set[str] = set()
        self.hindrances: dict[str, str] = {}

    def visit(self, op: Op) -> None:
        from_inputs = not op.draws and all(self.from_inputs[n] for n in op.inputs)
        for name in op.outputs:
            if name:
                self.from_inputs[name] = from_inputs
        reason = self._place(op)
        if reason is not None and self._promote_inputs(op):
            reason = self._place(op)
        if reason is None:
            return
        if from_inputs:
            self._move_to_prologue(op)
        else:
            self.hindrances[op.name] = reason
            for name in op.outputs:
                if name:
                    self.over_time[name] = "R"

    def _place(self, op: Op) -> str | None:
        """Sets the outputs' states; a reason when the op needs the whole batch."""
        rule, batch = self.rules[op.name], self.letters.get(op.name)
        states = [self.over_time[n] for n in op.inputs]
        summed = frozenset(i for i, s in enumerate(states) if s == "P")
        outputs = [(i, n) for i, n in enumerate(op.outputs) if n]
        if batch is None:
            if "S" in states:
                return f"{op.target} works across the batch"
            if summed and summed not in rule.linear:
                return f"{op.target} needs a sum over the whole batch"
            for _, name in outputs:
                self.over_time[name] = "P" if summed else "R"
            return None
        letter, blocks = batch
        places = {tensor: (dim, left * blocks) for tensor, dim, _, left, _ in rule.places[letter]}
        for slot, name in enumerate(op.inputs):
            if states[slot] == "S" and places.get(slot) != self.positions.get(name):
                return f"{op.target} works across the batch"
        if summed:
            return f"{op.target} needs a sum over the whole batch"
        lacking = [name for i, name in outputs if len(op.inputs) + i not in places]
        if lacking and letter in rule.completes:
            return f"{op.target} takes statistics over the batch"
        for _, name in outputs:
            self.over_time[name] = "P" if name in lacking else "S"
        return None

    def _promote_inputs(self, op: Op) -> bool:
        """Makes whole what the op needs as a sum over the batch, where inputs alone decide it."""
        producers, found = self.graph.producers, False
        for name in op.inputs:
            if self.over_time[name] == "P" and self.from_inputs[name] and name in producers:
                self._move_to_prologue(self.graph.ops[producers[name]])
                found = True
        return found

    def _move_to_prologue(self, op: Op) -> None:
        """This op and everything it needs runs once on the whole batch."""
        stack = [op]
        while stack:
            current = stack.pop()
            if current.name in self.prologue:
                continue
            self.prologue.add(current.name)
            for name in current.outputs:
                if name:
                    self.over_time[name] = "R"
            producers = self.graph.producers
            stack += [self.graph.ops[producers[n]] for n in current.inputs if n in producers]

    def check_ends(self) -> None:
        loss = self.graph.loss
        if loss is not None and self.positions and self.over_time[loss] == "R":
            self.hindrances.setdefault("loss", "the loss is not a sum or mean over the batch")
        for buffer, name in self.graph.buffer_updates.items():
            if self.over_time[name] != "R":
                self.hindrances.setdefault(buffer, f"buffer {buffer} is updated from the batch")


def cut_batch(graph: Graph, batch: Batch, num_microbatches: int) -> Graph:
    """The graph that one of `num_microbatches` microbatches runs; the graph itself for 1.

    Values over time "S" have their batch dim divided. Where an op needs the rows of a value that is
    whole, a `SLICE` op makes them (`value@rows`). Prologue ops keep global sizes.

    Raises:
        ValueError: The batch cannot be cut so; the message says why.
    """
    if num_microbatches == 1:
        return graph
    if batch.hindrances:
        op, reason = next(iter(batch.hindrances.items()))
        raise ValueError(f"the batch cannot be cut into microbatches: {reason} ({op})")
    if batch.size % num_microbatches:
        raise ValueError(
            f"a batch of {batch.size} does not divide into {num_microbatches} microbatches"
        )
    return _Cutter(graph, batch, num_microbatches).run()


class _Cutter:
    def __init__(self, graph: Graph, batch: Batch, parts: int) -> None:
        self.graph, self.batch, self.parts = graph, batch, parts
        self.values: dict[str, Value] = {
            v.name: v for v in graph.values.values() if v.kind != "activation"
        }
        self.ops: list[Op] = []

    def run(self) -> Graph:
        graph = self.graph
        for op in graph.ops:
            inside = op.name not in self.batch.prologue
            inputs = tuple(
                self._rows(n) if inside and self._needs_rows(op, n) else n for n in op.inputs
            )
            self.ops.append(
                Op(op.name, op.target, inputs, op.outputs, op.arguments, op.module_path, op.source)
            )
            for name in op.outputs:
                if name:
                    value = graph.values[name]
                    meta = self._smaller(value) if self.batch.over_time[name] == "S" else value.meta
                    self.values[name] = Value(name, meta, value.kind, value.requires_grad)
        outputs = tuple(
            self._rows(o)
            if o and o in self.batch.positions and self.batch.over_time[o] == "R"
            else o
            for o in graph.outputs
        )
        return Graph(
            graph.name,
            MappingProxyType(self.values),
            tuple(self.ops),
            graph.inputs,
            outputs,
            graph.loss,
            graph.buffer_updates,
            graph.shared,
        )

    def _needs_rows(self, op: Op, name: str) -> bool:
        whole = self.batch.over_time[name] == "R" or self.graph.values[name].kind == "input"
        return whole and name in self.batch.positions and op.name in self.batch.letters

    def _smaller(self, value: Value) -> TensorMeta:
        dim, _ = self.batch.positions[value.name]
        shape = list(value.meta.shape)
        shape[dim] //= self.parts
        return TensorMeta(tuple(shape), value.meta.dtype)

    def _rows(self, name: str) -> str:
        rows = f"{name}@rows"
        if rows not in self.values:
            value = self.graph.values[name]
            dim, blocks = self.batch.positions[name]
            self.values[rows] = Value(rows, self._smaller(value), "activation", False)
            arguments = MappingProxyType({"self": Ref(0), "dim": dim, "blocks": blocks})
            self.ops.append(Op(rows, SLICE, (name,), (rows,), arguments))
        return rows
