# SPDX-License-Identifier: Apache-2.0
"""What a user decides beforehand: `Pins`, and whether the placements among them are possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from autoplan.errors import InfeasibleError
from autoplan.placements import Partial, Shard, parse_spec

if TYPE_CHECKING:
    from autoplan.graph import Graph
    from autoplan.solver.pins import Pinned


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What the user decides; everything left None is searched.

    Attributes:
        tp, pp, dp: Degrees: ranks that split an activation by anything but the batch, pipeline
            stages, ranks that split the batch.
        zero: 0 to 3, for every parameter that can be split so.
        num_microbatches: Equal parts of the global batch, one after the other.
        schedule: "gpipe" or "1f1b".
        recompute: Recompute every repeated block, or none.
        stage_layers: Layers of each stage.
        placements: Parameter name pattern -> spec over (dp, tp), as
            {"model.layers.*.up_proj.weight": "RS(0)"}.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    zero: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    recompute: bool | None = None
    stage_layers: tuple[int, ...] | None = None
    placements: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The pins that are set, as plain data."""
        found: dict[str, Any] = {}
        for name in ("tp", "pp", "dp", "zero", "num_microbatches", "schedule", "recompute"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.stage_layers is not None:
            found["stage_layers"] = list(self.stage_layers)
        if self.placements:
            found["placements"] = dict(sorted(self.placements.items()))
        return found


def pinned_placements(graph: Graph, pins: Pins, num_devices: int) -> tuple[tuple[str, str], ...]:
    """The pinned placements by the graph's own names: a tied parameter has one, whichever of its
    names was pinned.

    Raises:
        InfeasibleError: All that is wrong at once: a pattern names no parameter, names of one
            parameter are pinned differently, or a dim does not divide by a pinned degree.
    """
    names = {n: group[0] for group in graph.shared for n in group}
    names = {
        **{v.name: v.name for v in graph.of_kind("parameter")},
        **{n: f for n, f in names.items() if graph.values[f].kind == "parameter"},
    }
    found: dict[str, str] = {}
    aliases: dict[str, str] = {}
    wrong: list[str] = []
    for pattern, spec in sorted(pins.placements.items()):
        matched = [n for n in names if fnmatchcase(n, pattern)]
        if not matched:
            near = get_close_matches(pattern, names, 1)
            wrong.append(
                f"placements has {pattern!r}, which names no parameter of {graph.name}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        for name in matched:
            first = names[name]
            if name != first:
                aliases[first] = spec
            if (name != first or first in aliases) and found.get(first, spec) != spec:
                wrong.append(
                    f"{name} and {first} are one tensor and cannot be placed "
                    f"as {spec} and as {found[first]}"
                )
            found[first] = spec
    for name, spec in found.items():
        wrong += _spec_problems(name, graph.values[name].meta.shape, spec, pins, num_devices)
    if wrong:
        raise InfeasibleError(
            f"the pinned placements are not possible: {'; '.join(dict.fromkeys(wrong))}."
        )
    return (*sorted(aliases.items()), *sorted(pins.placements.items()))


def _spec_problems(
    name: str, shape: tuple[int, ...], text: str, pins: Pins, num_devices: int
) -> Iterator[str]:
    """What keeps a parameter of this shape from being placed so, with what is possible."""
    try:
        spec = parse_spec(text)
    except ValueError as error:
        yield f"{name}: {error}"
        return
    if len(spec) != 2 or any(isinstance(p, Partial) for p in spec):
        yield (
            f"{name}: {text!r} is not a placement over (dp, tp); "
            f"write one of R, S(dim) for each, as in 'RS(0)'"
        )
        return
    for axis, degree, placement in zip(("dp", "tp"), (pins.dp, pins.tp), spec):
        if not isinstance(placement, Shard):
            continue
        if placement.dim >= len(shape):
            yield f"{name} of shape {shape} has no dim {placement.dim}, which {text} splits"
        elif degree is not None and shape[placement.dim] % degree:
            size = shape[placement.dim]
            valid = ", ".join(str(d) for d in range(1, num_devices + 1) if size % d == 0)
            others = [f"dim {d} ({s})" for d, s in enumerate(shape) if s % degree == 0]
            instead = (
                f"leave it replicated ('RR'){' or split ' + ' or '.join(others) if others else ''}"
            )
            yield (
                f"{name}: dim {placement.dim} has {size} elements, which {axis}={degree} "
                f"does not divide (valid {axis}: {valid}); {instead}"
            )


def pinned(pins: Pins, placements: tuple[tuple[str, str], ...]) -> Pinned:
    """The pins as the search takes them, with the placements under the graph's own names."""
    from autoplan.solver.pins import Pinned

    return Pinned(
        pins.tp,
        pins.pp,
        pins.dp,
        pins.zero,
        pins.num_microbatches,
        pins.schedule,
        pins.recompute,
        tuple(pins.stage_layers) if pins.stage_layers is not None else None,
        placements,
    )
