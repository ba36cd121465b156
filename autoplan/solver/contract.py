# SPDX-License-Identifier: Apache-2.0
"""A smaller intra-op problem with the same answers: ops that feed one op alone are merged with it.

Merging u into v (u's tensor goes to v and nowhere else) makes one op whose strategies are pairs.
Pairs that look the same to all other ops compete: only those that no other one beats in seconds,
held bytes and transient bytes are kept, so every solution that matters survives and memory limits
stay exact. A pair is merged only where that does not make the problem larger; chains of pointwise
ops and views shrink to the strategies of their ends. Source of the idea: exact node reductions of
the IOPDDL contest (PLANNERS 7.24).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoplan.solver.intra_op import Edge, IntraOpProblem
from autoplan.solver.program import Floats, Ints

Expand = Callable[[tuple[int, ...]], tuple[int, ...]]


def contract(problem: IntraOpProblem) -> tuple[IntraOpProblem, Expand]:
    """The smaller problem, and how its choices are choices of the original one."""
    worker = _Contractor(problem)
    worker.run()
    return worker.result()


class _Node:
    """A merged op: parallel arrays over its strategies, and which original strategies each stands
    for.
    """

    def __init__(
        self, cost: Floats, held: Floats, transient: Floats, members: tuple[int, ...], picks: Ints
    ) -> None:
        self.cost, self.held, self.transient = cost, held, transient
        self.members, self.picks = (
            members,
            picks,
        )  # original ops; [strategy, member] -> original strategy


class _Contractor:
    def __init__(self, problem: IntraOpProblem) -> None:
        self.problem = problem
        self.nodes: dict[int, _Node] = {
            v: _Node(
                cost, held, transient, (v,), np.arange(cost.size, dtype=np.int64).reshape(-1, 1)
            )
            for v, (cost, held, transient) in enumerate(
                zip(problem.node_cost_s, problem.node_bytes, problem.node_transient_bytes)
            )
        }
        self.edges: dict[int, Edge] = dict(enumerate(problem.edges))
        self.touching: dict[int, set[int]] = {v: set() for v in self.nodes}
        self.group_size: dict[int, int] = {}
        for number, edge in self.edges.items():
            self.touching[edge.producer].add(number)
            self.touching[edge.consumer].add(number)
            self.group_size[edge.group] = self.group_size.get(edge.group, 0) + 1

    def run(self) -> None:
        queue = sorted(self.edges)
        while queue:
            again = []
            for number in queue:
                if number in self.edges and self.can_merge(number):
                    again += sorted(self.merge(number))
            queue = list(dict.fromkeys(n for n in again if n in self.edges))

    def can_merge(self, number: int) -> bool:
        edge = self.edges[number]
        if edge.producer == edge.consumer or self.group_size[edge.group] > 1:
            return False
        return len(self.touching[edge.producer] & self.touching[edge.consumer]) == 1

    def merge(self, number: int) -> set[int]:
        """Merges an edge's ends if that pays; gives the edges of the merged op, to be looked at
        again.
        """
        edge = self.edges[number]
        u, v = self.nodes[edge.producer], self.nodes[edge.consumer]
        matrix, held_matrix = (
            self.problem.conversion_cost_s[edge.group],
            self.problem.conversion_bytes[edge.group],
        )
        a, b = (
            x.ravel()
            for x in np.meshgrid(np.arange(u.cost.size), np.arange(v.cost.size), indexing="ij")
        )
        cost = u.cost[a] + v.cost[b] + matrix[edge.produced[a], edge.consumed[b]]
        held = u.held[a] + v.held[b] + held_matrix[edge.produced[a], edge.consumed[b]]
        transient = np.maximum(u.transient[a], v.transient[b])
        outside = [(n, a, edge.producer) for n in self.touching[edge.producer] if n != number]
        outside += [(n, b, edge.consumer) for n in self.touching[edge.consumer] if n != number]
        faces = []
        for other, index, node in sorted(outside, key=lambda x: x[0]):
            rim = self.edges[other]
            faces += [rim.produced[index]] if rim.producer == node else []
            faces += [rim.consumed[index]] if rim.consumer == node else []
        keep = _undominated(
            cost,
            held,
            transient,
            np.stack(faces, 1) if faces else np.zeros((a.size, 0), dtype=np.int64),
        )
        if keep.size == 0 or keep.size > max(u.cost.size + v.cost.size, 1):
            return set()
        a, b = a[keep], b[keep]
        merged = _Node(
            cost[keep],
            held[keep],
            transient[keep],
            u.members + v.members,
            np.concatenate((u.picks[a], v.picks[b]), axis=1),
        )
        return self.replace(number, merged, a, b)

    def replace(self, number: int, merged: _Node, a: Ints, b: Ints) -> set[int]:
        edge = self.edges.pop(number)
        first, second = edge.producer, edge.consumer
        around = (self.touching.pop(first) | self.touching.pop(second)) - {number}
        for other in around:
            rim = self.edges[other]
            produced, consumed, producer, consumer = (
                rim.produced,
                rim.consumed,
                rim.producer,
                rim.consumer,
            )
            if producer in (first, second):
                produced, producer = produced[a if producer == first else b], first
            if consumer in (first, second):
                consumed, consumer = consumed[a if consumer == first else b], first
            self.edges[other] = Edge(producer, consumer, produced, consumed, rim.group)
        del self.nodes[second]
        self.nodes[first] = merged
        self.touching[first] = around
        return around

    def result(self) -> tuple[IntraOpProblem, Expand]:
        order = sorted(self.nodes)
        place = {v: i for i, v in enumerate(order)}
        groups = sorted({e.group for e in self.edges.values()})
        renumbered = {g: i for i, g in enumerate(groups)}
        nodes = [self.nodes[v] for v in order]
        smaller = IntraOpProblem(
            node_cost_s=tuple(n.cost for n in nodes),
            node_bytes=tuple(n.held for n in nodes),
            node_transient_bytes=tuple(n.transient for n in nodes),
            edges=tuple(
                Edge(
                    place[e.producer],
                    place[e.consumer],
                    e.produced,
                    e.consumed,
                    renumbered[e.group],
                )
                for _, e in sorted(self.edges.items())
            ),
            conversion_cost_s=tuple(self.problem.conversion_cost_s[g] for g in groups),
            conversion_bytes=tuple(self.problem.conversion_bytes[g] for g in groups),
            memory_limit_bytes=self.problem.memory_limit_bytes,
        )

        def expand(choices: tuple[int, ...]) -> tuple[int, ...]:
            original = [0] * len(self.problem.node_cost_s)
            for node, choice in zip(nodes, choices):
                for member, strategy in zip(node.members, node.picks[choice]):
                    original[member] = int(strategy)
            return tuple(original)

        return smaller, expand


def _undominated(cost: Floats, held: Floats, transient: Floats, faces: Ints) -> Ints:
    """Indices of the pairs that no pair with the same face beats or equals in all three; infinite
    costs never stay.
    """
    order = (
        np.lexsort((transient, held, cost, *faces.T[::-1]))
        if faces.shape[1]
        else np.lexsort((transient, held, cost))
    )
    kept: list[int] = []
    front: list[int] = []
    previous: bytes | None = None
    for i in order.tolist():
        if not np.isfinite(cost[i]):
            continue
        face = faces[i].tobytes()
        if face != previous:
            front, previous = [], face
        if not any(
            held[j] <= held[i] and transient[j] <= transient[i] for j in front
        ):  # those before it cost no more
            front.append(i)
            kept.append(i)
    return np.array(sorted(kept), dtype=np.int64)
