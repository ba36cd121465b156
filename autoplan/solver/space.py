# SPDX-License-Identifier: Apache-2.0
"""What a search works on: the captured graph with what no candidate layout changes."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from autoplan.graph import Graph
from autoplan.placements import Replicate, parse_spec
from autoplan.sharding.batch import Batch, find_batch
from autoplan.sharding.factors import OpRule
from autoplan.sharding.rules import find_rule, kept_whole
from autoplan.solver.figures import dtype_of_work, flop_per_step
from autoplan.solver.layers import Layers, find_layers
from autoplan.solver.pins import Pinned

# of the model's forward FLOPs: products above it are what a pinned tp is meant to split
HEAVY_SHARE = 0.01


@dataclass(frozen=True)
class Space:
    """What no candidate changes."""

    graph: Graph
    rules: dict[str, OpRule]
    batch: Batch
    layers: Layers
    unruled_ops: tuple[str, ...]

    @staticmethod
    def of(graph: Graph, placements: tuple[tuple[str, str], ...] = ()) -> Space:
        """Rules, batch and layers of a graph; pinned `placements` tell equal layers apart."""
        found = {op.name: find_rule(op, graph) for op in graph.ops}
        rules = {op.name: found[op.name] or kept_whole(op, graph) for op in graph.ops}
        unruled = tuple(op.name for op in graph.ops if found[op.name] is None)
        return Space(
            graph, rules, find_batch(graph, rules), find_layers(graph, placements), unruled
        )

    @cached_property
    def dtype(self) -> str:
        """The dtype of most of the parameters."""
        return dtype_of_work(self.graph)

    @cached_property
    def forward_flop(self) -> float:
        """FLOPs of the forward products over the whole batch."""
        return flop_per_step(self.graph, training=False)

    @cached_property
    def training_flop(self) -> float:
        """FLOPs of the forward and backward products over the whole batch."""
        return flop_per_step(self.graph, training=True)

    @cached_property
    def block_flop(self) -> float:
        """FLOPs of the forward products of repeated blocks: what recomputation does again."""
        blocks = {n for layer in self.layers.layers if layer.is_block for n in layer.ops}
        ops = tuple(op for op in self.graph.ops if op.name in blocks)
        return flop_per_step(Graph(self.graph.name, self.graph.values, ops, (), ()), training=False)

    @cached_property
    def heavy_ops(self) -> frozenset[str]:
        """Representative products that make up a hundredth of the model's FLOPs or more: what a
        pinned tp is meant to split.
        """
        flop: dict[str, float] = {}
        for op in self.graph.ops:
            name = self.layers.representative.get(op.name, op.name)
            one = Graph(self.graph.name, self.graph.values, (op,), (), ())
            flop[name] = flop.get(name, 0.0) + flop_per_step(one, training=False)
        return frozenset(n for n, f in flop.items() if f >= HEAVY_SHARE * self.forward_flop > 0)

    def kept_whole(self, pinned: Pinned) -> frozenset[str]:
        """Representative ops of a parameter that a pinned placement leaves whole over tp: a pinned
        tp does not split them.
        """
        pins = {
            v.name: next((s for p, s in pinned.placements if fnmatchcase(v.name, p)), "")
            for v in self.graph.of_kind("parameter")
        }
        whole = {
            n for n, spec in pins.items() if spec and isinstance(parse_spec(spec)[1], Replicate)
        }
        return frozenset(
            self.layers.representative.get(op.name, op.name)
            for op in self.graph.ops
            if whole.intersection(op.inputs)
        )

    @cached_property
    def head_counts(self) -> dict[str, int]:
        """Module path of every attention -> its number of heads; a tensor parallel degree must
        divide them.
        """
        counts: dict[str, int] = {}
        for op in self.graph.ops:
            if op.target == "aten.scaled_dot_product_attention.default":
                counts[op.module_path] = self.graph.values[op.inputs[0]].meta.shape[-3]
        return counts
