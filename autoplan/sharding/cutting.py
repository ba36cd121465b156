# SPDX-License-Identifier: Apache-2.0
"""Cutting a graph into pipeline stages: which ops a stage runs, which tensors cross its boundaries.

Ops that depend on inputs alone, or on parameters alone, are *free*: every stage that uses them runs
its own copy (a mask, a rotary table, a cast of a weight), so they never cross a boundary. The other
ops, in graph order, are the chain that stages partition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoplan.graph import Graph, Op


def free_ops(graph: Graph) -> frozenset[str]:
    """Names of the ops that depend on inputs alone or on parameters alone, and on no random
    stream.
    """
    source = {
        v.name: {"input": "i", "parameter": "p"}.get(v.kind, "")
        for v in graph.values.values()
        if v.kind != "activation"
    }
    free: set[str] = set()
    for op in graph.ops:
        origins = {source[name] for name in op.inputs} - {""}
        origin = "x" if len(origins) > 1 or "x" in origins or op.draws else next(iter(origins), "")
        if origin != "x":
            free.add(op.name)
        for name in op.outputs:
            if name:
                source[name] = origin
    return frozenset(free)


def chain_ops(graph: Graph) -> tuple[Op, ...]:
    """The ops that stages partition, in order."""
    free = free_ops(graph)
    return tuple(op for op in graph.ops if op.name not in free)


@dataclass(frozen=True, slots=True)
class StageCut:
    """One stage of a cut graph.

    Attributes:
        ops: Every op the stage runs, free ones included, in graph order.
        receives: Values that come from the previous stage (some only to be passed on), in graph
            order.
        sends: Values that go to the next stage.
        values: Parameters, buffers, constants and inputs it uses.
    """

    ops: tuple[Op, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    values: tuple[str, ...]


def cut_stages(graph: Graph, bounds: Iterable[tuple[str, str]]) -> tuple[StageCut, ...]:
    """The stages whose chains run from the first to the last op named in each of `bounds`,
    inclusive.

    Model outputs and buffer updates that free ops make belong to the last stage.

    Raises:
        ValueError: The bounds do not cover the chain exactly, in order.
    """
    chain = [op.name for op in chain_ops(graph)]
    place = {name: i for i, name in enumerate(chain)}
    spans: list[tuple[int, int]] = []
    expected = 0
    for first, last in bounds:
        if place.get(first) != expected or place.get(last, -1) < expected:
            due = chain[expected] if expected < len(chain) else "nothing"
            raise ValueError(f"stage {len(spans)} starts at {first!r}, expected {due!r}")
        spans.append((place[first], place[last] + 1))
        expected = place[last] + 1
    if expected != len(chain):
        raise ValueError(f"no stage runs {chain[expected]!r} and what follows")
    stage_of = {chain[i]: s for s, (start, end) in enumerate(spans) for i in range(start, end)}
    wanted = _wanted_at_end(graph)
    needed = [
        _closure(graph, stage_of, s, wanted if s == len(spans) - 1 else ())
        for s in range(len(spans))
    ]
    crossing = _crossings(graph, stage_of, [n for n, _ in needed], wanted)
    return tuple(
        StageCut(
            ops=tuple(op for op in graph.ops if op.name in names),
            receives=crossing[s],
            sends=crossing[s + 1] if s + 1 < len(spans) else (),
            values=tuple(name for name in graph.values if name in used),
        )
        for s, (names, used) in enumerate(needed)
    )


def _wanted_at_end(graph: Graph) -> tuple[str, ...]:
    """Outputs are collected where they are made; only those of free ops are asked of the last
    stage.
    """
    wanted = (
        [o for o in graph.outputs if o]
        + ([graph.loss] if graph.loss else [])
        + list(graph.buffer_updates.values())
    )
    free = free_ops(graph)
    producers = graph.producers
    return tuple(
        dict.fromkeys(
            n for n in wanted if n not in producers or graph.ops[producers[n]].name in free
        )
    )


def _closure(
    graph: Graph, stage_of: dict[str, int], stage: int, wanted: tuple[str, ...]
) -> tuple[set[str], set[str]]:
    """Op names the stage runs (its chain and the free ops behind it) and the leaf values it
    reads.
    """
    names = {name for name, s in stage_of.items() if s == stage}
    used: set[str] = set()
    stack = [n for op in graph.ops if op.name in names for n in op.inputs] + list(wanted)
    producers = graph.producers
    seen: set[str] = set()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in producers:
            used.add(name)
            continue
        op = graph.ops[producers[name]]
        if op.name not in stage_of and op.name not in names:
            names.add(op.name)
            stack += op.inputs
    return names, used


def _crossings(
    graph: Graph, stage_of: dict[str, int], needed: list[set[str]], wanted: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """Per boundary s (into stage s; boundary 0 is empty): chain values made before it and used at
    or after it.
    """
    num = len(needed)
    last_use: dict[str, int] = {}
    made: dict[str, int] = {}
    for op in graph.ops:
        if op.name in stage_of:
            for name in op.outputs:
                if name:
                    made[name] = stage_of[op.name]
    for s, names in enumerate(needed):
        for op in graph.ops:
            if op.name in names:
                for name in op.inputs:
                    if name in made:
                        last_use[name] = max(last_use.get(name, s), s)
    return [tuple(n for n in made if made[n] < s <= last_use.get(n, -1)) for s in range(num)]
