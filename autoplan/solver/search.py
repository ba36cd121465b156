# SPDX-License-Identifier: Apache-2.0
"""The search around the two programs: which degrees, microbatches and recomputation, in order of
what they could gain.

`Search` enumerates candidates from the cluster's size and the user's pins, prices them in order of
their lower bounds, stops where the bound passes the best, and keeps a reason for every loser. What
is said of those is `account.py`; the best one becomes a decision in `decision.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autoplan.cluster import Cluster
from autoplan.costs.builder import build_tables
from autoplan.costs.compute import best_share
from autoplan.costs.profile import Profiles
from autoplan.costs.storage import PinnedPlacementError
from autoplan.costs.tables import CostTables, Folded, OpTables, Wishes
from autoplan.errors import AutoplanError, InfeasibleError
from autoplan.graph import Graph
from autoplan.sharding.batch import cut_batch
from autoplan.sharding.factors import OpRule
from autoplan.sharding.rules import find_rule, kept_whole
from autoplan.sharding.strategies import block_options
from autoplan.solver.account import refusal
from autoplan.solver.candidate import Candidate, NotFasterError, Priced, mesh_costs
from autoplan.solver.evaluate import CandidateSolver
from autoplan.solver.layers import fold
from autoplan.solver.pins import Pinned, check_pins
from autoplan.solver.space import Space
from autoplan.units import format_seconds

Progress = Callable[[str, float], None]
MOST_MICROBATCH_CHOICES = 10
FEW_MICROBATCH_CHOICES = 5  # up to so many are all priced
WAY_OUT_S = 20.0  # at most, to find a layout for a refusal of pins
PROGRAM_S = 10.0  # for one integer program


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
        check_pins(self.pinned, self.space, self.cluster.num_devices, self._best_of)
        deadline = time.monotonic() + self.time_limit_s
        for counts in self._device_counts():
            self._explore([c for count in counts for c in self.candidates(count)], deadline)
            if self.best is not None:
                return self.best
        raise refusal(self)

    def like(
        self,
        *,
        pinned: Pinned | None = None,
        cluster: Cluster | None = None,
        time_limit_s: float | None = None,
    ) -> Search:
        """A search that has found nothing yet, equal to this one but for what is given."""
        return Search(
            self.space,
            self.cluster if cluster is None else cluster,
            self.pinned if pinned is None else pinned,
            self.training,
            self.optimizer,
            self.limit_bytes,
            self.time_limit_s if time_limit_s is None else time_limit_s,
        )

    def _best_of(self, pinned: Pinned) -> Candidate:
        limit_s = min(self.time_limit_s, WAY_OUT_S)
        return self.like(pinned=pinned, time_limit_s=limit_s).run().candidate

    # -- candidates

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
        fills = base.num_microbatches >= base.pp  # 1f1b starts with a microbatch on every stage
        if self.pinned.schedule is None:
            names = ["1f1b" if base.pp == 1 or fills else "gpipe"]
        elif base.pp == 1 or fills or self.pinned.schedule == "gpipe":
            names = [self.pinned.schedule]
        else:
            names = []
        pin = self.pinned.recompute
        recomputes = (False, True) if pin is None else (pin,)
        for name in names:
            for recompute in recomputes:
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
            stride = max(1, len(counts) // MOST_MICROBATCH_CHOICES)
            counts = powers if len(powers) >= 4 else counts[::stride]
        return counts

    # -- pricing

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
                    f"cannot beat {format_seconds(self.best.step_s)}: "
                    f"its products alone take {format_seconds(bound)}"
                )
            elif self.best is not None and time.monotonic() > deadline:
                self.rejected[members[0]] = "not priced: the time limit of the search had passed"
                self.exhaustive = False
            else:
                self._descend(members)

    def least_s(self, candidate: Candidate) -> float:
        """A bound that needs no tables: the model's products at the best rate that any kernel has,
        on all devices, and the bubble of even stages.
        """
        device = Profiles.of(self.cluster, candidate.num_devices).device
        rate = device.peak(self.space.dtype)[0] * best_share(device)
        flop = self.space.training_flop if self.training else self.space.forward_flop
        work = (flop + (self.space.block_flop if candidate.recompute else 0.0)) / (
            rate * candidate.num_devices
        )
        if self.cluster.crowding(candidate.num_devices) > 1.0:
            return work  # stages that share cores work on while others wait
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

    def solver(self, candidate: Candidate) -> CandidateSolver:
        """What prices a candidate; layouts that differ in recomputation or schedule alone share
        their tables.

        Raises:
            PinnedPlacementError: A pinned placement is impossible on this mesh.
        """
        key = replace(candidate, recompute=False, schedule="")
        if key not in self.tables:
            self.tables[key] = self._build_tables(candidate)
        return CandidateSolver(
            self.tables[key],
            self.space.layers,
            self.cluster,
            candidate,
            training=self.training,
            limit_bytes=self.limit_bytes,
            stage_layers=self.pinned.stage_layers,
            time_limit_s=PROGRAM_S,
        )

    def _build_tables(self, candidate: Candidate) -> CostTables:
        part = self._part(candidate.num_microbatches)
        split: frozenset[str] = frozenset()
        if self.pinned.tp is not None:
            split = self.space.heavy_ops - self.space.kept_whole(self.pinned)
        levels = self._zero_levels(candidate)
        return build_tables(
            part.folded,
            part.rules,
            part.blocks,
            self.space.batch,
            mesh_costs(self.cluster, candidate),
            Wishes(self.training, self.optimizer, levels, self.pinned.placements, split),
            rows=self.space.batch.size // candidate.num_microbatches // candidate.dp,
            known=self.op_tables,
        )

    def _zero_levels(self, candidate: Candidate) -> tuple[int, ...]:
        """ZeRO levels that may be chosen: 2, which reduces after every microbatch, where there are
        several; without gradients only whole or split parameters.
        """
        if self.pinned.zero is not None:
            return (self.pinned.zero,)
        if not self.training:
            return (0, 3)
        return (0, 1, 3) if candidate.num_microbatches == 1 else (0, 1, 2, 3)

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
            beat_s = self.best.step_s if self.best is not None else math.inf
            priced = self.solver(candidate).solve(beat_s)
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
        except AutoplanError as error:  # the solver gave up on this one program: others go on
            self.rejected[candidate], self.exhaustive = str(error), False
            return math.inf
        self.priced[candidate] = priced
        if self.best is None or priced.rank < self.best.rank:
            self.best = priced
        return priced.step_s

    def _report(self, what: str, share: float) -> None:
        if self.progress is not None:
            self.progress(what, share)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
