# SPDX-License-Identifier: Apache-2.0
"""From choices to prices: what each layer of a candidate costs one device under given choices.

In: a `Workload` and one choice per op and parameter of its tables. Out: a `LayerPrice` per layer,
seconds over each boundary, and what several layers share. The sums are those that a plan reports;
nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from autoplan.cluster import Cluster, group_of
from autoplan.costs.collectives import collective_time
from autoplan.placements import Layout
from autoplan.sharding.cutting import chain_ops
from autoplan.solver.assemble import boundary_layout
from autoplan.solver.candidate import LayerPrice, Workload


class Pricing:
    """Prices one choice of everything.

    Args:
        work: What is run.
        cluster: For links between stages.
        chosen: Op name, or "parameter:" and a parameter's name -> index of its choice.
    """

    def __init__(self, work: Workload, cluster: Cluster, chosen: Mapping[str, int]) -> None:
        self.work, self.cluster, self.chosen = work, cluster, chosen
        self.tables, self.folded, self.graph = work.tables, work.tables.folded, work.graph
        self._inputs_of: dict[str, list[tuple[str, int, int]]] = {}
        """Consumer -> (value, slot, count) of its inputs."""
        for (value, consumer, slot), count in self.folded.edges.items():
            self._inputs_of.setdefault(consumer, []).append((value, slot, count))

    # -- layers

    def layer_prices(self) -> list[LayerPrice]:
        """Per layer; equal layers cost the same but for what comes into them."""
        by_class: dict[int, LayerPrice] = {}
        result = []
        for layer in self.work.layers.layers:
            if layer.block_class not in by_class:
                by_class[layer.block_class] = self._layer_price(layer.ops)
            result.append(by_class[layer.block_class])
        common, in_flight = self._layer_price(self._shared_ops()), self.work.in_flight
        return [
            _plus(price, common, first=i == 0, in_flight=in_flight)
            for i, price in enumerate(result)
        ]

    def _shared_ops(self) -> tuple[str, ...]:
        of = self.folded.representative
        layered = {of.get(n, n) for layer in self.work.layers.layers for n in layer.ops}
        return tuple(n for n in self.tables.ops if n not in layered)

    def _layer_price(self, ops: tuple[str, ...]) -> LayerPrice:
        price, recomputed = LayerPrice(), self.work.recomputed
        done: set[tuple[str, int, int]] = set()
        parameters: dict[str, None] = {}
        working = kept = 0.0
        for full_name in ops:
            name = self.folded.representative.get(full_name, full_name)
            table, choice, runs = (
                self.tables.ops[name],
                self.chosen[name],
                self.work.forward_runs(name),
            )
            price.forward_s += table.forward_s[choice]
            again_s = (runs - 1.0) * table.forward_s[choice]
            price.backward_s += table.backward_s[choice] + again_s
            price.recompute_s += again_s
            price.communication_s += table.communication_s[choice] * runs
            price.backward_s += table.communication_s[choice] * runs
            price.transient_bytes = max(price.transient_bytes, table.transient_bytes[choice])
            for source, seconds in table.sources[choice].items():
                price.sources[source] = price.sources.get(source, 0.0) + seconds
            working += table.saved_bytes[choice]
            if name in recomputed:
                kept += float(self.work.handed_on_bytes(name)[choice])
            for value, p, q in self.uses(name):
                if value in self.tables.parameters:
                    parameters[value] = None
                working += self._add_conversion(price, name, (value, p, q), done)
        again = any(self.folded.representative.get(n, n) in recomputed for n in ops)
        price.activation_bytes = kept if again else working
        price.transient_bytes += working if again else 0.0
        for name in parameters:
            self._add_parameter(price, name)
        return price

    def uses(self, op: str) -> Iterator[tuple[str, int, int]]:
        """(value, row, column) of the tables' conversion of each input of a representative: of the
        value that most of the ops it stands for take in that place. The first block of a class
        takes what comes before the blocks, all others their predecessor's.
        """
        usual: dict[int, str] = {}
        for value, slot, _ in sorted(self._inputs_of.get(op, ()), key=lambda u: (-u[2], u[0])):
            usual.setdefault(slot, value)
        strategy = self.tables.ops[op].strategies[self.chosen[op]]
        for slot, value in usual.items():
            table = self.tables.values[value]
            yield (
                value,
                table.made.index(self._made(value)),
                table.wanted.index(strategy.inputs[slot]),
            )

    def _add_conversion(
        self,
        price: LayerPrice,
        consumer: str,
        use: tuple[str, int, int],
        done: set[tuple[str, int, int]],
    ) -> float:
        """Adds one use's conversion to a layer's price, once per (value, from, to); gives the bytes
        autograd keeps of it.
        """
        value, p, q = use
        table = self.tables.values[value]
        if use not in done:
            done.add(use)
            ahead, back = table.forward_s[p][q], table.backward_s[p][q]
            runs = self.work.forward_runs(consumer)
            price.forward_s += ahead
            price.backward_s += back + (runs - 1.0) * ahead
            price.recompute_s += (runs - 1.0) * ahead
            price.communication_s += runs * ahead + back
            price.forward_communication_s += ahead
        if consumer not in table.keepers or (f"kept:{value}", p, q) in done:
            return 0.0
        done.add((f"kept:{value}", p, q))
        return table.saved_bytes[p][q]

    def _made(self, value: str) -> Layout:
        """The chosen layout of a representative value where it is made."""
        if value in self.tables.parameters:
            return self.tables.parameters[value].strategies[self._storage(value)].used
        if value not in self.graph.producers:
            return self.tables.values[value].made[0]
        maker = self.graph.ops[self.graph.producers[value]]
        strategy = self.tables.ops[maker.name].strategies[self.chosen[maker.name]]
        return strategy.outputs[maker.outputs.index(value)]

    # -- parameters

    def _storage(self, parameter: str) -> int:
        return self.chosen[f"parameter:{parameter}"]

    def _add_parameter(self, price: LayerPrice, name: str) -> None:
        table, choice = self.tables.parameters[name], self._storage(name)
        price.step_s += table.step_s[choice]
        price.optimizer_s += table.optimizer_s[choice]
        price.backward_s += table.reduce_s[choice]
        price.communication_s += table.reduce_s[choice]
        price.parameter_bytes += table.parameter_bytes[choice]
        price.gradient_bytes += table.gradient_bytes[choice]
        price.state_bytes += table.state_bytes[choice]

    def shared_parameters(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """(layers, bytes) of parameters that several layers use: each layer's price has them, a
        stage holds them once.
        """
        users: dict[str, list[int]] = {}
        by_name = {op.name: op for op in self.graph.ops}
        for i, layer in enumerate(self.work.layers.layers):
            for name in layer.ops:
                for value in by_name[name].inputs:
                    if self.graph.values[value].kind != "parameter":
                        continue
                    if i not in users.setdefault(value, []):
                        users[value].append(i)
        result = []
        for value, where in users.items():
            if len(where) > 1:
                name = self.folded.representative.get(value, value)
                held = self.tables.parameters[name].held_bytes(self._storage(name))
                result.append((tuple(where), held))
        return tuple(result)

    # -- boundaries

    def send_s(self) -> list[float]:
        """Seconds to move one microbatch over the boundary behind each layer, one way."""
        candidate, num = self.work.candidate, len(self.work.layers.layers)
        if num < 2:
            return []
        if candidate.pp == 1:
            return [0.0] * (num - 1)
        count, order = candidate.dp * candidate.tp, self.cluster.ranks
        pairs = {(order[s * count], order[(s + 1) * count]) for s in range(candidate.pp - 1)}
        at_once = min(count, self.cluster.devices_per_host)
        groups = {group_of(self.cluster, pair, at_once) for pair in pairs}
        mesh = self.tables.mesh
        result = []
        for sent, gathered in self.boundary_bytes():
            seconds = 0.0
            if sent:
                seconds = max(
                    collective_time(mesh.profiles, "send", sent, group).time_s for group in groups
                )
            if gathered:
                gather = collective_time(mesh.profiles, "all_gather", gathered, mesh.groups[1])
                seconds += gather.time_s
            result.append(seconds)
        return result

    def boundary_bytes(self) -> list[tuple[float, float]]:
        """Per boundary, bytes that a device sends of every chain value made before it and used
        behind it, and bytes that tensor parallel ranks gather of it again.
        """
        layers = self.work.layers.layers
        layer_of = {name: i for i, layer in enumerate(layers) for name in layer.ops}
        chain = {op.name for op in chain_ops(self.graph)}
        made: dict[str, int] = {}
        last: dict[str, int] = {}
        for op in self.graph.ops:
            here = layer_of.get(op.name)
            if here is None:
                continue
            for value in op.inputs:
                if value in made:
                    last[value] = here
            if op.name in chain:
                made.update({v: here for v in op.outputs if v})
        total = [(0.0, 0.0)] * (len(layers) - 1)
        sizes, share = self.tables.mesh.axis_sizes, shares_boundaries(self.cluster, self.work)
        for value, start in made.items():
            layout = self._made(self.folded.representative.get(value, value))
            meta = self.graph.values[value].meta
            crossing = boundary_layout(layout, meta.shape, sizes, share=share)
            sent = meta.size_bytes / crossing.value.num_shards(sizes)
            gathered = sent * sizes[1] if share and crossing.value[1] != layout.value[1] else 0.0
            for boundary in range(start, last.get(value, start)):
                before = total[boundary]
                total[boundary] = (before[0] + sent, before[1] + gathered)
        return total


def shares_boundaries(cluster: Cluster, work: Workload) -> bool:
    """Stages lie on different hosts while each tensor parallel group lies on one: the link between
    hosts is what a boundary waits for, so it carries every byte once.
    """
    candidate = work.candidate
    count, order = candidate.dp * candidate.tp, cluster.ranks
    stages = [
        {cluster.host_of(r) for r in order[s * count : (s + 1) * count]}
        for s in range(candidate.pp)
    ]
    crosses = any(a != b for a, b in pairwise(stages))
    return candidate.tp > 1 and crosses and work.tables.mesh.groups[1].num_hosts == 1


def _plus(price: LayerPrice, common: LayerPrice, *, first: bool, in_flight: int) -> LayerPrice:
    """A layer with what every stage runs besides: shared free ops, once in time, and everywhere in
    memory.
    """
    extra = 1.0 if first else 0.0
    return LayerPrice(
        price.forward_s + extra * common.forward_s,
        price.backward_s + extra * common.backward_s,
        price.communication_s + extra * common.communication_s,
        price.forward_communication_s + extra * common.forward_communication_s,
        price.recompute_s + extra * common.recompute_s,
        price.step_s + extra * common.step_s,
        price.optimizer_s + extra * common.optimizer_s,
        price.parameter_bytes + extra * common.parameter_bytes,
        price.gradient_bytes + extra * common.gradient_bytes,
        price.state_bytes + extra * common.state_bytes,
        price.activation_bytes,
        max(price.transient_bytes, common.transient_bytes) + common.activation_bytes * in_flight,
        dict(price.sources),
    )
