# SPDX-License-Identifier: Apache-2.0
"""A candidate layout and what is known of it: its degrees, what it runs and keeps, its price.

A `Candidate` fixes degrees, microbatches and recomputation. `Workload` says what that means for the
ops of a folded graph. A `Priced` is a candidate with its choices, per-layer prices and cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoplan.cluster import Cluster
from autoplan.costs.tables import CostTables, MeshCosts
from autoplan.errors import InfeasibleError
from autoplan.graph import Graph
from autoplan.runtime import OWN, Runtime
from autoplan.sharding.strategies import ParameterStrategy, Strategy
from autoplan.solver.inter_op import StageAssignment
from autoplan.solver.layers import Layers
from autoplan.units import format_seconds

ROUNDING = 1e-9  # share of a step that sums of its parts may differ by


class NotFasterError(InfeasibleError):
    """A candidate cannot beat the best one, however much memory it had: it would take `step_s`."""

    def __init__(self, step_s: float) -> None:
        super().__init__(f"takes {format_seconds(step_s)} even with unlimited memory")
        self.step_s = step_s


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A layout to be priced."""

    pp: int
    dp: int
    tp: int
    num_microbatches: int
    recompute: bool
    schedule: str
    chunks: int = 1  # stages that each group of devices holds, interleaved

    @property
    def num_devices(self) -> int:
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        text = f"pp={self.pp} dp={self.dp} tp={self.tp}, {self.num_microbatches} microbatches"
        return text + (", recompute" if self.recompute else "")


@dataclass
class LayerPrice:
    """What one layer costs one device: seconds of one microbatch, seconds of one step, bytes."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    communication_s: float = 0.0  # of forward and backward, what nothing hides
    forward_communication_s: float = 0.0  # what of it lies in forward_s
    recompute_s: float = 0.0  # what of backward_s is the forward again
    step_s: float = 0.0
    optimizer_s: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    transient_bytes: float = 0.0
    sources: dict[str, float] = field(default_factory=dict)

    @property
    def held_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes


@dataclass(frozen=True)
class Priced:
    """A candidate with its choices and its price."""

    candidate: Candidate
    strategies: Mapping[str, Strategy]  # representative op -> strategy
    parameters: Mapping[str, ParameterStrategy]  # representative parameter -> storage
    prices: tuple[LayerPrice, ...]  # per layer of the chain
    assignment: StageAssignment
    send_s: tuple[float, ...]
    gap: float
    optimal: bool

    @property
    def step_s(self) -> float:
        return self.assignment.step_s

    @property
    def peak_bytes(self) -> float:
        return max(self.assignment.memory_bytes)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of the step by kind, as an average device spends them; the bubble is what
        remains. They sum up to the step.
        """
        m, pp = self.candidate.num_microbatches, self.candidate.pp
        once = sum(p.step_s - p.optimizer_s for p in self.prices) / pp
        communication = sum(p.communication_s for p in self.prices) * m / pp + once
        passes = sum(p.forward_s + p.backward_s - p.communication_s for p in self.prices)
        optimizer = sum(p.optimizer_s for p in self.prices) / pp
        compute = passes * m / pp
        rest = self.step_s - compute - communication - optimizer
        return {
            "compute": compute,
            "communication": communication,
            "optimizer": optimizer,
            "bubble": rest if rest > ROUNDING * self.step_s else 0.0,
        }

    @property
    def rank(self) -> tuple[float, int, Candidate]:
        """Faster first; of equals, with fewer devices."""
        return float(f"{self.step_s:.9e}"), self.candidate.num_devices, self.candidate


@dataclass(frozen=True)
class Partly:
    """Recomputation of less than every block.

    Attributes:
        shares: Representative op that runs again in backward -> in which share of the blocks.
        whole: All ops of a block run again together: of such blocks only what they hand on is kept.
        cached: Ops of blocks that run again as a whole but for these: their outputs are kept, or
            are of no use to backward.
        dropped: Of them, those of no use.
    """

    shares: Mapping[str, float]
    whole: bool = False
    cached: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Workload:
    """What a candidate runs on a folded graph, and how often.

    Attributes:
        tables: Of the candidate's microbatch on its mesh.
        layers: Of the graph.
        candidate: The layout.
        training: Backward runs.
        runtime: What runs it.
        partly: What is recomputed, where that is less than every block.
    """

    tables: CostTables
    layers: Layers
    candidate: Candidate
    training: bool
    runtime: Runtime = OWN
    partly: Partly | None = None

    @property
    def graph(self) -> Graph:
        """The full graph that one microbatch runs."""
        return self.tables.folded.graph

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Ops whose forward runs again in backward."""
        if not self.candidate.recompute:
            return frozenset()
        if self.partly is not None:
            return frozenset(self.partly.shares)
        return frozenset(n for layer in self.layers.layers if layer.is_block for n in layer.ops)

    @cached_property
    def in_flight(self) -> int:
        """Microbatches whose activations the first stage holds at once."""
        if not self.training:
            return 1
        if self.candidate.schedule == "gpipe":
            return self.candidate.num_microbatches
        return min(self.candidate.pp, self.candidate.num_microbatches)

    def forward_runs(self, op: str) -> float:
        """How often an op's forward runs per microbatch."""
        if self.partly is not None:
            return 1.0 + self.partly.shares.get(op, 0.0)
        return 2.0 if op in self.recomputed else 1.0

    def cached_bytes(self, op: str, choice: int) -> float:
        """Bytes of a cached op's outputs and of what it keeps beside them."""
        table, sizes = self.tables.ops[op], self.tables.mesh.axis_sizes
        made = 0.0
        for name, layout in zip(table.op.outputs, table.strategies[choice].outputs):
            if name:
                made += self.graph.values[name].meta.size_bytes / layout.value.num_shards(sizes)
        return max(made, table.saved_bytes[choice])

    def handed_on_bytes(self, op: str) -> np.ndarray:
        """Bytes of an op's outputs that later layers use, per strategy: what one recomputed layer
        keeps of it.
        """
        table, folded = self.tables.ops[op], self.tables.folded
        total = np.zeros(len(table.strategies))
        for k, name in enumerate(table.op.outputs):
            if name and name in folded.crossing and self.graph.values[name].requires_grad:
                size = self.graph.values[name].meta.size_bytes
                sizes = self.tables.mesh.axis_sizes
                shards = [s.outputs[k].value.num_shards(sizes) for s in table.strategies]
                total += np.array([size / n for n in shards])
        return total


def mesh_costs(
    cluster: Cluster, candidate: Candidate, shard_size: int = 0, near: tuple[int, ...] = ()
) -> MeshCosts:
    """The mesh of the candidate's first stage; stages are blocks of the cluster in rank order."""
    count = candidate.dp * candidate.tp
    ranks = tuple(cluster.ranks[:count])
    sizes = (candidate.dp, candidate.tp)
    return MeshCosts.of(cluster, ranks, sizes, shard_size, near, candidate.num_devices)
