# SPDX-License-Identifier: Apache-2.0
"""What a plan must beat: the layouts people configure by hand, priced by the same tables.

- "data parallel": every rank the whole model, gradients reduced once per step.
- "fsdp": every parameter split over all ranks and gathered where it is used (ZeRO-3).
- "grid": the best tp x pp x dp with equal layers per stage and ZeRO-1, as Megatron-LM is
  configured.

Each may still choose microbatches and recomputation. "Better than data parallel" is then a test,
not a claim.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoplan.solver.candidate import Candidate, Priced
from autoplan.solver.pins import Pinned
from autoplan.solver.search import Search


def price_baselines(search: Search) -> dict[str, Priced | None]:
    """The best layout of each baseline for a search's model and cluster; None where none fits."""
    n = search.cluster.num_devices
    whole = Pinned(tp=1, pp=1, dp=n)
    return {
        "data parallel": _best(search, replace(whole, zero=0)),
        "fsdp": _best(search, replace(whole, zero=3)),
        "grid": _best_grid(search),
    }


def _best(search: Search, pinned: Pinned) -> Priced | None:
    other = search.like(pinned=pinned)
    for candidate in other.candidates(search.cluster.num_devices):
        other.price(candidate)
    return other.best


def _best_grid(search: Search) -> Priced | None:
    """Every degree, every microbatch count, none left out: the search's own shortcuts are not
    taken.
    """
    best: Priced | None = None
    num_layers = len(search.space.layers.layers)
    free = search.like(pinned=Pinned(zero=1))
    groups: dict[int, list[Candidate]] = {}
    for candidate in free.candidates(search.cluster.num_devices):
        if free.least_s(candidate) < (best.step_s if best else math.inf):
            groups.setdefault(candidate.pp, []).append(candidate)
    for pp, members in groups.items():
        one = search.like(pinned=Pinned(zero=1, pp=pp, stage_layers=_equal(num_layers, pp)))
        one.best = best
        for candidate in members:
            one.price(candidate)
        best = one.best
    return best


def _equal(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage as evenly as they go, the first stages taking what is left over."""
    base, more = divmod(num_layers, stages)
    return tuple(base + (s < more) for s in range(stages))
