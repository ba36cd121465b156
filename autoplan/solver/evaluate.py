# SPDX-License-Identifier: Apache-2.0
"""One candidate layout, from tables to a priced decision: the integer program for strategies, the
stage program for cuts.

A candidate fixes degrees, microbatches and recomputation. `CandidateSolver` writes the folded
intra-op problem of an average stage, solves it at the memory that a stage has, turns the choices
into per-layer costs, partitions the layers and replays the schedule. What comes out is exact for
the cost model: the same sums that the plan reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autoplan.cluster import Cluster, group_of
from autoplan.costs.collectives import collective_time
from autoplan.costs.tables import CostTables, MeshCosts
from autoplan.errors import InfeasibleError
from autoplan.graph import Graph
from autoplan.placements import Layout
from autoplan.sharding.cutting import chain_ops
from autoplan.sharding.strategies import ParameterStrategy, Strategy
from autoplan.solver.assemble import boundary_layout
from autoplan.solver.contract import contract
from autoplan.solver.inter_op import LayerCosts, StageAssignment, partition_layers
from autoplan.solver.intra_op import Edge, IntraOpProblem, IntraOpSolution, solve_intra_op
from autoplan.solver.layers import Layers
from autoplan.units import format_bytes, format_seconds

TIME_UNIT_FLOOR_S = 1e-12


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
    communication_s: float = 0.0
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


class CandidateSolver:
    """Prices one candidate.

    Args:
        tables: Of the candidate's microbatch on its mesh.
        layers: Of the graph.
        cluster: For links between stages.
        candidate: What is priced.
        training: Backward runs.
        limit_bytes: What a device has for the plan.
        stage_layers: Pinned layers per stage.
        time_limit_s: For each integer program.
    """

    def __init__(self, tables: CostTables, layers: Layers, cluster: Cluster, candidate: Candidate, *, training: bool, limit_bytes: float,
                 stage_layers: tuple[int, ...] | None, time_limit_s: float) -> None:  # fmt: skip
        self.tables, self.layers, self.cluster, self.candidate = tables, layers, cluster, candidate
        self.training, self.limit_bytes, self.stage_layers, self.time_limit_s = (
            training,
            limit_bytes,
            stage_layers,
            time_limit_s,
        )
        self.folded = tables.folded
        self.graph: Graph = self.folded.graph
        self.recomputed = self._recomputed_ops()
        self.in_flight = (
            1
            if not training
            else candidate.num_microbatches
            if candidate.schedule == "gpipe"
            else min(candidate.pp, candidate.num_microbatches)
        )
        self.passes = candidate.num_microbatches + candidate.pp - 1

    def _recomputed_ops(self) -> frozenset[str]:
        if not self.candidate.recompute:
            return frozenset()
        return frozenset(
            name for layer in self.layers.layers if layer.is_block for name in layer.ops
        )

    def _forward_runs(self, op: str) -> float:
        return 2.0 if op in self.recomputed else 1.0

    # -- the integer program
    # --------------------------------------------------------------------------------------

    def solve(self, beat_s: float = np.inf) -> Priced:
        """The fastest choices that fit.

        The program is solved without its memory row first: that suffices where memory is plenty,
            and where even so it is no
        faster than `beat_s` it is the answer that will be discarded. Then at the device's memory,
        and for pipelines, whose stages are not average, at somewhat less until the cut fits.

        Raises:
            InfeasibleError: Nothing fits, or nothing that fits is faster than `beat_s`; the message
                says which.
        """
        error = self._hopeless()
        if error is not None:
            raise error
        problem, names = self._problem()
        smaller, original = contract(problem)
        limits: tuple[float | None, ...] = (
            None,
            self.limit_bytes,
            0.85 * self.limit_bytes,
            0.7 * self.limit_bytes,
        )
        for limit in limits if self.candidate.pp > 1 else limits[:2]:
            try:
                solution = solve_intra_op(
                    replace(smaller, memory_limit_bytes=limit), time_limit_s=self.time_limit_s
                )
                fits = solution.held_bytes + solution.transient_bytes <= self.limit_bytes
                choices = original(solution.choices)
                if limit is None and not (fits and self.candidate.pp == 1):
                    quickest = self._price(solution, choices, names, math.inf)
                    if quickest.step_s >= beat_s:
                        raise NotFasterError(quickest.step_s)
                if fits or limit is not None or self.candidate.pp > 1:
                    return self._price(solution, choices, names, self.limit_bytes)
            except NotFasterError:
                raise
            except InfeasibleError as refused:
                error = refused
        assert error is not None, "without an error there was a price"
        raise error

    def _hopeless(self) -> InfeasibleError | None:
        """A refusal without solving: every op and parameter at its own least bytes is already too
        much.

        With held bytes H and saved bytes A of the whole model, a stage of share x that holds f
        microbatches needs x (H + f A); the shares of all stages sum up to 1, so no cut needs less
        than 1 / sum_s 1 / (H + f_s A) on its fullest device.
        """
        tables, count = self.tables, self.folded.count
        held = sum(
            count[n] * min(t.held_bytes(i) for i in range(len(t.strategies)))
            for n, t in tables.parameters.items()
        )
        saved = sum(
            count[n] * min(t.saved_bytes) for n, t in tables.ops.items() if n not in self.recomputed
        )
        saved += sum(
            count[n] * float(self._handed_on(n).min()) for n in self.recomputed if n in tables.ops
        )
        stages, m = self.candidate.pp, self.candidate.num_microbatches
        flights = [
            min(m, stages - s) if self.candidate.schedule == "1f1b" else self.in_flight
            for s in range(stages)
        ]
        least = 1.0 / max(sum(1.0 / max(held + f * saved, 1e-9) for f in flights), 1e-30)
        if least <= self.limit_bytes:
            return None
        return InfeasibleError(
            f"needs at least {format_bytes(least)} on each device, {format_bytes(self.limit_bytes)} are available",
            required_bytes=least,
            available_bytes=self.limit_bytes,
        )

    def _problem(self) -> tuple[IntraOpProblem, list[str]]:
        """The average stage: every op with its multiplicity over the stages; leaves with one layout
        are no nodes.
        """
        tables, folded, pp = self.tables, self.folded, self.candidate.pp
        names = [*tables.ops, *(f"parameter:{n}" for n in tables.parameters)]
        costs, held, transient = [], [], []
        for name, table in tables.ops.items():
            weight = folded.count[name] / pp
            runs = self._forward_runs(name)
            seconds = np.array(
                [
                    runs * f + b + c * runs
                    for f, b, c in zip(table.forward_s, table.backward_s, table.communication_s)
                ]
            )
            costs.append(seconds * weight * self.passes)
            held.append(
                self._activation_weight(name) * np.array(table.saved_bytes)
                + self._crossing_bytes(name)
            )
            transient.append(np.array(table.transient_bytes))
        for name, parameter in tables.parameters.items():
            weight = folded.count[name] / pp
            costs.append(
                weight
                * (
                    np.array(parameter.step_s)
                    + np.array(parameter.reduce_s) * self.candidate.num_microbatches
                )
            )
            held.append(
                weight
                * np.array([parameter.held_bytes(i) for i in range(len(parameter.strategies))])
            )
            transient.append(np.zeros(len(parameter.strategies)))
        costs.append(np.zeros(1))  # leaves: inputs and buffers, whole everywhere
        held.append(np.zeros(1))
        transient.append(np.zeros(1))
        place = {name: i for i, name in enumerate(names)}
        edges, conversion_cost, conversion_bytes = self._edges(place, len(names))
        problem = IntraOpProblem(
            node_cost_s=tuple(costs),
            node_bytes=tuple(held),
            node_transient_bytes=tuple(transient),
            edges=tuple(edges),
            conversion_cost_s=tuple(conversion_cost),
            conversion_bytes=tuple(conversion_bytes),
        )
        return problem, names

    def _activation_weight(self, op: str) -> float:
        """How many copies of an op's saved tensors a device holds: one layer's worth where the
        layer is recomputed.
        """
        if op in self.recomputed:
            return 1.0
        return self.folded.count[op] / self.candidate.pp * self.in_flight

    def _crossing_bytes(self, op: str) -> np.ndarray:
        """What recomputed layers keep of this op over a stage and the microbatches in flight."""
        if op not in self.recomputed:
            return np.zeros(len(self.tables.ops[op].strategies))
        return self._handed_on(op) * (self.folded.count[op] / self.candidate.pp * self.in_flight)

    def _handed_on(self, op: str) -> np.ndarray:
        """Bytes of an op's outputs that later layers use, per strategy: what one recomputed layer
        keeps of it.
        """
        table = self.tables.ops[op]
        total = np.zeros(len(table.strategies))
        for k, name in enumerate(table.op.outputs):
            if name and name in self.folded.crossing and self.graph.values[name].requires_grad:
                size = self.graph.values[name].meta.size_bytes
                total += np.array(
                    [
                        size / s.outputs[k].value.num_shards(self.tables.mesh.axis_sizes)
                        for s in table.strategies
                    ]
                )
        return total

    def _edges(
        self, place: Mapping[str, int], leaf: int
    ) -> tuple[list[Edge], list[np.ndarray], list[np.ndarray]]:
        edges: list[Edge] = []
        conversion_cost, conversion_bytes = [], []
        grouped: dict[str, list[tuple[str, int, int]]] = {}
        for (value, consumer, slot), count in self.folded.edges.items():
            grouped.setdefault(value, []).append((consumer, slot, count))
        for value, uses in grouped.items():
            table = self.tables.values[value]
            producer, produced = self._producer(value, table.made, place, leaf)
            for inside in (False, True):  # a recomputed layer converts again, on its own account
                mine = [u for u in uses if (u[0] in self.recomputed) == inside]
                if not mine:
                    continue
                count = max(c for _, _, c in mine) / self.candidate.pp
                runs = 2.0 if inside else 1.0
                ahead, back = np.array(table.forward_s), np.array(table.backward_s)
                conversion_cost.append((runs * ahead + back) * count * self.passes)
                weight = 1.0 if inside else count * self.in_flight
                conversion_bytes.append(np.array(table.saved_bytes) * weight)
                where = {layout: q for q, layout in enumerate(table.wanted)}
                for consumer, slot, _ in mine:
                    consumed = np.array(
                        [where[s.inputs[slot]] for s in self.tables.ops[consumer].strategies],
                        dtype=np.int64,
                    )
                    edges.append(
                        Edge(
                            producer, place[consumer], produced, consumed, len(conversion_cost) - 1
                        )
                    )
        return edges, conversion_cost, conversion_bytes

    def _producer(
        self, value: str, made: tuple[Layout, ...], place: Mapping[str, int], leaf: int
    ) -> tuple[int, np.ndarray]:
        where = {layout: p for p, layout in enumerate(made)}
        if value in self.tables.parameters:
            strategies = self.tables.parameters[value].strategies
            return place[f"parameter:{value}"], np.array(
                [where[s.used] for s in strategies], dtype=np.int64
            )
        if value not in self.graph.producers:
            return leaf, np.zeros(1, dtype=np.int64)
        maker = self.graph.ops[self.graph.producers[value]]
        at = maker.outputs.index(value)
        strategies_ = self.tables.ops[maker.name].strategies
        return place[maker.name], np.array(
            [where[s.outputs[at]] for s in strategies_], dtype=np.int64
        )

    # -- from choices to a price
    # ------------------------------------------------------------------------------------

    def _price(
        self,
        solution: IntraOpSolution,
        choices: tuple[int, ...],
        names: list[str],
        limit_bytes: float,
    ) -> Priced:
        chosen = dict(zip(names, choices))
        prices = self._layer_prices(chosen)
        send = self._send_s(chosen)
        shared = self._shared_parameters(chosen)
        columns = {
            key: np.array([[getattr(p, key) for p in prices]])
            for key in ("forward_s", "backward_s", "step_s", "held_bytes", "activation_bytes")
        }
        costs = LayerCosts(
            forward_s=columns["forward_s"],
            backward_s=columns["backward_s"],
            step_s=columns["step_s"],
            held_bytes=columns["held_bytes"],
            activation_bytes=columns["activation_bytes"],
            transient_bytes=np.array([[p.transient_bytes for p in prices]]),
            send_s=np.array(send),
            shared=shared,
        )
        assignment = partition_layers(
            costs,
            self.candidate.pp,
            self.candidate.num_microbatches,
            schedule=self.candidate.schedule,
            memory_limit_bytes=limit_bytes,
            stage_layers=self.stage_layers,
        )
        gap = (solution.objective_s - solution.bound_s) / max(
            solution.objective_s, TIME_UNIT_FLOOR_S
        )
        return Priced(
            self.candidate,
            {n: t.strategies[chosen[n]] for n, t in self.tables.ops.items()},
            {n: t.strategies[chosen[f"parameter:{n}"]] for n, t in self.tables.parameters.items()},
            tuple(prices),
            assignment,
            tuple(send),
            gap,
            solution.optimal,
        )

    def _layer_prices(self, chosen: Mapping[str, int]) -> list[LayerPrice]:
        """Per layer; equal layers cost the same but for what comes into them."""
        by_class: dict[int, LayerPrice] = {}
        inputs_of: dict[str, list[tuple[str, int, int]]] = {}
        for (value, consumer, slot), count in self.folded.edges.items():
            inputs_of.setdefault(consumer, []).append((value, slot, count))
        result = []
        for layer in self.layers.layers:
            if layer.block_class not in by_class:
                by_class[layer.block_class] = self._layer_price(layer.ops, chosen, inputs_of)
            result.append(by_class[layer.block_class])
        common = self._layer_price(self._shared_ops(), chosen, inputs_of)
        return [
            _plus(price, common, first=i == 0, in_flight=self.in_flight)
            for i, price in enumerate(result)
        ]

    def _shared_ops(self) -> tuple[str, ...]:
        layered = {
            self.folded.representative.get(n, n) for layer in self.layers.layers for n in layer.ops
        }
        return tuple(n for n in self.tables.ops if n not in layered)

    def _layer_price(
        self,
        ops: tuple[str, ...],
        chosen: Mapping[str, int],
        inputs_of: Mapping[str, list[tuple[str, int, int]]],
    ) -> LayerPrice:
        price = LayerPrice()
        done: set[tuple[str, int, int]] = set()
        parameters: dict[str, None] = {}
        working = kept = 0.0
        for full_name in ops:
            name = self.folded.representative.get(full_name, full_name)
            table, choice, runs = self.tables.ops[name], chosen[name], self._forward_runs(name)
            price.forward_s += table.forward_s[choice]
            price.backward_s += table.backward_s[choice] + (runs - 1.0) * table.forward_s[choice]
            price.communication_s += table.communication_s[choice] * runs
            price.backward_s += table.communication_s[choice] * runs
            price.transient_bytes = max(price.transient_bytes, table.transient_bytes[choice])
            for source, seconds in table.sources[choice].items():
                price.sources[source] = price.sources.get(source, 0.0) + seconds
            working += table.saved_bytes[choice]
            kept += float(self._handed_on(name)[choice]) if name in self.recomputed else 0.0
            for value, slot, _ in sorted(inputs_of.get(name, ()), key=lambda u: -u[2]):
                if value in self.tables.parameters:
                    parameters[value] = None
                working += self._conversion(price, value, name, slot, chosen, done, runs)
        recomputed = any(self.folded.representative.get(n, n) in self.recomputed for n in ops)
        price.activation_bytes = kept if recomputed else working
        price.transient_bytes += working if recomputed else 0.0
        for name in parameters:
            self._add_parameter(price, name, chosen[f"parameter:{name}"])
        return price

    def _conversion(self, price: LayerPrice, value: str, consumer: str, slot: int, chosen: Mapping[str, int], done: set[tuple[str, int, int]],
                    runs: float) -> float:  # fmt: skip
        """Adds one use's conversion to a layer's price, once per (value, from, to); gives the bytes
        autograd keeps of it.
        """
        table = self.tables.values[value]
        q = table.wanted.index(self.tables.ops[consumer].strategies[chosen[consumer]].inputs[slot])
        p = table.made.index(self._made(value, chosen))
        if (value, p, q) in done:
            return 0.0
        done.add((value, p, q))
        ahead, back = table.forward_s[p][q], table.backward_s[p][q]
        price.forward_s += ahead
        price.backward_s += back + (runs - 1.0) * ahead
        price.communication_s += runs * ahead + back
        return table.saved_bytes[p][q]

    def _made(self, value: str, chosen: Mapping[str, int]) -> Layout:
        if value in self.tables.parameters:
            return self.tables.parameters[value].strategies[chosen[f"parameter:{value}"]].used
        if value not in self.graph.producers:
            return self.tables.values[value].made[0]
        maker = self.graph.ops[self.graph.producers[value]]
        return (
            self.tables.ops[maker.name]
            .strategies[chosen[maker.name]]
            .outputs[maker.outputs.index(value)]
        )

    def _add_parameter(self, price: LayerPrice, name: str, choice: int) -> None:
        table = self.tables.parameters[name]
        price.step_s += table.step_s[choice]
        price.optimizer_s += table.optimizer_s[choice]
        price.backward_s += table.reduce_s[choice]
        price.communication_s += table.reduce_s[choice]
        price.parameter_bytes += table.parameter_bytes[choice]
        price.gradient_bytes += table.gradient_bytes[choice]
        price.state_bytes += table.state_bytes[choice]

    def _shared_parameters(
        self, chosen: Mapping[str, int]
    ) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Parameters that several layers use: each layer's price has them, a stage holds them
        once.
        """
        users: dict[str, list[int]] = {}
        by_name = {op.name: op for op in self.graph.ops}
        for i, layer in enumerate(self.layers.layers):
            for name in layer.ops:
                for value in by_name[name].inputs:
                    if self.graph.values[value].kind == "parameter" and i not in users.setdefault(
                        value, []
                    ):
                        users[value].append(i)
        result = []
        for value, where in users.items():
            if len(where) > 1:
                name = self.folded.representative.get(value, value)
                table = self.tables.parameters[name]
                result.append((tuple(where), table.held_bytes(chosen[f"parameter:{name}"])))
        return tuple(result)

    def _send_s(self, chosen: Mapping[str, int]) -> list[float]:
        """Seconds to move one microbatch over the boundary behind each layer, one way."""
        num = len(self.layers.layers)
        if num < 2:
            return []
        if self.candidate.pp == 1:
            return [0.0] * (num - 1)
        crossing = self._boundary_bytes(chosen)
        count = self.candidate.dp * self.candidate.tp
        profiles = self.tables.mesh.profiles
        order = self.cluster.ranks
        worst = 0.0
        result = []
        pairs = {(order[s * count], order[(s + 1) * count]) for s in range(self.candidate.pp - 1)}
        groups = {
            group_of(self.cluster, pair, min(count, self.cluster.devices_per_host))
            for pair in pairs
        }
        for size in crossing:
            worst = (
                max(collective_time(profiles, "send", size, group).time_s for group in groups)
                if size
                else 0.0
            )
            result.append(worst)
        return result

    def _boundary_bytes(self, chosen: Mapping[str, int]) -> list[float]:
        """Bytes a device sends over each boundary: every chain value made before it and used behind
        it.
        """
        layer_of = {name: i for i, layer in enumerate(self.layers.layers) for name in layer.ops}
        chain = {op.name for op in chain_ops(self.graph)}
        made, last = {}, {}
        for op in self.graph.ops:
            here = layer_of.get(op.name)
            if here is None:
                continue
            for value in op.inputs:
                if value in made:
                    last[value] = here
            if op.name in chain:
                made.update({v: here for v in op.outputs if v})
        total = [0.0] * (len(self.layers.layers) - 1)
        sizes = self.tables.mesh.axis_sizes
        for value, start in made.items():
            name = self.folded.representative.get(value, value)
            for boundary in range(start, last.get(value, start)):
                layout = boundary_layout(self._made(name, chosen))
                total[boundary] += self.graph.values[
                    value
                ].meta.size_bytes / layout.value.num_shards(sizes)
        return total


def _plus(price: LayerPrice, common: LayerPrice, *, first: bool, in_flight: int) -> LayerPrice:
    """A layer with what every stage runs besides: shared free ops, once in time, and everywhere in
    memory.
    """
    extra = 1.0 if first else 0.0
    return LayerPrice(
        price.forward_s + extra * common.forward_s,
        price.backward_s + extra * common.backward_s,
        price.communication_s + extra * common.communication_s,
        price.step_s + extra * common.step_s,
        price.optimizer_s + extra * common.optimizer_s,
        price.parameter_bytes + extra * common.parameter_bytes,
        price.gradient_bytes + extra * common.gradient_bytes,
        price.state_bytes + extra * common.state_bytes,
        price.activation_bytes,
        max(price.transient_bytes, common.transient_bytes) + common.activation_bytes * in_flight,
        dict(price.sources),
    )


def mesh_costs(cluster: Cluster, candidate: Candidate) -> MeshCosts:
    """The mesh of the candidate's first stage; stages are blocks of the cluster in rank order."""
    count = candidate.dp * candidate.tp
    return MeshCosts.of(cluster, tuple(cluster.ranks[:count]), (candidate.dp, candidate.tp))
