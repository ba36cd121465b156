# SPDX-License-Identifier: Apache-2.0
"""What a folded graph on a mesh costs, as tables: every choice of every op, parameter and value.

`CostTables` holds, per representative op, its strategies with forward and backward seconds and
bytes; per parameter its storage choices with seconds per step; per value the price of converting
any layout its producer gives into any a consumer wants. Everything is per device. Here are the
types; `builder.py` fills them, `storage.py` with parameters, `conversions.py` with values. Nothing
is chosen here; the executor runs exactly what is priced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.cluster import Cluster, Group, axis_group
from autoplan.costs.collectives import collective_time
from autoplan.costs.profile import NOTHING, Cost, Profiles
from autoplan.graph import Graph, Op, Value
from autoplan.placements import Layout, ShardingSpec
from autoplan.runtime import OWN, Runtime
from autoplan.sharding.resharding import Move, transition
from autoplan.sharding.strategies import ParameterStrategy, Strategy


@dataclass(frozen=True)
class Folded:
    """A graph with equal layers counted once.

    Attributes:
        graph: The full graph that one microbatch runs.
        ops: Representative ops, in order.
        count: Representative op, or parameter name -> how many it stands for.
        edges: (value, consumer op, slot) of representatives -> how often that edge is in the graph.
        representative: Any name -> its representative.
        crossing: Representative values that a later layer uses.
    """

    graph: Graph
    ops: tuple[Op, ...]
    count: Mapping[str, int]
    edges: Mapping[tuple[str, str, int], int]
    representative: Mapping[str, str]
    crossing: frozenset[str]


@dataclass(frozen=True)
class MeshCosts:
    """A stage's mesh on a cluster, as prices.

    Attributes:
        axis_sizes: (dp, tp).
        groups: One communication group per axis.
        profiles: The cluster's.
        shard_size: Ranks of the first axis among which it shards what is stored; the groups of so
            many neighbours hold the same shards. 0: all of them.
        shards, replicas: Then the group that holds one copy, and the group of equal shards.
        near: (n, the groups of n neighbours on the first axis), for layers whose ranks exchange
            tokens or keys among themselves.
    """

    axis_sizes: tuple[int, ...]
    groups: tuple[Group, ...]
    profiles: Profiles
    shard_size: int = 0
    shards: Group | None = None
    replicas: Group | None = None
    near: tuple[tuple[int, Group], ...] = ()

    @staticmethod
    def of(
        cluster: Cluster,
        ranks: tuple[int, ...],
        axis_sizes: tuple[int, ...],
        shard_size: int = 0,
        near: tuple[int, ...] = (),
        num_devices: int = 0,
    ) -> MeshCosts:
        """The prices of the mesh that these ranks form in row-major order, while `num_devices` of
        the cluster compute (0: all).
        """
        profiles = Profiles.of(cluster, num_devices)
        close = tuple(
            (n, axis_group(cluster, ranks, (axis_sizes[0] // n, n, *axis_sizes[1:]), 1))
            for n in near
        )
        groups = tuple(
            axis_group(cluster, ranks, axis_sizes, axis) for axis in range(len(axis_sizes))
        )
        if not 0 < shard_size < axis_sizes[0]:
            return MeshCosts(axis_sizes, groups, profiles, near=close)
        parted = (axis_sizes[0] // shard_size, shard_size, *axis_sizes[1:])
        return MeshCosts(
            axis_sizes,
            groups,
            profiles,
            shard_size,
            shards=axis_group(cluster, ranks, parted, 1),
            replicas=axis_group(cluster, ranks, parted, 0),
            near=close,
        )

    def fixed_s(self, kind: str) -> float:
        """Seconds of a collective of next to nothing among the ranks that share what is stored."""
        return collective_time(self.profiles, kind, 1.0, self.shards or self.groups[0]).time_s

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes among which parameters and states are stored."""
        return (self.shard_size or self.axis_sizes[0], *self.axis_sizes[1:])

    def move_s(
        self,
        source: ShardingSpec,
        target: ShardingSpec,
        size_bytes: float,
        shares: dict[str, float] | None = None,
    ) -> float:
        """Seconds to convert a tensor of `size_bytes` (whole) from one spec to the other; notes
        seconds by kind of number.
        """
        total = 0.0
        for move in transition(source, target, self.axis_sizes):
            if not move.is_local:
                cost = self.collective(move, size_bytes)
                total += cost.time_s
                if shares is not None:
                    shares[cost.source] = shares.get(cost.source, 0.0) + cost.time_s
        return total

    def collective(self, move: Move, size_bytes: float) -> Cost:
        """The price of one move of a tensor of `size_bytes` (whole); of a local one, nothing.
        Gradients of shards that groups hold alike are summed over the groups, too.
        """
        if move.is_local:
            return NOTHING
        size, group = size_bytes * move.fraction, self.groups[move.axis]
        if move.axis or self.shards is None or self.replicas is None:
            return collective_time(self.profiles, move.kind, size, group)
        cost = collective_time(self.profiles, move.kind, size, self.shards)
        if move.kind != "reduce_scatter":
            return cost
        part = size / self.shard_size
        more = collective_time(self.profiles, "all_reduce", part, self.replicas)
        return Cost(cost.time_s + more.time_s, cost.source)


@dataclass
class OpTable:
    """One representative op: parallel lists over its strategies."""

    op: Op
    strategies: tuple[Strategy, ...]
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    # collectives of the op's own local form, both ways
    communication_s: list[float] = field(default_factory=list)
    saved_bytes: list[float] = field(default_factory=list)  # outputs and extras that autograd keeps
    transient_bytes: list[float] = field(default_factory=list)
    # kernels that the host launches, forward and backward
    launches: list[tuple[int, int]] = field(default_factory=list)
    sources: list[dict[str, float]] = field(default_factory=list)


@dataclass
class ParameterTable:
    """One representative parameter: parallel lists over its storage choices."""

    value: Value
    strategies: tuple[ParameterStrategy, ...]
    # gradient reduction, gather, optimizer: once per step
    step_s: list[float] = field(default_factory=list)
    # of it, the gather and the reduction
    gather_s: list[float] = field(default_factory=list)
    gradient_s: list[float] = field(default_factory=list)
    # adding a microbatch's gradient to those before it
    accumulate_s: list[float] = field(default_factory=list)
    # gradient reduction after every microbatch (ZeRO-2)
    reduce_s: list[float] = field(default_factory=list)
    parameter_bytes: list[float] = field(default_factory=list)  # as stored, and the copy in use
    gradient_bytes: list[float] = field(default_factory=list)
    state_bytes: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)

    def held_bytes(self, choice: int) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes[choice] + self.gradient_bytes[choice] + self.state_bytes[choice]


@dataclass
class ValueTable:
    """One value's conversions: from each layout its producer may give to each a consumer may
    want; `saved_bytes` are kept where one of the `keepers` takes it. With `again`, what forward
    converted is not kept but converted again in backward.
    """

    name: str
    made: tuple[Layout, ...]
    wanted: tuple[Layout, ...]
    forward_s: list[list[float]]
    backward_s: list[list[float]]
    saved_bytes: list[list[float]]
    keepers: frozenset[str] = frozenset()
    again: bool = False


@dataclass(frozen=True)
class CostTables:
    """Everything a solver needs of one folded graph on one mesh; see the module."""

    folded: Folded
    mesh: MeshCosts
    ops: Mapping[str, OpTable]
    parameters: Mapping[str, ParameterTable]
    values: Mapping[str, ValueTable]


@dataclass(frozen=True)
class Wishes:
    """What the user has decided, as far as strategies go.

    Attributes:
        training: Backward is priced, gradients and optimizer state are held.
        optimizer: A key of `storage.STATE_TENSORS`.
        zero_levels: Levels that may be chosen.
        placements: (pattern of parameter names, spec as text) pins.
        split: Ops that tensor parallel ranks must share out where any of their letters divides.
        letters: Op -> the letters that tensor parallel ranks may split it by; all, where absent.
        float8: Ops whose products run in float8.
        runtime: What will run the plan.
        apart: Parameters that the groups of neighbours on the first axis do not share, and the mesh
            of their equal copies.
    """

    training: bool
    optimizer: str
    zero_levels: tuple[int, ...]
    placements: tuple[tuple[str, str], ...] = ()
    split: frozenset[str] = frozenset()
    letters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    float8: frozenset[str] = frozenset()
    runtime: Runtime = OWN
    apart: tuple[frozenset[str], MeshCosts] | None = None


OpTables = dict[tuple[object, ...], OpTable]
