# SPDX-License-Identifier: Apache-2.0
"""The search around the two programs: which degrees, microbatches and recomputation, in order of
what they could gain.

`Search` enumerates candidates from the cluster's size
and the user's pins, prices them in order of their lower bounds, stops where the bound passes the
best, and keeps a reason for every loser. It gives a `Decision` with its `Figures`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autoplan.cluster import Cluster
from autoplan.costs.profile import Profiles
from autoplan.costs.tables import (
    CostTables,
    Folded,
    OpTables,
    PinnedPlacementError,
    Wishes,
    build_tables,
)
from autoplan.errors import InfeasibleError
from autoplan.graph import Graph
from autoplan.plan import Alternative, SearchReport
from autoplan.sharding.batch import cut_batch
from autoplan.sharding.factors import OpRule
from autoplan.sharding.rules import find_rule, kept_whole
from autoplan.sharding.strategies import block_options
from autoplan.solver.assemble import Decision, Figures
from autoplan.solver.evaluate import Candidate, CandidateSolver, NotFasterError, Priced, mesh_costs
from autoplan.solver.figures import make_figures
from autoplan.solver.layers import fold
from autoplan.solver.space import Pinned, Space
from autoplan.units import format_bytes, format_seconds

Progress = Callable[[str, float], None]
MOST_MICROBATCH_CHOICES = 10
FEW_MICROBATCH_CHOICES = 5  # up to so many are all priced


@dataclass(frozen=True)
class Part:
    """What one microbatch runs: the folded graph at its sizes, with rules and block options per
    representative op.
    """

    folded: Folded
    rules: dict[str, OpRule]
    blocks: dict[str, dict[str, tuple[int, ...]]]


@dataclass
class Search:
    """One search: its inputs, and what it has found so far."""

    space: Space
    cluster: Cluster
    pinned: Pinned
    training: bool
    optimizer: str
    limit_bytes: float
    time_limit_s: float
    progress: Progress | None = None
    best: Priced | None = None
    priced: dict[Candidate, Priced] = field(default_factory=dict)
    rejected: dict[Candidate, str] = field(default_factory=dict)
    infeasible: list[tuple[Candidate, InfeasibleError]] = field(default_factory=list)
    tables: dict[Candidate, CostTables] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    op_tables: OpTables = field(default_factory=dict)
    exhaustive: bool = True  # every microbatch count of every layout that could win was priced

    def run(self) -> Priced:
        """The best candidate.

        Raises:
            InfeasibleError: Nothing fits or divides; the message says what would.
        """
        self.check_pins()
        deadline = time.monotonic() + self.time_limit_s
        for counts in self._device_counts():
            self._explore([c for count in counts for c in self.candidates(count)], deadline)
            if self.best is not None:
                return self.best
        raise self.refusal()

    # -- candidates
    # -------------------------------------------------------------------------------------------------

    def check_pins(self) -> None:
        """Refuses pins that nothing can satisfy, with the values that can.

        Raises:
            InfeasibleError: All violated rules at once.
        """
        pinned, n = self.pinned, self.cluster.num_devices
        wrong = []
        heads = self.space.head_counts
        if pinned.tp is not None:
            sizes = {}
            for path, count in heads.items():
                if count % pinned.tp:
                    sizes.setdefault(count, path)
            for count, path in sizes.items():
                valid = [t for t in range(1, min(n, count) + 1) if count % t == 0]
                wrong.append(
                    f"{path or 'attention'} has {count} heads, which tp={pinned.tp} does not divide (valid tp: {', '.join(map(str, valid))})"
                )
        if pinned.dp is not None and self.space.batch.size % pinned.dp:
            valid = [d for d in range(1, n + 1) if self.space.batch.size % d == 0]
            wrong.append(
                f"a batch of {self.space.batch.size} does not divide over dp={pinned.dp} (valid dp: {', '.join(map(str, valid))})"
            )
        if pinned.num_microbatches is not None:
            m, size = pinned.num_microbatches, self.space.batch.size
            if size % m:
                valid = [d for d in range(1, size + 1) if size % d == 0]
                wrong.append(
                    f"a batch of {size} does not divide into {m} microbatches (valid counts: {', '.join(map(str, valid[:24]))})"
                )
            if m > 1 and self.space.batch.hindrances:
                op, reason = next(iter(self.space.batch.hindrances.items()))
                wrong.append(
                    f"the batch cannot be cut into microbatches: {reason} ({self._where(op)}); use num_microbatches=1"
                )
        if pinned.pp is not None and pinned.pp > len(self.space.layers.layers):
            wrong.append(
                f"pp={pinned.pp} stages are more than the model's {len(self.space.layers.layers)} layers, the maximum"
            )
        product = (pinned.tp or 1) * (pinned.pp or 1) * (pinned.dp or 1)
        if product > n or (None not in (pinned.tp, pinned.pp, pinned.dp) and n % product):
            wrong.append(
                f"tp * pp * dp = {product} does not fit {n} devices; the product must divide {n}"
            )
        if wrong:
            raise InfeasibleError(
                f"the pinned layout is not possible: {'; '.join(wrong)}. {self._way_out()}"
            )

    def _where(self, op: str) -> str:
        path = next((o.module_path for o in self.space.graph.ops if o.name == op), "")
        return path or op

    def _way_out(self) -> str:
        """A complete layout that works, found by searching without the degree pins."""
        free = replace(
            self.pinned, tp=None, pp=None, dp=None, num_microbatches=None, stage_layers=None
        )
        other = Search(
            self.space,
            self.cluster,
            free,
            self.training,
            self.optimizer,
            self.limit_bytes,
            min(self.time_limit_s, 20.0),
        )
        try:
            best = other.run().candidate
        except InfeasibleError:
            return "No other layout fits either."
        return f"Possible here: tp={best.tp}, dp={best.dp}, pp={best.pp} with {best.num_microbatches} microbatches."

    def _device_counts(self) -> Iterator[list[int]]:
        """Numbers of devices to try together: all, or a divisor where fewer are faster; then, if
        nothing fits, any number.
        """
        n, pinned = self.cluster.num_devices, self.pinned
        if pinned.tp is not None and pinned.pp is not None and pinned.dp is not None:
            yield [pinned.tp * pinned.pp * pinned.dp]
            return
        yield _divisors(n)
        for count in range(n - 1, 0, -1):
            if n % count:
                yield [count]

    def candidates(self, count: int) -> Iterator[Candidate]:
        """Every layout on `count` devices that the pins, the batch and the heads allow."""
        pinned, batch = self.pinned, self.space.batch
        heads = math.gcd(*self.space.head_counts.values()) if self.space.head_counts else 0
        for pp in _divisors(count):
            if pp > len(self.space.layers.layers) or pinned.pp not in (None, pp):
                continue
            if pinned.stage_layers is not None and len(pinned.stage_layers) != pp:
                continue
            for tp in _divisors(count // pp):
                dp = count // pp // tp
                if (
                    pinned.tp not in (None, tp)
                    or pinned.dp not in (None, dp)
                    or batch.size % dp
                    or (heads and heads % tp)
                ):
                    continue
                for m in self._microbatch_counts(dp, pp):
                    yield from self._variants(Candidate(pp, dp, tp, m, False, "infer"))

    def _variants(self, base: Candidate) -> Iterator[Candidate]:
        if not self.training:
            yield base
            return
        names = (
            ["1f1b"]
            if base.pp > 1 and base.num_microbatches >= base.pp
            else ["gpipe"]
            if base.pp > 1
            else ["1f1b"]
        )
        if self.pinned.schedule is not None:
            names = (
                [self.pinned.schedule]
                if base.pp == 1
                or self.pinned.schedule == "gpipe"
                or base.num_microbatches >= base.pp
                else []
            )
        for name in names:
            for recompute in (
                (False, True) if self.pinned.recompute is None else (self.pinned.recompute,)
            ):
                if recompute and not any(layer.is_block for layer in self.space.layers.layers):
                    continue
                yield replace(base, schedule=name, recompute=recompute)

    def _microbatch_counts(self, dp: int, pp: int) -> list[int]:
        batch = self.space.batch
        if self.pinned.num_microbatches is not None:
            m = self.pinned.num_microbatches
            return [m] if (batch.size // dp) % m == 0 else []
        if batch.hindrances or not self.training:
            return [1]
        counts = _divisors(batch.size // dp)
        if len(counts) > MOST_MICROBATCH_CHOICES:
            powers = [c for c in counts if c & (c - 1) == 0]
            counts = (
                powers
                if len(powers) >= 4
                else counts[:: max(1, len(counts) // MOST_MICROBATCH_CHOICES)]
            )
        return counts

    # -- pricing
    # ----------------------------------------------------------------------------------------------------

    def _explore(self, candidates: list[Candidate], deadline: float) -> None:
        """Prices layouts in order of their bounds; inside a layout, microbatch counts downwards
        while that helps.

        The most microbatches need the least memory and leave the smallest bubble; fewer of them
        launch fewer kernels and collectives. A layout that does not fit at the most does not fit at
        all.
        """
        groups: dict[Candidate, list[Candidate]] = {}
        for candidate in candidates:
            key = replace(candidate, num_microbatches=0, schedule="")
            groups.setdefault(key, []).append(candidate)
        on_one_host = self.cluster.devices_per_host
        bounded = sorted(
            (key.tp > on_one_host, min(map(self.least_s, members)), key)
            for key, members in groups.items()
        )
        for number, (_, bound, key) in enumerate(bounded):
            members = sorted(groups[key], key=lambda c: -c.num_microbatches)
            self._report("layouts", (number + 1) / len(bounded))
            if self.best is not None and bound >= self.best.step_s:
                self.rejected[members[0]] = (
                    f"cannot beat {format_seconds(self.best.step_s)}: its products alone take {format_seconds(bound)}"
                )
            elif self.best is not None and time.monotonic() > deadline:
                self.rejected[members[0]] = "not priced: the time limit of the search had passed"
                self.exhaustive = False
            else:
                self._descend(members)

    def least_s(self, candidate: Candidate) -> float:
        """A bound that needs no tables: the model's products at peak on all devices, and the bubble
        of even stages.
        """
        peak = Profiles.of(self.cluster).device.peak(self.space.dtype)[0]
        flop = self.space.training_flop if self.training else self.space.forward_flop
        work = (flop + (self.space.block_flop if candidate.recompute else 0.0)) / (
            peak * candidate.num_devices
        )
        return work * (1.0 + (candidate.pp - 1) / candidate.num_microbatches)

    def _descend(self, members: list[Candidate]) -> None:
        """From the most microbatches down: every second count while it helps, then the counts
        beside the best.
        """
        times: dict[int, float] = {}

        def seconds(at: int) -> float:
            if at not in times:
                times[at] = self.price(members[at])
            return times[at]

        if len(members) <= FEW_MICROBATCH_CHOICES:
            for number in range(len(members)):
                seconds(number)
            return
        at = 0
        while seconds(at) < math.inf and at + 2 < len(members) and seconds(at + 2) <= times[at]:
            at += 2
        if times[at] < math.inf:
            for near in (at - 1, at + 1):
                if 0 <= near < len(members):
                    seconds(near)
        self.exhaustive &= len(times) == len(members)

    def _solver(self, candidate: Candidate) -> CandidateSolver:
        """The candidate's tables; layouts that differ in recomputation or schedule alone share
        theirs.

        Raises:
            PinnedPlacementError: A pinned placement is impossible on this mesh.
        """
        key = replace(candidate, recompute=False, schedule="")
        if key not in self.tables:
            part = self._part(candidate.num_microbatches)
            levels = (0, 1, 3) if candidate.num_microbatches == 1 else (0, 1, 2, 3)
            levels = (
                (self.pinned.zero,)
                if self.pinned.zero is not None
                else levels
                if self.training
                else (0, 3)
            )
            split: frozenset[str] = frozenset()
            if self.pinned.tp is not None:
                split = self.space.heavy_ops - self.space.kept_whole(self.pinned.placements)
            wishes = Wishes(self.training, self.optimizer, levels, self.pinned.placements, split)
            self.tables[key] = build_tables(
                part.folded, part.rules, part.blocks, self.space.batch, mesh_costs(self.cluster, candidate), wishes,
                self.space.batch.size // candidate.num_microbatches // candidate.dp, self.op_tables,
            )  # fmt: skip
        return CandidateSolver(
            self.tables[key],
            self.space.layers,
            self.cluster,
            candidate,
            training=self.training,
            limit_bytes=self.limit_bytes,
            stage_layers=self.pinned.stage_layers,
            time_limit_s=10.0,
        )

    def _part(self, num_microbatches: int) -> Part:
        """The folded graph of one microbatch, with its rules."""
        if num_microbatches not in self.parts:
            cut = cut_batch(self.space.graph, self.space.batch, num_microbatches)
            folded = fold(cut, self.space.layers)
            rules = {op.name: find_rule(op, cut) or kept_whole(op, cut) for op in folded.ops}
            partial = Graph(cut.name, cut.values, folded.ops, cut.inputs, (), None, {}, cut.shared)
            self.parts[num_microbatches] = Part(folded, rules, block_options(partial, rules))
        return self.parts[num_microbatches]

    def price(self, candidate: Candidate) -> float:
        """The candidate's seconds a step, noted if it may be chosen; inf, with the reason noted,
        when it is not possible.
        """
        try:
            priced = self._solver(candidate).solve(
                self.best.step_s if self.best is not None else math.inf
            )
        except NotFasterError as error:
            self.rejected[candidate] = str(error)
            return error.step_s
        except PinnedPlacementError as error:
            self.rejected[candidate] = str(error)
            return math.inf
        except InfeasibleError as error:
            self.rejected[candidate] = str(error)
            self.infeasible.append((candidate, error))
            return math.inf
        self.priced[candidate] = priced
        if self.best is None or self._rank(priced) < self._rank(self.best):
            self.best = priced
        return priced.step_s

    @staticmethod
    def _rank(priced: Priced) -> tuple[float, int, Candidate]:
        """Faster first; of equals, with fewer devices."""
        return float(f"{priced.step_s:.9e}"), priced.candidate.num_devices, priced.candidate

    def _report(self, what: str, share: float) -> None:
        if self.progress is not None:
            self.progress(what, share)

    # -- what is said of losers
    # -------------------------------------------------------------------------------------

    def refusal(self) -> InfeasibleError:
        """Why nothing fits: the layout that needs least, what dominates it, and a number of devices
        that works.
        """
        reasons = tuple((str(c), r) for c, r in self.rejected.items())
        needy = [
            (e.required_bytes, c, e) for c, e in self.infeasible if e.required_bytes is not None
        ]
        if not needy:
            text = next(
                iter(self.rejected.values()),
                "no layout divides the batch, the heads and the devices as pinned",
            )
            return InfeasibleError(f"no plan for {self.cluster.name}: {text}.", candidates=reasons)
        least, candidate, error = min(needy, key=lambda x: (x[0], x[1]))
        more = self._enough_devices()
        advice = (
            f"{more} devices of the same kind are enough."
            if more
            else "Use more devices, smaller inputs or recomputation."
        )
        return InfeasibleError(
            f"no plan fits {self.cluster.num_devices} x {self.cluster.device.name}: the least any layout needs is {format_bytes(least)} on each device "
            f"({candidate}), {format_bytes(self.limit_bytes)} are available. Largest term: {self._largest_term(candidate)}. {advice}",
            stage=error.stage,
            required_bytes=least,
            available_bytes=self.limit_bytes,
            candidates=reasons,
        )

    def _largest_term(self, candidate: Candidate) -> str:
        tables = self._solver(candidate).tables
        terms = {
            "parameters": "parameter_bytes",
            "gradients": "gradient_bytes",
            "optimizer state": "state_bytes",
        }
        least = {
            n: min(range(len(t.strategies)), key=t.held_bytes) for n, t in tables.parameters.items()
        }
        count = tables.folded.count
        sums = {
            word: sum(count[n] * getattr(t, key)[least[n]] for n, t in tables.parameters.items())
            / candidate.pp
            for word, key in terms.items()
        }
        activations = (
            sum(count[n] * min(t.saved_bytes) for n, t in tables.ops.items()) / candidate.pp
        )
        sums["activations"] = (
            0.0 if candidate.recompute else activations * self._solver(candidate).in_flight
        )
        word = max(sums, key=lambda k: sums[k])
        return f"{word} {format_bytes(sums[word])}"

    def _enough_devices(self) -> int | None:
        """The smallest larger cluster of this kind (doubling) on which a plan was found."""
        if None not in (self.pinned.tp, self.pinned.pp, self.pinned.dp):
            return None
        bigger = self.cluster
        for _ in range(5):
            hosts = bigger.num_hosts * 2 if bigger.inter_host is not None else 1
            devices = (
                bigger.devices_per_host
                if bigger.inter_host is not None
                else bigger.devices_per_host * 2
            )
            bigger = replace(
                bigger,
                num_hosts=hosts,
                devices_per_host=devices,
                rank_hosts=None,
                fast_pairs=None,
                pair_link=None,
            )
            if bigger.num_devices > 4096:
                return None
            other = Search(
                self.space,
                bigger,
                self.pinned,
                self.training,
                self.optimizer,
                self.limit_bytes,
                10.0,
            )
            for candidate in sorted(
                other.candidates(bigger.num_devices),
                key=lambda c: (-c.num_microbatches, not c.recompute),
            ):
                other.price(candidate)
                if other.best is not None:
                    return bigger.num_devices
        return None

    def alternatives(self, top: int) -> tuple[Alternative, ...]:
        """The best of each other layout with the reason it lost, then those that do not fit."""
        assert self.best is not None, "a search that found nothing has no alternatives"
        seen = {(self.best.candidate.pp, self.best.candidate.dp, self.best.candidate.tp)}
        found: list[Alternative] = []
        for candidate, priced in sorted(
            self.priced.items(), key=lambda item: (item[1].step_s, item[0])
        ):
            key = (candidate.pp, candidate.dp, candidate.tp)
            if key not in seen and len(found) < top:
                seen.add(key)
                found.append(_alternative(candidate, priced, _why_slower(priced, self.best)))
        rest: list[Alternative] = []
        for candidate, reason in sorted(
            self.rejected.items(), key=lambda item: (-item[0].num_devices, item[0])
        ):
            key = (candidate.pp, candidate.dp, candidate.tp)
            if key not in seen:
                seen.add(key)
                rest.append(_alternative(candidate, None, reason))
        return tuple(found + rest[: 2 * top])

    def decide(self) -> tuple[Decision, Figures]:
        """The best candidate as a decision on the whole graph, with its figures."""
        assert self.best is not None, "a search that found nothing decides nothing"
        priced, candidate = self.best, self.best.candidate
        solver = self._solver(candidate)
        decision = expand(self.space, self.cluster, priced, solver)
        used = candidate.pp * candidate.dp * candidate.tp
        idle = self.cluster.num_devices - used
        report = SearchReport(
            num_candidates=len(self.priced) + len(self.rejected),
            num_rejected=len(self.rejected),
            gap=round(priced.gap, 9),
            optimal=priced.optimal and self.exhaustive,
            idle_devices=idle,
            idle_reason=self._idle_reason(used) if idle else "",
        )
        return decision, make_figures(
            self.space.graph, priced, solver, self.limit_bytes, self.cluster, report
        )

    def _idle_reason(self, used: int) -> str:
        assert self.best is not None, "a plan was found"
        larger = [p for c, p in self.priced.items() if c.num_devices > used]
        if larger:
            best = min(larger, key=self._rank)
            return f"on {best.candidate.num_devices} devices a step takes {format_seconds(best.step_s)}, on {used} {format_seconds(self.best.step_s)}"
        if any(c.num_devices > used for c in self.rejected):
            return f"no layout on more than {used} devices fits or is faster"
        return f"no layout on more than {used} devices divides the batch, the heads and the layers"


def expand(space: Space, cluster: Cluster, priced: Priced, solver: CandidateSolver) -> Decision:
    """The representatives' choices for every op and parameter of the graph."""
    candidate = priced.candidate
    representative = space.layers.representative
    graph = solver.graph
    strategies = {
        op.name: priced.strategies[representative.get(op.name, op.name)] for op in graph.ops
    }
    parameters = {
        v.name: priced.parameters[representative.get(v.name, v.name)]
        for v in graph.of_kind("parameter")
    }
    layers = space.layers.layers
    stages = [layers[a:b] for a, b in priced.assignment.bounds]
    count = candidate.dp * candidate.tp
    return Decision(
        dp=candidate.dp,
        tp=candidate.tp,
        pp=candidate.pp,
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
        strategies=strategies,
        parameters=parameters,
        bounds=tuple((stage[0].first_op, stage[-1].last_op) for stage in stages),
        layers=tuple(tuple(layer.label for layer in stage) for stage in stages),
        recompute=tuple(
            tuple(x.label for x in stage if x.is_block) if candidate.recompute else ()
            for stage in stages
        ),
        ranks=tuple(tuple(cluster.ranks[s * count : (s + 1) * count]) for s in range(candidate.pp)),
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _alternative(candidate: Candidate, priced: Priced | None, reason: str) -> Alternative:
    zero = max((s.zero for s in priced.parameters.values()), default=0) if priced else 0
    return Alternative(
        dp=candidate.dp,
        tp=candidate.tp,
        pp=candidate.pp,
        zero=zero,
        schedule=candidate.schedule,
        num_microbatches=candidate.num_microbatches,
        recompute=candidate.recompute,
        step_time_s=priced.step_s if priced else None,
        peak_memory_bytes=int(priced.peak_bytes) if priced else None,
        reason=reason,
    )


def _terms(priced: Priced) -> dict[str, float]:
    """Seconds of the step by kind, summed over a device's work; the bubble is what remains."""
    m, pp = priced.candidate.num_microbatches, priced.candidate.pp
    communication = (
        sum(p.communication_s for p in priced.prices) * m / pp
        + sum(p.step_s - p.optimizer_s for p in priced.prices) / pp
    )
    compute = sum(p.forward_s + p.backward_s - p.communication_s for p in priced.prices) * m / pp
    optimizer = sum(p.optimizer_s for p in priced.prices) / pp
    return {
        "compute": compute,
        "communication": communication,
        "optimizer": optimizer,
        "bubble": max(priced.step_s - compute - communication - optimizer, 0.0),
    }


def _why_slower(loser: Priced, best: Priced) -> str:
    mine, theirs = _terms(loser), _terms(best)
    word = max(mine, key=lambda k: mine[k] - theirs[k])
    factor = loser.step_s / best.step_s
    return f"{factor:.2f} x the time: {word} {format_seconds(mine[word])} against {format_seconds(theirs[word])}"
