# SPDX-License-Identifier: Apache-2.0
"""What a search works on: the captured graph with what no candidate layout changes."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from autoplan.costs.kernels import is_known
from autoplan.errors import UnsupportedOpError
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
# of the model's forward FLOPs: what an op without a rule may cost, for every device does it whole
MAX_UNRULED_SHARE = 0.001


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
    def ruled_share(self) -> float:
        """Share of the forward products' FLOPs in ops that have a rule; 1 if there are none."""
        unruled = set(self.unruled_ops)
        ops = tuple(op for op in self.graph.ops if op.name in unruled)
        whole = Graph(self.graph.name, self.graph.values, ops, (), ())
        flop = self.forward_flop
        return 1.0 - flop_per_step(whole, training=False) / flop if flop else 1.0

    def check_rules(self) -> None:
        """Only what is cheap may be done whole by every device.

        Raises:
            UnsupportedOpError: Ops without a rule are more than a thousandth of the FLOPs, or one
                whose cost nothing is known of works on a matrix of parameters.
        """
        for name in self.unruled_ops:
            op = next(op for op in self.graph.ops if op.name == name)
            one = Graph(self.graph.name, self.graph.values, (op,), (), ())
            share = flop_per_step(one, training=False) / max(self.forward_flop, 1.0)
            operands = [self.graph.values[n] for n in op.inputs]
            matrix = any(v.kind == "parameter" and len(v.meta.shape) > 1 for v in operands)
            if share > MAX_UNRULED_SHARE:
                cost = f"it is {share:.1%} of the model's forward FLOPs"
            elif matrix and not is_known(op.target):
                cost = "it works on a matrix of parameters"
            else:
                continue
            namespace, _, rest = op.target.partition(".")
            raise UnsupportedOpError(
                op.name,
                op.target,
                op.module_path,
                f"{cost}, too much for every device to do whole. Say which dims belong together: "
                f'autoplan.register_rule("{namespace}::{rest.partition(".")[0]}", '
                '"b* k, k n -> b* n").',
            )

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
