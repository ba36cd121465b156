# SPDX-License-Identifier: Apache-2.0
"""From choices to prices: what each layer of a candidate costs one device under given choices.

In: a `Workload` and one choice per op and parameter of its tables. Out: a `LayerPrice` per layer,
seconds over each boundary, and what several layers share. The sums are those that a plan reports;
nothing is chosen here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from autoplan.cluster import Cluster, group_of
from autoplan.costs.collectives import collective_time
from autoplan.placements import Layout
from autoplan.runtime import Runtime
from autoplan.sharding.cutting import chain_ops
from autoplan.solver.assemble import boundary_layout
from autoplan.solver.candidate import LayerPrice, Workload

# of the maximum of host and device time: now the one waits, now the other, as both vary from kernel
# to kernel. Of 4 and 8 the one that tells vTrain's single-node runs better
SHARPNESS = 4.0


@dataclass
class Streams:
    """One pass of one microbatch through a layer: seconds of computing; of exchanging activations,
    and of what nothing runs behind; of gathering parameters and reducing gradients; and the kernels
    that it launches.
    """

    compute_s: float = 0.0
    exchange_s: float = 0.0
    waited_s: float = 0.0
    gather_s: float = 0.0
    launches: float = 0.0

    def busy_s(self, runtime: Runtime) -> float:
        """Seconds of computing, by the device or by the host that launches."""
        return max(self.compute_s, runtime.host_s * self.launches)

    def chain_s(self, runtime: Runtime) -> float:
        """Computing and what of the exchanges it waits for, while the host launches on: the longer
        of the two where one is much longer, and up to a fifth more where they are alike.

            (device^n + host^n)^(1/n)        n = SHARPNESS
        """
        hidden = runtime.hides_tp * min(self.exchange_s, self.compute_s)
        waited_s = self.waited_s + self.exchange_s - hidden + runtime.contention * hidden
        device_s, host_s = self.compute_s + waited_s, runtime.host_s * self.launches
        if not host_s:
            return device_s
        return math.pow(device_s**SHARPNESS + host_s**SHARPNESS, 1.0 / SHARPNESS)

    def time_s(self, runtime: Runtime) -> float:
        """All of the pass."""
        chain_s = self.chain_s(runtime)
        return chain_s + runtime.hidden_s(chain_s, self.gather_s, hides=runtime.hides_gathers)

    def room_s(self, runtime: Runtime) -> float:
        """Seconds behind which more communication could hide."""
        return self.chain_s(runtime) - self.gather_s


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
        for price in by_class.values():
            price.forward_s += self._runtime_s()
            price.backward_s += self._runtime_s() if self.work.training else 0.0
        common, in_flight = self._layer_price(self._shared_ops()), self.work.in_flight
        return [
            _plus(price, common, first=i == 0, in_flight=in_flight)
            for i, price in enumerate(result)
        ]

    def _runtime_s(self) -> float:
        """A layer's part of what the pipeline's runtime takes for one microbatch, one way."""
        pp, layers = self.work.candidate.pp, len(self.work.layers.layers)
        host = self.tables.mesh.profiles.device.host
        return host.microbatch_s * pp / layers if pp > 1 else 0.0

    def _shared_ops(self) -> tuple[str, ...]:
        of = self.folded.representative
        layered = {of.get(n, n) for layer in self.work.layers.layers for n in layer.ops}
        return tuple(n for n in self.tables.ops if n not in layered)

    def _layer_price(self, ops: tuple[str, ...]) -> LayerPrice:
        price, recomputed, partly = LayerPrice(), self.work.recomputed, self.work.partly
        done: set[tuple[str, int, int]] = set()
        parameters: dict[str, None] = {}
        working = kept = aside = cached = 0.0
        entering: set[str] = set()
        ahead, back = Streams(), Streams()
        for full_name in ops:
            name = self.folded.representative.get(full_name, full_name)
            table, choice, runs = (
                self.tables.ops[name],
                self.chosen[name],
                self.work.forward_runs(name),
            )
            launched, later = table.launches[choice]
            again_s = (runs - 1.0) * table.forward_s[choice]
            ahead.compute_s += table.forward_s[choice]
            ahead.launches += launched
            back.compute_s += table.backward_s[choice] + again_s
            back.launches += later + (runs - 1.0) * launched
            price.recompute_s += again_s
            if table.op.target == "autoplan.context":
                back.exchange_s += table.communication_s[choice] * runs
            else:
                back.waited_s += table.communication_s[choice] * runs
            price.transient_bytes = max(price.transient_bytes, table.transient_bytes[choice])
            for source, seconds in table.sources[choice].items():
                price.sources[source] = price.sources.get(source, 0.0) + seconds
            working += table.saved_bytes[choice]
            if name in recomputed:
                kept += float(self.work.handed_on_bytes(name)[choice])
            if partly is not None and name in partly.cached - partly.dropped:
                cached += self.work.cached_bytes(name, choice)
            aside += (2.0 - runs) * table.saved_bytes[choice]
            for value, p, q in self.uses(name):
                if value in self.tables.parameters:
                    parameters[value] = None
                saved = self._add_conversion((ahead, back, price), name, (value, p, q), done)
                working += saved
                aside += (2.0 - runs) * saved
                if runs > 1.0 and self._enters(value) and value not in entering:
                    entering.add(value)
                    aside += (runs - 1.0) * self._made_bytes(value)
        again = any(self.folded.representative.get(n, n) in recomputed for n in ops)
        price.activation_bytes = kept if again else working
        if again and partly is not None:
            price.activation_bytes = kept + cached if partly.cached else aside
            if partly.whole:
                share = max(partly.shares.values())
                price.activation_bytes = share * kept + (1.0 - share) * working
        price.transient_bytes += working - price.activation_bytes if again else 0.0
        if self.work.runtime.bundles and len(parameters) > 1:
            self._bundle(ahead, back, len(parameters) - 1)
        self._add_streams(price, ahead, back)
        for number, name in enumerate(parameters):
            self._add_parameter(price, name, ahead, back, first=number == 0)
        return price

    def _bundle(self, ahead: Streams, back: Streams, others: int) -> None:
        """Takes off what gathers and reductions of the other parameters of a layer cost whatever
        their size: they are in the first one's.
        """
        mesh = self.tables.mesh
        gather_s, reduce_s = mesh.fixed_s("all_gather"), mesh.fixed_s("reduce_scatter")
        if ahead.gather_s > others * gather_s:
            ahead.gather_s -= others * gather_s
            back.gather_s = max(0.0, back.gather_s - others * (gather_s + reduce_s))

    def _enters(self, value: str) -> bool:
        """An activation that recomputed ops take from one that is not recomputed: it is kept."""
        if value not in self.graph.producers or not self.graph.values[value].requires_grad:
            return False
        maker = self.graph.ops[self.graph.producers[value]].name
        return maker not in self.work.recomputed

    def _made_bytes(self, value: str) -> float:
        shards = self._made(value).value.num_shards(self.tables.mesh.axis_sizes)
        return self.graph.values[value].meta.size_bytes / shards

    def _add_streams(self, price: LayerPrice, ahead: Streams, back: Streams) -> None:
        """What a microbatch's forward and backward take, with what the runtime hides of their
        communication.
        """
        runtime = self.work.runtime
        price.forward_s, price.backward_s = ahead.time_s(runtime), back.time_s(runtime)
        price.forward_communication_s = price.forward_s - ahead.busy_s(runtime)
        back_s = price.backward_s - back.busy_s(runtime)
        price.communication_s = price.forward_communication_s + back_s

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
        streams: tuple[Streams, Streams, LayerPrice],
        consumer: str,
        use: tuple[str, int, int],
        done: set[tuple[str, int, int]],
    ) -> float:
        """Adds one use's conversion to a layer's price, once per (value, from, to); gives the bytes
        autograd keeps of it.
        """
        value, p, q = use
        table = self.tables.values[value]
        ahead, back, price = streams
        if use not in done:
            done.add(use)
            runs = self.work.forward_runs(consumer)
            forth_s, back_s = table.forward_s[p][q], table.backward_s[p][q]
            again_s = (runs - 1.0) * forth_s
            price.recompute_s += again_s
            if value in self.tables.parameters:
                ahead.gather_s += forth_s
                back.gather_s += back_s + again_s
            else:
                ahead.exchange_s += forth_s
                ahead.launches += forth_s > 0.0
                back.exchange_s += back_s + again_s
                back.launches += (back_s > 0.0) + (runs - 1.0) * (forth_s > 0.0)
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

    def _add_parameter(
        self, price: LayerPrice, name: str, ahead: Streams, back: Streams, *, first: bool
    ) -> None:
        """Adds what storing a parameter costs; what the runtime hides of it behind the layer's own
        forward and backward of one microbatch counts where it sticks out.
        """
        table, choice, runtime = (
            self.tables.parameters[name],
            self._storage(name),
            self.work.runtime,
        )
        gather_s, gradient_s = table.gather_s[choice], table.gradient_s[choice]
        if runtime.bundles and not first:
            gather_s = max(0.0, gather_s - self.tables.mesh.fixed_s("all_gather"))
            gradient_s = max(0.0, gradient_s - self.tables.mesh.fixed_s("reduce_scatter"))
        out_s = runtime.hidden_s(
            max(ahead.room_s(runtime), 0.0), gather_s, hides=runtime.hides_gathers
        )
        ahead.gather_s += gather_s if runtime.hides_gathers else 0.0
        out_s += runtime.hidden_s(
            max(back.room_s(runtime), 0.0), gradient_s, hides=runtime.hides_gradients
        )
        back.gather_s += gradient_s if runtime.hides_gradients else 0.0
        price.step_s += table.optimizer_s[choice] + out_s
        price.optimizer_s += table.optimizer_s[choice]
        price.backward_s += table.reduce_s[choice]
        price.communication_s += table.reduce_s[choice]
        if self.work.candidate.num_microbatches > 1:
            price.backward_s += table.accumulate_s[choice]
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
