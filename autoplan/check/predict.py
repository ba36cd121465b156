# SPDX-License-Identifier: Apache-2.0
"""What the cost model says of a published run: model, cluster and plan, priced as one candidate.

The graph is written (`models.py`), and from there everything is the planner's: rules, tables, the
integer program over what the run's framework can do, the schedule's replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autoplan.check.case import Case, case_of, zero_level
from autoplan.check.models import Sizes, Written, write_model
from autoplan.check.rows import Degrees, NotExpressedError, Run, measured_s
from autoplan.costs.builder import build_tables
from autoplan.costs.saved import saved_by
from autoplan.costs.tables import Folded, MeshCosts, OpTables, Wishes
from autoplan.errors import InfeasibleError
from autoplan.graph import Graph, Op
from autoplan.runtime import Runtime
from autoplan.sharding.factors import OpRule
from autoplan.sharding.strategies import block_options
from autoplan.solver.candidate import Candidate, Partly, Priced, mesh_costs
from autoplan.solver.evaluate import CandidateSolver
from autoplan.solver.layers import fold
from autoplan.solver.repeated import LEAST, Repeated, repeat_blocks
from autoplan.solver.space import Space
from autoplan.units import US, format_seconds

PROGRAM_S = 10.0


@dataclass(frozen=True)
class Prediction:
    """A run and what was predicted of it.

    Attributes:
        run: The row.
        device: The device's profile.
        runtime: The framework's name.
        step_s, memory_bytes: Predicted.
        measured_s: As the source says; None where it does not.
        capacity_bytes: Of a device.
        recompute: "none", "selective" or "full", as priced.
        kinds: Share of the predicted seconds by kind of number.
    """

    run: Run
    device: str
    runtime: str
    step_s: float
    memory_bytes: float
    measured_s: float | None
    capacity_bytes: float
    recompute: str
    kinds: dict[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return None if self.measured_s is None else self.step_s / self.measured_s - 1.0


@dataclass(frozen=True)
class _Part:
    """What the price of a microbatch needs, whatever the cluster."""

    written: Written
    space: Space
    folded: Folded
    repeated: Repeated | None
    rules: dict[str, OpRule]
    blocks: dict[str, dict[str, tuple[int, ...]]]


def _tried(run: Run, case: Case) -> tuple[Priced, str]:
    """The price with the least recomputation that fits, of those that may be."""
    part = _part(case.sizes)
    for recompute in case.recomputes[:-1]:
        found = _price(part, run, case, recompute)
        if case.memory_bytes(found) <= case.cluster.device.memory_bytes:
            return found, recompute
    return _price(part, run, case, case.recomputes[-1]), case.recomputes[-1]


def priced(run: Run) -> Priced:
    """The priced candidate that a run is.

    Raises:
        NotExpressedError: As `predict`.
    """
    return _tried(run, case_of(run))[0]


def predict(run: Run) -> Prediction:
    """The prediction for a run.

    Raises:
        NotExpressedError: The row does not say enough, or asks for what the cost model lacks.
    """
    case = case_of(run)
    found, recompute = _tried(run, case)
    measured = measured_s(
        run, case.degrees, case.sizes.num_parameters, masked=case.traits.counts_masked
    )
    if measured is not None and measured < case.least_s:
        raise NotExpressedError(
            f"measured below the {format_seconds(case.least_s)} that its products take at the "
            "device's peak: the sizes cannot be those stated"
        )
    return Prediction(
        run,
        case.cluster.device.name,
        case.traits.name,
        found.step_s + (case.traits.step_us + _owners_us(run, case)) * US,
        case.memory_bytes(found),
        measured,
        case.cluster.device.memory_bytes,
        recompute,
        _kinds(found),
    )


def _owners_us(run: Run, case: Case) -> float:
    """Microseconds of the step in which owners of shards send them, one after the other."""
    level, size = zero_level(run, case.traits, case.cluster, case.degrees)
    ranks = size or case.degrees.dp * case.degrees.cp
    return case.traits.owner_us * ranks if level in (1, 2) and ranks > 1 else 0.0


def _kinds(priced: Priced) -> dict[str, float]:
    total: dict[str, float] = {}
    for price in priced.prices:
        for kind, seconds in price.sources.items():
            total[kind] = total.get(kind, 0.0) + seconds
    whole = sum(total.values())
    return {k: round(v / whole, 4) for k, v in sorted(total.items())} if whole else {}


@lru_cache(maxsize=256)
def _part(sizes: Sizes) -> _Part:
    written = write_model(sizes)
    space = Space.of(written.graph)
    folded = fold(written.graph, space.layers)
    repeated = None
    if written.num_blocks > LEAST:
        number = next(x.block_class for x in space.layers.layers if x.is_block)
        folded, repeated = repeat_blocks(folded, space.layers, {number: written.num_blocks})
    graph = written.graph
    partial = Graph(graph.name, graph.values, folded.ops, graph.inputs, (), None, {}, graph.shared)
    rules = {op.name: space.rules[op.name] for op in folded.ops}
    return _Part(written, space, folded, repeated, rules, block_options(partial, rules))


def _price(part: _Part, run: Run, case: Case, recompute: str) -> Priced:
    degrees, cluster, traits = case.degrees, case.cluster, case.traits
    written, folded = part.written, part.folded
    candidate = Candidate(
        degrees.pp,
        degrees.dp * degrees.cp,
        degrees.tp,
        degrees.num_microbatches,
        recompute != "none",
        "1f1b",
        degrees.chunks if degrees.pp > 1 else 1,
    )
    level, shard_size = zero_level(run, traits, cluster, degrees)
    letters: dict[str, frozenset[str]] = {}
    if degrees.tp > 1:
        letters = megatron_letters(written, part, traits.sequence_parallel)
    experts = degrees.ep if written.expert_weights else 1
    near = tuple(sorted({degrees.cp, experts, 1}))
    apart = None
    if written.expert_weights:
        fewer = replace(candidate, dp=candidate.dp // experts)
        count = candidate.dp * candidate.tp
        strided = tuple(cluster.ranks[:count])[:: experts * candidate.tp]
        ranks = tuple(r for start in strided for r in range(start, start + candidate.tp))
        apart = (written.expert_weights, MeshCosts.of(cluster, ranks, (fewer.dp, fewer.tp)))
    wishes = Wishes(
        True,
        "adamw",
        (level,),
        split=frozenset(op.name for op in folded.ops) if degrees.tp > 1 else frozenset(),
        letters=letters,
        float8=written.products if case.float8 else frozenset(),
        runtime=traits,
        apart=apart,
    )
    known: OpTables = {}
    tables = build_tables(
        folded,
        part.rules,
        part.blocks,
        part.space.batch,
        mesh_costs(cluster, candidate, shard_size, near),
        wishes,
        rows=degrees.micro,
        known=known,
    )
    solver = CandidateSolver(
        tables,
        part.space.layers,
        cluster,
        candidate,
        training=True,
        limit_bytes=math.inf,
        stage_layers=_stage_layers(part, degrees, traits),
        time_limit_s=PROGRAM_S,
        runtime=traits,
        partly=_partly(part, run, traits, recompute),
        repeated=part.repeated,
    )
    try:
        return solver.solve()
    except (InfeasibleError, ValueError) as problem:
        raise NotExpressedError(str(problem)) from problem


def _partly(part: _Part, run: Run, traits: Runtime, recompute: str) -> Partly | None:
    """What the framework's selective recomputation runs again; None: every block, or nothing."""
    if recompute != "selective":
        return None
    of = part.folded.representative
    blocks = {of.get(n, n) for x in part.space.layers.layers if x.is_block for n in x.ops}
    ops = [op for op in part.folded.ops if op.name in blocks]
    manner = traits.selective
    if "every other layer" in run.text("notes"):
        manner = "blocks"
    if manner == "blocks":
        return Partly({op.name: 0.5 for op in ops}, whole=True)
    if manner == "core":
        return Partly({op.name: 1.0 for op in ops if op.name in part.written.core})
    products = [op.name for op in ops if op.name in part.written.products]
    cached = frozenset(products[::2]).union(
        op.name for op in ops if "attention.default" in op.target
    )
    shares = {op.name: float(op.name not in cached) for op in ops}
    dropped = _unread(part.written.graph, ops, cached) if traits.compiled else frozenset[str]()
    return Partly(shares, cached=cached, dropped=dropped)


def _unread(graph: Graph, ops: Sequence[Op], cached: frozenset[str]) -> frozenset[str]:
    """Of the cached ops of a block, those whose outputs no backward kernel reads, and no op that
    runs again for one.

    Args:
        graph: Of the model.
        ops: Of the block, in order.
        cached: Of them, those that do not run again.
    """
    read: set[str] = set()
    for op in reversed(ops):
        again = op.name not in cached and bool(read.intersection(op.outputs))
        values = [graph.values[n] for n in op.inputs]
        metas = tuple(v.meta for v in values)
        made = tuple(graph.values[n].meta for n in op.outputs)
        kept = saved_by(op, metas, made, tuple(v.requires_grad for v in values))
        slots = range(len(op.inputs)) if again else kept.inputs
        read.update(op.inputs[i] for i in slots)
        read.update(op.outputs[i] for i in kept.outputs)
    return frozenset(op.name for op in ops if op.name in cached and not read & set(op.outputs))


def _stage_layers(part: _Part, degrees: Degrees, traits: Runtime) -> tuple[int, ...] | None:
    """Blocks per stage as frameworks cut them: evenly, the ends with fewer where it does not come
    out.

    Raises:
        NotExpressedError: There are more stages than blocks.
    """
    stages = degrees.pp * (degrees.chunks if degrees.pp > 1 else 1)
    if stages == 1 or not (traits.even_stages or degrees.chunks > 1):
        return None
    blocks = part.written.num_blocks
    if blocks + 2 < stages:
        raise NotExpressedError(f"{blocks} blocks cannot fill {stages} stages")
    if degrees.chunks > 1 and degrees.num_microbatches % degrees.pp:
        raise NotExpressedError(
            f"{degrees.num_microbatches} microbatches do not divide by {degrees.pp} stages, which "
            "an interleaved schedule needs"
        )
    each, left = divmod(blocks, stages)
    counts = [each] * stages
    if left:
        # embedding and loss count as a block: the ends are the last to get one more
        order = [*range(1, stages - 1), 0, stages - 1]
        if traits.even_stages == "last":
            order = [*reversed(range(stages))]
        for stage in order[:left]:
            counts[stage] += 1
    short = part.space.layers.layers
    first = next(i for i, x in enumerate(short) if x.is_block)
    behind = len(short) - first - sum(x.is_block for x in short)
    counts[0] += first
    counts[-1] += behind
    return tuple(counts)


def megatron_letters(
    written: Written, part: _Part, sequence_parallel: bool
) -> dict[str, frozenset[str]]:
    """Op -> the one letter that Megatron's layout splits it by on tensor parallel ranks.

    Inside attention, feed-forward and loss the dims that the writer marked; elsewhere tokens, where
    the framework can, or none.

    Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., 2022.
    """
    found: dict[str, frozenset[str]] = {}
    for op in part.folded.ops:
        rule = part.rules[op.name]
        wanted: tuple[int, int] | None = None
        for k, name in enumerate(op.outputs):
            if name in written.split_dims:
                wanted = (len(op.inputs) + k, written.split_dims[name])
                break
        else:
            for k, name in enumerate(op.inputs):
                if name in written.split_dims:
                    wanted = (k, written.split_dims[name])
                    break
        if wanted is None and sequence_parallel and written.graph.values[op.outputs[0]].meta.shape:
            wanted = (len(op.inputs), 1)
        letters = frozenset(
            letter
            for letter, places in rule.places.items()
            if wanted is not None
            for tensor, dim, _, left, _ in places
            if (tensor, dim) == wanted and left == 1
        )
        found[op.name] = letters
    return found
