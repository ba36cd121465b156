# SPDX-License-Identifier: Apache-2.0
"""The user's decisions, and whether any layout can keep them.

`check_pins` holds the pinned degrees against the model's heads, batch and layers and the cluster's
size before anything is priced, and refuses with everything that is wrong, the values that would
divide, and a whole layout that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoplan.errors import InfeasibleError
from autoplan.solver.candidate import Candidate

if TYPE_CHECKING:
    from autoplan.solver.space import Space

MOST_VALID_COUNTS = 24  # valid microbatch counts that a refusal lists


@dataclass(frozen=True)
class Pinned:
    """The user's decisions; None leaves them to the search."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    zero: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    recompute: bool | None = None
    stage_layers: tuple[int, ...] | None = None
    placements: tuple[tuple[str, str], ...] = ()


def check_pins(
    pinned: Pinned, space: Space, num_devices: int, best_of: Callable[[Pinned], Candidate]
) -> None:
    """Refuses pins that nothing can satisfy, with the values that can.

    Args:
        pinned: The pins.
        space: The model's heads, batch and layers.
        num_devices: Of the cluster.
        best_of: Searches under other pins; raises InfeasibleError where nothing fits.

    Raises:
        InfeasibleError: All violated rules at once.
    """
    wrong = [
        *_heads(pinned, space, num_devices),
        *_batch(pinned, space, num_devices),
        *_degrees(pinned, space, num_devices),
    ]
    if wrong:
        raise InfeasibleError(
            f"the pinned layout is not possible: {'; '.join(wrong)}. {_way_out(pinned, best_of)}"
        )


def _heads(pinned: Pinned, space: Space, num_devices: int) -> Iterator[str]:
    if pinned.tp is None:
        return
    paths: dict[int, str] = {}
    for path, count in space.head_counts.items():
        if count % pinned.tp:
            paths.setdefault(count, path)
    for count, path in paths.items():
        yield (
            f"{path or 'attention'} has {count} heads, which tp={pinned.tp} does not divide "
            f"(valid tp: {_listed(_divisors_to(count, num_devices))})"
        )


def _batch(pinned: Pinned, space: Space, num_devices: int) -> Iterator[str]:
    size, m = space.batch.size, pinned.num_microbatches
    if pinned.dp is not None and size % pinned.dp:
        yield (
            f"a batch of {size} does not divide over dp={pinned.dp} "
            f"(valid dp: {_listed(_divisors_to(size, num_devices))})"
        )
    if m is not None and size % m:
        yield (
            f"a batch of {size} does not divide into {m} microbatches "
            f"(valid counts: {_listed(_divisors_to(size, size)[:MOST_VALID_COUNTS])})"
        )
    if m is not None and m > 1 and space.batch.hindrances:
        op, reason = next(iter(space.batch.hindrances.items()))
        path = next((o.module_path for o in space.graph.ops if o.name == op), "")
        yield (
            f"the batch cannot be cut into microbatches: {reason} ({path or op}); "
            f"use num_microbatches=1"
        )


def _degrees(pinned: Pinned, space: Space, num_devices: int) -> Iterator[str]:
    num_layers = len(space.layers.layers)
    if pinned.pp is not None and pinned.pp > num_layers:
        yield f"pp={pinned.pp} stages are more than the model's {num_layers} layers, the maximum"
    degrees = (pinned.tp, pinned.pp, pinned.dp)
    product = (pinned.tp or 1) * (pinned.pp or 1) * (pinned.dp or 1)
    if product > num_devices or (None not in degrees and num_devices % product):
        yield (
            f"tp * pp * dp = {product} does not fit {num_devices} devices; "
            f"the product must divide {num_devices}"
        )


def _way_out(pinned: Pinned, best_of: Callable[[Pinned], Candidate]) -> str:
    """A complete layout that works, found by searching without the degree pins."""
    free = replace(pinned, tp=None, pp=None, dp=None, num_microbatches=None, stage_layers=None)
    try:
        best = best_of(free)
    except InfeasibleError:
        return "No other layout fits either."
    return (
        f"Possible here: tp={best.tp}, dp={best.dp}, pp={best.pp} "
        f"with {best.num_microbatches} microbatches."
    )


def _divisors_to(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
