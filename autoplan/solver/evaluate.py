# SPDX-License-Identifier: Apache-2.0
"""One candidate layout, from tables to a priced decision: the integer program for strategies, the
stage program for cuts.

`CandidateSolver` writes the folded intra-op problem of an average stage, solves it at the memory
that a stage has, has the choices priced per layer (`pricing.py`), partitions the layers and replays
the schedule. What comes out is exact for the cost model: the same sums that the plan reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from itertools import accumulate

import numpy as np

from autoplan.cluster import Cluster
from autoplan.costs.tables import CostTables, ValueTable
from autoplan.errors import InfeasibleError
from autoplan.placements import Layout
from autoplan.runtime import OWN, Runtime
from autoplan.solver.candidate import (
    Candidate,
    LayerPrice,
    NotFasterError,
    Partly,
    Priced,
    Workload,
)
from autoplan.solver.contract import contract
from autoplan.solver.inter_op import LayerCosts, StageAssignment, partition_layers
from autoplan.solver.intra_op import Edge, IntraOpProblem, IntraOpSolution, solve_intra_op
from autoplan.solver.layers import Layers
from autoplan.solver.pricing import Pricing
from autoplan.solver.repeated import Repeated
from autoplan.units import US, format_bytes

TIME_UNIT_FLOOR_S = 1e-12


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
        runtime: What runs the candidate.
        partly: What is recomputed, where that is less than every block.
        repeated: The layers of a deep model, where `layers` are those of a shallow graph of it.
    """

    def __init__(
        self,
        tables: CostTables,
        layers: Layers,
        cluster: Cluster,
        candidate: Candidate,
        *,
        training: bool,
        limit_bytes: float,
        stage_layers: tuple[int, ...] | None,
        time_limit_s: float,
        runtime: Runtime = OWN,
        partly: Partly | None = None,
        repeated: Repeated | None = None,
    ) -> None:
        self.work = Workload(tables, layers, candidate, training, runtime, partly)
        self.repeated = repeated
        self.tables, self.layers, self.candidate = tables, layers, candidate
        self.cluster, self.training, self.limit_bytes = cluster, training, limit_bytes
        self.stage_layers, self.time_limit_s = stage_layers, time_limit_s
        self.folded, self.graph = tables.folded, self.work.graph
        self.in_flight = self.work.in_flight
        self.crowding = cluster.crowding(candidate.num_devices)
        # stages that share cores work on while others wait: then there is no bubble to bound
        waits = candidate.pp - 1 if self.crowding == 1.0 else 0
        self.passes = candidate.num_microbatches + waits

    # -- the integer program

    def solve(self, beat_s: float = np.inf) -> Priced:
        """The fastest choices that fit.

        The program is solved without its memory row first: that suffices where memory is plenty,
        and where even so it is no faster than `beat_s` it is the answer that will be discarded.
        Then at the device's memory, and for pipelines, whose stages are not average, at somewhat
        less until the cut fits.

        Raises:
            InfeasibleError: Nothing fits, or nothing that fits is faster than `beat_s`; the message
                says which.
        """
        error = self.hopeless()
        if error is not None:
            raise error
        bound_s = self.least_s()
        if bound_s >= beat_s:
            raise NotFasterError(bound_s)
        only = self._only_choices()
        if only is not None:
            return self._price(None, *only, self.limit_bytes)
        problem, names = self._problem()
        return self._solve(problem, names, beat_s)

    def runner_up(self, chosen: Priced, parameter: str) -> Priced:
        """The fastest choices with the stages of `chosen` in which a parameter is stored or used
        in another layout.

        Raises:
            InfeasibleError: It has no other layout, or none that fits.
        """
        mine = chosen.parameters[parameter]
        strategies = self.tables.parameters[parameter].strategies
        same = [(s.spec, s.used) == (mine.spec, mine.used) for s in strategies]
        if all(same):
            raise InfeasibleError(f"{parameter} has no other layout on this mesh")
        problem, names = self._problem()
        cost, node = list(problem.node_cost_s), names.index(f"parameter:{parameter}")
        cost[node] = np.where(same, np.inf, cost[node])
        cut = copy(self)
        cut.stage_layers = tuple(last - first for first, last in chosen.assignment.bounds)
        return cut._solve(replace(problem, node_cost_s=tuple(cost)), names, math.inf)

    def _solve(self, problem: IntraOpProblem, names: list[str], beat_s: float) -> Priced:
        error: InfeasibleError | None = None
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
                    if math.isinf(self.limit_bytes):
                        return quickest
                if fits or limit is not None or self.candidate.pp > 1:
                    return self._price(solution, choices, names, self.limit_bytes)
            except NotFasterError:
                raise
            except InfeasibleError as refused:
                error = refused
        assert error is not None, "without an error there was a price"
        raise error

    def _only_choices(self) -> tuple[tuple[int, ...], list[str]] | None:
        """The choices where there is but one of everything: that needs no program."""
        names = [*self.tables.ops, *(f"parameter:{n}" for n in self.tables.parameters)]
        counts = [len(t.strategies) for t in self.tables.ops.values()]
        counts += [len(t.strategies) for t in self.tables.parameters.values()]
        return ((0,) * len(names), names) if max(counts) == 1 else None

    def least_s(self) -> float:
        """A bound without solving: every op and parameter at its own fastest, nothing converted,
        stages perfectly even.
        """
        count, pp = self.folded.count, self.candidate.pp
        total = 0.0
        for name, table in self.tables.ops.items():
            runs = self.work.forward_runs(name)
            rows = zip(table.forward_s, table.backward_s, table.communication_s)
            total += min(runs * (f + c) + b for f, b, c in rows) * count[name] / pp
        once = sum(min(t.step_s) * count[n] / pp for n, t in self.tables.parameters.items())
        return total * self.passes + once

    def hopeless(self) -> InfeasibleError | None:
        """A refusal without solving: every op and parameter at its own least bytes is already too
        much.

        With held bytes H and saved bytes A of the whole model, a stage of share x that holds f
        microbatches needs x (H + f A); the shares of all stages sum up to 1, so no cut needs less
        than 1 / sum_s 1 / (H + f_s A) on its fullest device.
        """
        tables, count = self.tables, self.folded.count
        recomputed, handed_on = self.work.recomputed, self.work.handed_on_bytes
        held = sum(
            count[n] * min(t.held_bytes(i) for i in range(len(t.strategies)))
            for n, t in tables.parameters.items()
        )
        saved = sum(
            count[n] * min(t.saved_bytes) for n, t in tables.ops.items() if n not in recomputed
        )
        saved += sum(count[n] * float(handed_on(n).min()) for n in recomputed if n in tables.ops)
        stages, m = self.candidate.pp, self.candidate.num_microbatches
        flights = [
            min(m, stages - s) if self.candidate.schedule == "1f1b" else self.in_flight
            for s in range(stages)
        ]
        least = 1.0 / max(sum(1.0 / max(held + f * saved, 1e-9) for f in flights), 1e-30)
        if least <= self.limit_bytes:
            return None
        return InfeasibleError(
            f"needs at least {format_bytes(least)} on each device, "
            f"{format_bytes(self.limit_bytes)} are available",
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
            runs = self.work.forward_runs(name)
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
            weight, m = folded.count[name] / pp, self.candidate.num_microbatches
            each_s = np.array(parameter.reduce_s)
            if m > 1:
                each_s = each_s + np.array(parameter.accumulate_s)
            costs.append(weight * (np.array(parameter.step_s) + each_s * m))
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
        if op in self.work.recomputed:
            return 1.0
        return self.folded.count[op] / self.candidate.pp * self.in_flight

    def _crossing_bytes(self, op: str) -> np.ndarray:
        """What recomputed layers keep of this op over a stage and the microbatches in flight."""
        if op not in self.work.recomputed:
            return np.zeros(len(self.tables.ops[op].strategies))
        copies = self.folded.count[op] / self.candidate.pp * self.in_flight
        return self.work.handed_on_bytes(op) * copies

    def _edges(
        self, place: Mapping[str, int], leaf: int
    ) -> tuple[list[Edge], list[np.ndarray], list[np.ndarray]]:
        edges: list[Edge] = []
        conversion_cost, conversion_bytes = [], []
        grouped: dict[str, list[tuple[str, int, int]]] = {}
        for (value, consumer, slot), times in self.folded.edges.items():
            grouped.setdefault(value, []).append((consumer, slot, times))
        for value, uses in grouped.items():
            table = self.tables.values[value]
            producer, produced = self._producer(value, table.made, place, leaf)
            for inside in (False, True):  # a recomputed layer converts again, on its own account
                mine = [u for u in uses if (u[0] in self.work.recomputed) == inside]
                if not mine:
                    continue
                count = max(c for _, _, c in mine) / self.candidate.pp
                runs = 2.0 if inside else 1.0
                ahead, back = np.array(table.forward_s), np.array(table.backward_s)
                conversion_cost.append((runs * ahead + back) * count * self.passes)
                weight = 1.0 if inside else count * self.in_flight
                saved = np.array(table.saved_bytes) * weight
                keeping = [u for u in mine if u[0] in table.keepers]
                apart = 0 < len(keeping) < len(mine) and bool(saved.any())
                conversion_bytes.append(np.zeros_like(saved) if apart or not keeping else saved)
                edges += self._uses(
                    mine, table, producer, produced, place, len(conversion_cost) - 1
                )
                if apart:  # the bytes are held only where one of these takes the value
                    conversion_cost.append(np.zeros_like(saved))
                    conversion_bytes.append(saved)
                    group = len(conversion_cost) - 1
                    edges += self._uses(keeping, table, producer, produced, place, group)
        return edges, conversion_cost, conversion_bytes

    def _uses(
        self,
        uses: list[tuple[str, int, int]],
        table: ValueTable,
        producer: int,
        produced: np.ndarray,
        place: Mapping[str, int],
        group: int,
    ) -> list[Edge]:
        """One edge per use of a value, in one group."""
        where = {layout: q for q, layout in enumerate(table.wanted)}
        found = []
        for consumer, slot, _ in uses:
            strategies = self.tables.ops[consumer].strategies
            consumed = np.array([where[s.inputs[slot]] for s in strategies], dtype=np.int64)
            found.append(Edge(producer, place[consumer], produced, consumed, group))
        return found

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

    # -- the price of a solution

    def pricing_of(self, priced: Priced) -> Pricing:
        """What prices the layers of a decision that this solver has made."""
        chosen = {n: t.strategies.index(priced.strategies[n]) for n, t in self.tables.ops.items()}
        for name, table in self.tables.parameters.items():
            chosen[f"parameter:{name}"] = table.strategies.index(priced.parameters[name])
        return Pricing(self.work, self.cluster, chosen)

    def _price(
        self,
        solution: IntraOpSolution | None,
        choices: tuple[int, ...],
        names: list[str],
        limit_bytes: float,
    ) -> Priced:
        chosen = dict(zip(names, choices))
        pricing = Pricing(self.work, self.cluster, chosen)
        prices, send = pricing.layer_prices(), pricing.send_s()
        if self.repeated is not None:
            prices = [prices[i] for i in self.repeated.layers]
            deep = self.repeated.layers[:-1]
            send = [send[min(i, len(send) - 1)] for i in deep] if send else []
        prices = self._with_transfers(prices)
        assignment = self._partition(pricing, prices, send, limit_bytes, self.stage_layers)
        gap = 0.0
        if solution is not None:
            distance = solution.objective_s - solution.bound_s
            gap = distance / max(solution.objective_s, TIME_UNIT_FLOOR_S)
        return Priced(
            self.candidate,
            {n: t.strategies[chosen[n]] for n, t in self.tables.ops.items()},
            {n: t.strategies[chosen[f"parameter:{n}"]] for n, t in self.tables.parameters.items()},
            tuple(prices),
            assignment,
            tuple(send),
            gap,
            solution is None or solution.optimal,
        )

    def _with_transfers(self, prices: list[LayerPrice]) -> list[LayerPrice]:
        """Layers with the host time around transfers between stages, in which a stage does nothing
        else: once a pass, at the first layer of a stage; of every layer a part, where cuts are
        open.
        """
        each_s = self.work.runtime.send_us * US
        if self.candidate.pp == 1 or not each_s:
            return prices
        stages = self.candidate.pp * self.candidate.chunks
        shares = [stages / len(prices)] * len(prices)
        if self.stage_layers is not None:
            firsts = set(accumulate(self.stage_layers[:-1], initial=0))
            shares = [float(i in firsts) for i in range(len(prices))]
        return [self._waiting(price, share * each_s) for price, share in zip(prices, shares)]

    def _waiting(self, price: LayerPrice, each_s: float) -> LayerPrice:
        back_s = each_s if self.training else 0.0
        return replace(
            price,
            forward_s=price.forward_s + each_s,
            backward_s=price.backward_s + back_s,
            communication_s=price.communication_s + each_s + back_s,
            forward_communication_s=price.forward_communication_s + each_s,
        )

    def recut(self, priced: Priced, stage_layers: tuple[int, ...]) -> StageAssignment:
        """The same choices with other stages.

        Raises:
            InfeasibleError: A stage does not fit.
        """
        pricing = self.pricing_of(priced)
        return self._partition(
            pricing, list(priced.prices), list(priced.send_s), self.limit_bytes, stage_layers
        )

    def _partition(
        self,
        pricing: Pricing,
        prices: list[LayerPrice],
        send_s: list[float],
        limit_bytes: float,
        stage_layers: tuple[int, ...] | None,
    ) -> StageAssignment:
        columns = {
            key: np.array([[getattr(p, key) for p in prices]])
            for key in (
                "forward_s",
                "backward_s",
                "step_s",
                "held_bytes",
                "activation_bytes",
                "transient_bytes",
            )
        }
        shared = pricing.shared_parameters()
        if self.repeated is not None:
            where = self.repeated.first_place
            shared = tuple((tuple(where(i) for i in users), held) for users, held in shared)
        return partition_layers(
            LayerCosts(**columns, send_s=np.array(send_s), shared=shared, crowding=self.crowding),
            self.candidate.pp,
            self.candidate.num_microbatches,
            schedule=self.candidate.schedule,
            memory_limit_bytes=limit_bytes,
            stage_layers=stage_layers,
            chunks=self.candidate.chunks,
        )
