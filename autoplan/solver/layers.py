# SPDX-License-Identifier: Apache-2.0
"""Layers: ops that a pipeline never parts, and which of them are equal.

The chain of a graph (`sharding/cutting.py`) is grouped by the repeated modules it comes from
(`model.layers.3`); what lies between is parted at ops that own parameters. Layers with the same
ops, shapes, dtypes and wiring form a class; every op, parameter and value of a layer has its
counterpart in the first layer of its class, its representative. Depth then costs the solver
nothing: it sees each class once, with its multiplicity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise, takewhile

from autoplan.costs.tables import Folded
from autoplan.graph import Graph, Op
from autoplan.sharding.cutting import free_ops


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        label: "model.layers.3", or the module of its first op.
        ops: Its chain ops and the free ops that it alone uses, in graph order.
        first_op, last_op: Of its chain ops.
        block_class: Number of its class; equal layers share it.
        is_block: It is a repeated module, which may be recomputed.
    """

    label: str
    ops: tuple[str, ...]
    first_op: str
    last_op: str
    block_class: int
    is_block: bool


@dataclass(frozen=True)
class Layers:
    """A graph's layers in chain order.

    Attributes:
        layers: In order.
        shared_ops: Free ops that several layers use (masks, rotary tables), or that no layer does.
        representative: Op, value or parameter name -> its counterpart in the first layer of the
            class; names without one map to themselves.
    """

    layers: tuple[Layer, ...]
    shared_ops: tuple[str, ...]
    representative: Mapping[str, str]


def find_layers(graph: Graph, placements: tuple[tuple[str, str], ...] = ()) -> Layers:
    """The layers of a graph, with equal ones recognised.

    Args:
        graph: Of the whole batch.
        placements: Pinned (pattern, spec): they tell otherwise equal layers apart.
    """
    free = free_ops(graph)
    chain = [op for op in graph.ops if op.name not in free]
    groups = _parted(graph, chain, _labels(chain))
    layer_of = {op.name: i for i, (_, ops, _) in enumerate(groups) for op in ops}
    shared = _attach_free_ops(graph, free, layer_of)
    members: list[list[Op]] = [[] for _ in groups]
    for op in graph.ops:
        if op.name in layer_of:
            members[layer_of[op.name]].append(op)
    shared_parameters = _shared_parameters(graph, layer_of)
    classes: dict[tuple[object, ...], int] = {}
    first: dict[int, list[Op]] = {}
    representative: dict[str, str] = {}
    layers = []
    for (label, ops, is_block), all_ops in zip(groups, members):
        key = _signature(graph, all_ops, layer_of, placements, shared_parameters)
        number = classes.setdefault(key, len(classes))
        model = first.setdefault(number, all_ops)
        _pair(graph, all_ops, model, representative)
        layers.append(
            Layer(
                label, tuple(op.name for op in all_ops), ops[0].name, ops[-1].name, number, is_block
            )
        )
    return Layers(tuple(layers), tuple(shared), representative)


def _prefixes(path: str) -> list[str]:
    """Prefixes of a module path that end in a number, outermost first: "a.3" and "a.3.b.0" of
    "a.3.b.0.c".
    """
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _labels(chain: list[Op]) -> dict[str, str | None]:
    """Op -> the repeated module it belongs to.

    The outermost numbered module counts if it has an equal sibling (same ops in number and kind);
    else the next one inside.
    """
    shape: dict[str, list[str]] = {}
    for op in chain:
        for prefix in _prefixes(op.module_path):
            shape.setdefault(prefix, []).append(op.target)
    siblings: dict[tuple[str, tuple[str, ...]], int] = {}
    for prefix, targets in shape.items():
        key = (prefix.rpartition(".")[0], tuple(targets))
        siblings[key] = siblings.get(key, 0) + 1
    labels: dict[str, str | None] = {}
    for op in chain:
        prefixes = _prefixes(op.module_path)
        repeated = [p for p in prefixes if siblings[(p.rpartition(".")[0], tuple(shape[p]))] > 1]
        labels[op.name] = next(iter(repeated or prefixes), None)
    return labels


def _parted(
    graph: Graph, chain: list[Op], labels: Mapping[str, str | None]
) -> list[tuple[str, list[Op], bool]]:
    """(label, chain ops, is a block) in order; a label that comes twice, or has one op, is not a
    block.
    """
    runs: list[tuple[str | None, list[Op]]] = []
    for op in chain:
        label = labels[op.name]
        if runs and label == runs[-1][0] and not (label is None and _owns_parameters(graph, op)):
            runs[-1][1].append(op)
        else:
            runs.append((label, [op]))
    runs = _ends_joined(graph, _tightened(graph, _absorbed(graph, runs)))
    seen: dict[str, int] = {}
    result = []
    for label, ops in runs:
        first = next((op for op in ops if _owns_parameters(graph, op)), ops[0])
        name = label or first.module_path or first.name
        seen[name] = seen.get(name, 0) + 1
        once = seen[name] == 1
        result.append((name if once else f"{name}#{seen[name]}", ops, label is not None and once))
    return result


def _absorbed(
    graph: Graph, runs: list[tuple[str | None, list[Op]]]
) -> list[tuple[str | None, list[Op]]]:
    """Unlabelled ops that belong to a block join it.

    Between two parts of one block they do (an addition in the parent's code); behind blocks of one
    container, as far as all of them are followed by the same ops without parameters (a residual
    addition after each).
    """
    merged: list[tuple[str | None, list[Op]]] = []
    for label, ops in runs:
        if (
            len(merged) >= 2
            and label is not None
            and merged[-1][0] is None
            and merged[-2][0] == label
        ):
            merged[-2][1].extend([*merged.pop()[1], *ops])
        else:
            merged.append((label, list(ops)))
    tails: dict[str, list[list[Op]]] = {}
    for (label, _), (following, ops) in zip(merged, [*merged[1:], (None, [])]):
        if label is not None:
            tails.setdefault(label.rpartition(".")[0], []).append(ops if following is None else [])
    lengths = {container: _common_length(graph, found) for container, found in tails.items()}
    for (label, own), (following, ops) in pairwise(merged):
        if label is not None and following is None:
            length = lengths[label.rpartition(".")[0]]
            own.extend(ops[:length])
            del ops[:length]
    return [(label, ops) for label, ops in merged if ops]


def _tightened(
    graph: Graph, runs: list[tuple[str | None, list[Op]]]
) -> list[tuple[str | None, list[Op]]]:
    """Between two runs outside of blocks, the cut lies where the fewest bytes cross: an op that
    widens its input joins what follows.
    """
    chain = [op for _, ops in runs for op in ops]
    place = {n: i for i, op in enumerate(chain) for n in op.outputs if n}
    last = {n: i for i, op in enumerate(chain) for n in op.inputs if n in place}
    live = [0] * (len(chain) + 1)  # bytes that cross behind each op, as differences
    for name, end in last.items():
        size = graph.values[name].meta.size_bytes
        live[place[name]] += size
        live[end] -= size
    crossing = list(accumulate(live))
    position = 0
    for (label, ops), (following, behind) in pairwise(runs):
        position += len(ops)
        if label is not None or following is not None:
            continue
        free = len(list(takewhile(lambda op: not _owns_parameters(graph, op), reversed(ops))))
        moved = min(
            range(min(free, len(ops) - 1) + 1), key=lambda k: (crossing[position - k - 1], k)
        )
        if moved:
            behind[:0] = ops[-moved:]
            del ops[-moved:]
            position -= moved
    return runs


def _ends_joined(
    graph: Graph, runs: list[tuple[str | None, list[Op]]]
) -> list[tuple[str | None, list[Op]]]:
    """What precedes the first parameter or follows the last one (a loss) is no layer of its own."""
    if len(runs) > 1 and not any(_owns_parameters(graph, op) for op in runs[-1][1]):
        label, ops = runs[-2]
        runs[-2:] = [(label, [*ops, *runs[-1][1]])]
    if len(runs) > 1 and not any(_owns_parameters(graph, op) for op in runs[0][1]):
        label, ops = runs[1]
        runs[:2] = [(label, [*runs[0][1], *ops])]
    return runs


def _common_length(graph: Graph, tails: list[list[Op]]) -> int:
    length = 0
    while all(length < len(t) for t in tails):
        here = [t[length] for t in tails]
        if len({op.target for op in here}) > 1 or any(_owns_parameters(graph, op) for op in here):
            break
        length += 1
    return length


def _owns_parameters(graph: Graph, op: Op) -> bool:
    return any(graph.values[n].kind == "parameter" for n in op.inputs)


def _attach_free_ops(graph: Graph, free: frozenset[str], layer_of: dict[str, int]) -> list[str]:
    """Free ops that one layer alone uses join it; the others are given back."""
    users: dict[str, set[int]] = {}
    shared = []
    kept = {o for o in (*graph.outputs, graph.loss, *graph.buffer_updates.values()) if o}
    for op in reversed(graph.ops):
        if op.name in free:
            mine = (
                set().union(*(users.get(n, set()) for n in op.outputs if n))
                if op.outputs
                else set()
            )
            if len(mine) == 1 and -1 not in mine and not kept.intersection(op.outputs):
                layer_of[op.name] = next(iter(mine))
            else:
                shared.append(op.name)
        home = layer_of.get(op.name, -1)
        for name in op.inputs:
            users.setdefault(name, set()).add(home)
    return shared[::-1]


def _shared_parameters(graph: Graph, layer_of: Mapping[str, int]) -> frozenset[str]:
    """Parameters that are tied, or that several layers use."""
    users: dict[str, set[int]] = {}
    for op in graph.ops:
        for name in op.inputs:
            if graph.values[name].kind == "parameter":
                users.setdefault(name, set()).add(layer_of.get(op.name, -1))
    tied = {n for group in graph.shared for n in group}
    return frozenset(tied | {n for n, layers in users.items() if len(layers) > 1})


def _signature(
    graph: Graph,
    ops: list[Op],
    layer_of: Mapping[str, int],
    placements: tuple[tuple[str, str], ...],
    shared: frozenset[str],
) -> tuple[object, ...]:
    """What makes two layers equal: ops, arguments, metas, wiring inside, and what kind of thing
    comes from outside; a parameter that other layers use too is only equal to itself.
    """
    place: dict[str, tuple[int, int]] = {}
    producers = graph.producers
    order: dict[str, int] = {}
    rows: list[object] = []
    for i, op in enumerate(ops):
        inputs: list[object] = []
        for name in op.inputs:
            value = graph.values[name]
            if name in place:
                inputs.append(("inside", place[name]))
            elif value.kind == "parameter":
                number = order.setdefault(name, len(order))
                pin = next((s for p, s in placements if fnmatchcase(name, p)), "")
                inputs.append(
                    (
                        "parameter",
                        number,
                        value.meta,
                        value.requires_grad,
                        value.stored_dtype,
                        name if name in shared else "",
                        pin,
                    )
                )
            elif value.kind != "activation":
                inputs.append((value.kind, name if value.kind != "buffer" else "", value.meta))
            elif graph.ops[producers[name]].name in layer_of:
                inputs.append(("chain", value.meta, value.requires_grad))
            else:
                inputs.append(("shared", name))
        for k, name in enumerate(op.outputs):
            place[name] = (i, k)
        metas = tuple(graph.values[n].meta if n else None for n in op.outputs)
        rows.append(
            (
                op.signature(),
                tuple(inputs),
                metas,
                tuple(graph.values[n].requires_grad for n in op.outputs if n),
            )
        )
    return tuple(rows)


def _pair(graph: Graph, ops: list[Op], model: list[Op], representative: dict[str, str]) -> None:
    for op, twin in zip(ops, model):
        representative[op.name] = twin.name
        for a, b in zip(op.outputs, twin.outputs):
            if a:
                representative[a] = b
        for a, b in zip(op.inputs, twin.inputs):
            if graph.values[a].kind in ("parameter", "buffer"):
                representative.setdefault(a, b)


def fold(graph: Graph, layers: Layers) -> Folded:
    """The graph with equal layers counted once.

    Args:
        graph: The one the layers were found in, or the same graph cut to a microbatch.
        layers: Its layers.
    """
    representative = layers.representative
    count: dict[str, int] = {}
    edges: dict[tuple[str, str, int], int] = {}
    layer_of = {name: i for i, layer in enumerate(layers.layers) for name in layer.ops}
    made_in: dict[str, int] = {}
    crossing: set[str] = set()
    ops = []
    for op in graph.ops:
        name = representative.get(op.name, op.name)
        count[name] = count.get(name, 0) + 1
        if name == op.name:
            ops.append(op)
        here = layer_of.get(op.name, -1)
        for slot, value in enumerate(op.inputs):
            key = (representative.get(value, value), name, slot)
            edges[key] = edges.get(key, 0) + 1
            if made_in.get(value, here) != here:
                crossing.add(key[0])
        for value in op.outputs:
            if value and here >= 0:
                made_in[value] = here
    for parameter in graph.of_kind("parameter"):
        name = representative.get(parameter.name, parameter.name)
        count[name] = count.get(name, 0) + 1
    return Folded(graph, tuple(ops), count, edges, representative, frozenset(crossing))
