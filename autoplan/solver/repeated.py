# SPDX-License-Identifier: Apache-2.0
"""A deep model from a shallow graph: equal blocks written a few times and counted as often as they
are.

A graph with three equal blocks says all about one with eighty: how often each edge is there follows
(inside a block: as often as the block; between two of them: once less). In: the shallow folded
graph and the real number of blocks of each class. Out: the folded graph of the deep model, and
which shallow layer each of its layers is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoplan.costs.tables import Folded
from autoplan.solver.layers import Layers

LEAST = 3  # blocks of a class that must be written: a first, an inner and a last one


@dataclass(frozen=True)
class Repeated:
    """The layers of the deep model, as indices of layers of the shallow graph."""

    layers: tuple[int, ...]

    def first_place(self, shallow: int) -> int:
        """Where a shallow layer first is in the deep model."""
        return self.layers.index(shallow)


def repeat_blocks(
    folded: Folded, layers: Layers, counts: Mapping[int, int]
) -> tuple[Folded, Repeated]:
    """The deep model.

    Args:
        folded: Of the shallow graph, in which each class of `counts` has LEAST blocks in a row.
        layers: Its layers.
        counts: block class -> blocks of the deep model, LEAST or more.
    """
    class_of = {n: x.block_class for x in layers.layers for n in x.ops}
    written = {c: sum(x.block_class == c for x in layers.layers) for c in counts}
    producers = {v: op.name for op in folded.graph.ops for v in op.outputs if v}
    count: dict[str, int] = {}
    for op in folded.ops:
        number = class_of.get(op.name, -1)
        times = folded.count[op.name]
        count[op.name] = times * counts[number] // written[number] if number in counts else times
    owners = {v: class_of.get(op.name, -1) for op in folded.ops for v in op.inputs}
    for parameter in folded.graph.of_kind("parameter"):
        name = folded.representative.get(parameter.name, parameter.name)
        number, times = owners.get(name, -1), folded.count[name]
        count[name] = times * counts[number] // written[number] if number in counts else times
    edges: dict[tuple[str, str, int], int] = {}
    for (value, consumer, slot), times in folded.edges.items():
        number = class_of.get(consumer, -1)
        if number not in counts:
            edges[value, consumer, slot] = times
        elif times == written[number]:
            edges[value, consumer, slot] = counts[number]
        elif times == written[number] - 1 and class_of.get(producers.get(value, ""), -1) == number:
            edges[value, consumer, slot] = counts[number] - 1
        else:
            edges[value, consumer, slot] = times
    order: list[int] = []
    seen: set[int] = set()
    for i, layer in enumerate(layers.layers):
        number = layer.block_class
        if number in counts and number not in seen:
            seen.add(number)
            members = [j for j, x in enumerate(layers.layers) if x.block_class == number]
            inner = [members[1]] * (counts[number] - len(members) + 1)
            order += [members[0], *inner, *members[2:]]
        elif number not in counts:
            order.append(i)
    return replace(folded, count=count, edges=edges), Repeated(tuple(order))
