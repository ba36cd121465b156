# SPDX-License-Identifier: Apache-2.0
"""What a finished search says of the layouts that lost: why nothing fits, what came next and why it
is slower, why devices stand idle.

Every sentence is made of numbers that the search has priced or bounded already, but for the number
of devices that would do, which is searched for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoplan.cluster import Cluster
from autoplan.costs.storage import PinnedPlacementError
from autoplan.errors import InfeasibleError
from autoplan.plan_estimates import Alternative
from autoplan.solver.candidate import Candidate, Priced
from autoplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autoplan.solver.search import Search

MOST_DOUBLINGS = 5  # of the cluster, to find one that is enough
MOST_DEVICES = 4096
ENOUGH_S = 10.0  # for each such cluster


def refusal(search: Search) -> InfeasibleError:
    """Why nothing fits: the layout that needs least, what dominates it, and a number of devices
    that works.
    """
    cluster = search.cluster
    reasons = tuple((str(c), r) for c, r in search.rejected.items())
    needy = [(e.required_bytes, c, e) for c, e in search.infeasible if e.required_bytes is not None]
    if not needy:
        text = next(
            iter(search.rejected.values()),
            "no layout divides the batch, the heads and the devices as pinned",
        )
        return InfeasibleError(f"no plan for {cluster.name}: {text}.", candidates=reasons)
    least, candidate, error = min(needy, key=lambda x: (x[0], x[1]))
    more = _enough_devices(search)
    advice = (
        f"{more} devices of the same kind are enough."
        if more
        else "Use more devices, smaller inputs or recomputation."
    )
    return InfeasibleError(
        f"no plan fits {cluster.num_devices} x {cluster.device.name}: the least any layout needs "
        f"is {format_bytes(least)} on each device ({candidate}), "
        f"{format_bytes(search.limit_bytes)} are available. "
        f"Largest term: {_largest_term(search, candidate)}. {advice}",
        stage=error.stage,
        required_bytes=least,
        available_bytes=search.limit_bytes,
        candidates=reasons,
    )


def _largest_term(search: Search, candidate: Candidate) -> str:
    """The largest term of the average stage's least memory, with its bytes."""
    solver = search.solver(candidate)
    tables, count = solver.tables, solver.folded.count
    terms = {
        "parameters": "parameter_bytes",
        "gradients": "gradient_bytes",
        "optimizer state": "state_bytes",
    }
    least = {
        n: min(range(len(t.strategies)), key=t.held_bytes) for n, t in tables.parameters.items()
    }
    sums = {
        word: sum(count[n] * getattr(t, key)[least[n]] for n, t in tables.parameters.items())
        / candidate.pp
        for word, key in terms.items()
    }
    saved = sum(count[n] * min(t.saved_bytes) for n, t in tables.ops.items()) / candidate.pp
    sums["activations"] = 0.0 if candidate.recompute else saved * solver.in_flight
    word = max(sums, key=lambda k: sums[k])
    return f"{word} {format_bytes(sums[word])}"


def _enough_devices(search: Search) -> int | None:
    """The smallest larger cluster of this kind (doubling) on which a plan was found."""
    if None not in (search.pinned.tp, search.pinned.pp, search.pinned.dp):
        return None
    bigger = search.cluster
    for _ in range(MOST_DOUBLINGS):
        bigger = _doubled(bigger)
        if bigger.num_devices > MOST_DEVICES:
            return None
        other = search.like(cluster=bigger, time_limit_s=ENOUGH_S)
        for candidate in sorted(
            other.candidates(bigger.num_devices),
            key=lambda c: (-c.num_microbatches, not c.recompute),
        ):
            other.price(candidate)
            if other.best is not None:
                return bigger.num_devices
    return None


def _doubled(cluster: Cluster) -> Cluster:
    """Twice the hosts, or twice the devices of a host that has no network."""
    networked = cluster.inter_host is not None
    return replace(
        cluster,
        num_hosts=cluster.num_hosts * 2 if networked else 1,
        devices_per_host=cluster.devices_per_host * (1 if networked else 2),
        rank_hosts=None,
        fast_pairs=None,
        pair_link=None,
    )


def alternatives(search: Search, top: int) -> tuple[Alternative, ...]:
    """The best of each other layout with the reason it lost, then those that do not fit.

    Args:
        search: One that has found a plan.
        top: How many slower layouts to keep; of those that do not fit, twice as many.
    """
    best = search.best
    assert best is not None, "a search that found nothing has no alternatives"
    seen = {_degrees(best.candidate)}
    found: list[Alternative] = []
    for candidate, priced in sorted(
        search.priced.items(), key=lambda item: (item[1].step_s, item[0])
    ):
        key = _degrees(candidate)
        if key not in seen and len(found) < top:
            seen.add(key)
            found.append(_alternative(candidate, priced, _why_slower(priced, best)))
    rest: list[Alternative] = []
    for candidate, reason in sorted(
        search.rejected.items(), key=lambda item: (-item[0].num_devices, item[0])
    ):
        key = _degrees(candidate)
        if key not in seen:
            seen.add(key)
            rest.append(_alternative(candidate, None, _why_not(search, candidate, reason)))
        if len(rest) == 2 * top:
            break
    return tuple(found + rest)


def _why_not(search: Search, candidate: Candidate, reason: str) -> str:
    """The stronger reason: a layout that is too slow even by its bound may not fit either."""
    try:
        refused = search.solver(candidate).hopeless()
    except PinnedPlacementError:
        return reason
    return str(refused) if refused is not None else reason


def _degrees(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.pp, candidate.dp, candidate.tp


def _alternative(candidate: Candidate, priced: Priced | None, reason: str) -> Alternative:
    zero = max((s.zero for s in priced.parameters.values()), default=0) if priced else 0
    terms = priced.terms if priced else {}
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
        compute_s=terms.get("compute"),
        communication_s=terms.get("communication"),
        bubble_s=terms.get("bubble"),
        optimizer_s=terms.get("optimizer"),
    )


def _why_slower(loser: Priced, best: Priced) -> str:
    mine, theirs = loser.terms, best.terms
    word = max(mine, key=lambda k: mine[k] - theirs[k])
    factor = loser.step_s / best.step_s
    return (
        f"{factor:.2f} x the time: {word} {format_seconds(mine[word])} "
        f"against {format_seconds(theirs[word])}"
    )


def idle_reason(search: Search, used: int) -> str:
    """Why the best plan uses only `used` of the cluster's devices."""
    assert search.best is not None, "a plan was found"
    larger = [p for c, p in search.priced.items() if c.num_devices > used]
    if larger:
        best = min(larger, key=lambda p: p.rank)
        return (
            f"on {best.candidate.num_devices} devices a step takes {format_seconds(best.step_s)}, "
            f"on {used} {format_seconds(search.best.step_s)}"
        )
    if any(c.num_devices > used for c in search.rejected):
        return f"no layout on more than {used} devices fits or is faster"
    return f"no layout on more than {used} devices divides the batch, the heads and the layers"
