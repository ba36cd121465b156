# SPDX-License-Identifier: Apache-2.0
"""The answer of `autoplan explain`: what was chosen for one thing, and what its neighbours cost.

In comes a Plan and a name, out goes plain ASCII in the form of the page of `text.py`. Not here: any
number that the plan does not hold.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from autoplan.errors import PlanError
from autoplan.placements import parse_spec
from autoplan.plan import ParameterPlan, Plan
from autoplan.plan_estimates import Conversion
from autoplan.render.blocks import conversion_block, is_inside, parameter_blocks, touches
from autoplan.render.layout import (
    WIDTH,
    fold_labels,
    fold_names,
    format_dtype,
    format_flow,
    format_shape,
    format_table,
    join_blocks,
    number_ranges,
    wrap_lines,
)
from autoplan.render.text import alternative_name, stage_blocks
from autoplan.units import DTYPE_BYTES, format_bytes, format_seconds


def explain_text(plan: Plan, name: str) -> str:
    """What was chosen for one thing, and what its neighbours cost.

    Args:
        plan: The plan to ask.
        name: A parameter, a buffer, a module or its prefix, an op, or "stage 0".

    Raises:
        PlanError: The plan has nothing of that name; near matches are offered.
    """
    name = re.sub(r"\{(\d+)[^}]*\}", r"\1", name)  # a folded name from the page: its first block
    number = re.fullmatch(r"stage[ .]?(\d+)", name)
    if number:
        index = int(number[1])
        blocks = stage_blocks(plan, index, False, WIDTH)
        return join_blocks([*blocks, _other_cut(plan, index), _other_layout(plan)])
    if name in plan.parameters:
        return join_blocks(_explain_parameter(plan, name))
    if name in plan.op_strategies:
        strategy = plan.strategies[plan.op_strategies[name]]
        text = f"{name}: {format_flow(strategy.inputs, strategy.outputs)}"
        return join_blocks([text, _other_layout(plan)])
    inside = {n: p for n, p in plan.parameters.items() if is_inside(n, name)}
    buffers = {n for n in plan.buffers if is_inside(n, name)}
    conversions = [c for c in plan.conversions if touches(c, name)]
    if inside or buffers or conversions:
        return join_blocks(_explain_module(plan, name, inside, conversions))
    raise PlanError(_unknown_name(plan, name))


def _explain_parameter(plan: Plan, name: str) -> list[str]:
    p = plan.parameters[name]
    spec = parse_spec(p.spec)
    sizes = (plan.layout.dp, plan.layout.tp)
    axes = sizes if len(spec) == len(sizes) else (plan.layout.dp * plan.layout.tp,)
    whole = DTYPE_BYTES.get(p.dtype, 0)
    for size in p.shape:
        whole *= size
    parts = spec.num_shards(axes)
    stored = f"{p.spec} over dp={sizes[0]} tp={sizes[1]}: {format_bytes(whole / parts)} a device"
    if parts > 1:
        stored += f", 1/{parts} of {format_bytes(whole)}"
    rows = [
        (
            "tensor",
            f"{format_dtype(p.dtype)} {format_shape(p.shape)}{'' if p.trainable else ', frozen'}",
        ),
        ("stored", stored),
        ("used", p.used),
        ("ZeRO", f"level {p.zero}"),
        ("stages", number_ranges(p.stages) or "none: nothing uses it"),
    ]
    rows += [
        ("one tensor", "with " + ", ".join(n for n in group if n != name))
        for group in plan.shared
        if name in group
    ]
    rows += [
        ("pinned", f"{pattern} = {spec}")
        for pattern, spec in _pinned(plan).items()
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name)
    ]
    module = name.rpartition(".")[0]
    near = [c for c in plan.conversions if touches(c, name) or touches(c, module)]
    blocks = [f"{name}\n" + format_table(rows, WIDTH, "  "), _here(near)]
    return [*blocks, _other_placement(plan, name, p), _other_layout(plan)]


def _pinned(plan: Plan) -> dict[str, object]:
    placements = plan.settings.pins.get("placements")
    return placements if isinstance(placements, dict) else {}


def _here(conversions: Sequence[Conversion]) -> str:
    if not conversions:
        return "conversions here: none"
    lines = conversion_block(conversions, True, WIDTH).splitlines()[1:]
    return "\n".join(["conversions here (counts are of the whole model)", *lines])


def _explain_module(
    plan: Plan, name: str, inside: dict[str, ParameterPlan], conversions: list[Conversion]
) -> list[str]:
    where = [s for s in plan.stages if any(is_inside(name, la) for la in s.layers)]
    where = where or [s for s in plan.stages if any(is_inside(la, name) for la in s.layers)]
    stages = [s.index for s in where] or [s for p in inside.values() for s in p.stages]
    rows = [
        ("stages", number_ranges(stages) or "none"),
        ("recompute", fold_labels([la for s in where for la in s.recompute if _near(la, name)])),
    ]
    heading = f"{name}\n" + format_table([(k, v or "none") for k, v in rows], WIDTH, "  ")
    blocks = [heading, *parameter_blocks(plan, inside, False, WIDTH)]
    return [*blocks, _here(conversions), _other_placements(inside), _other_layout(plan)]


def _near(label: str, name: str) -> bool:
    return is_inside(label, name) or is_inside(name, label)


# ---- runners-up ----


def _other_placement(plan: Plan, name: str, parameter: ParameterPlan) -> str:
    """The next best layout of one parameter: what it would have cost, and when it would win."""
    other = parameter.runner_up
    if other is None:
        return "runner-up: none kept; nothing else fits, or it is among the small ones"
    zero = f", ZeRO {other.zero}" if other.zero else ""
    costs = _costs(other.step_time_s, other.compute_s, other.communication_s)
    text = (
        f"runner-up: stored {other.spec}, used {other.used}{zero}: {costs}, "
        f"{signed_bytes(other.peak_memory_bytes)} at the peak, all else chosen anew"
    )
    when = _when(
        other.step_time_s, other.compute_s, other.communication_s, other.peak_memory_bytes, plan
    )
    return "\n".join([*wrap_lines(text, WIDTH), *wrap_lines(f"it would win {when}", WIDTH)])


def _other_placements(inside: dict[str, ParameterPlan]) -> str:
    """The next best layout of each parameter of a module, the closest first; equal ones once."""
    found = {n: p.runner_up for n, p in inside.items() if p.runner_up is not None}
    folds = fold_names(found.items())
    rows = [("runners-up of its parameters", "stored", "used", "a step", "at the peak")]
    for fold in sorted(folds, key=lambda f: f.first.step_time_s):
        r = fold.first
        cells = (signed_seconds(r.step_time_s), signed_bytes(r.peak_memory_bytes))
        rows.append((f"  {fold.pattern}", r.spec, r.used, *cells))
    return format_table(rows, WIDTH) if folds else ""


def _other_cut(plan: Plan, index: int) -> str:
    """The next best cut beside a stage."""
    other = plan.stages[index].runner_up
    if other is None:
        return "runner-up: no layer can change sides here"
    here = [len(stage.layers) for stage in plan.stages]
    moved = [s for s, (a, b) in enumerate(zip(here, other.stage_layers)) if a != b]
    change = ", ".join(
        f"{other.stage_layers[s]} layers on stage {s} (not {here[s]})" for s in moved
    )
    if other.step_time_s is None or other.peak_memory_bytes is None:
        return "\n".join(wrap_lines(f"runner-up: {change}: {other.reason}", WIDTH))
    text = (
        f"runner-up: {change}: {signed_seconds(other.step_time_s)} a step, "
        f"{signed_bytes(other.peak_memory_bytes)} at the peak"
    )
    return "\n".join(wrap_lines(text, WIDTH))


def _other_layout(plan: Plan) -> str:
    """The best layout that lost, with the difference in seconds and bytes."""
    e = plan.estimate
    for a in plan.alternatives:
        if a.step_time_s is None:
            continue
        extra_s = a.step_time_s - e.step_time_s
        text = (
            f"runner-up of the whole plan: {alternative_name(a)}, {signed_seconds(extra_s)} a step"
        )
        extra = 0
        if a.peak_memory_bytes is not None:
            extra = a.peak_memory_bytes - e.peak_memory_bytes
            text += f", {signed_bytes(extra)} at the peak"
        lines = wrap_lines(f"{text}; {a.reason}", WIDTH)
        if a.compute_s is not None and a.communication_s is not None:
            compute_s = a.compute_s - e.compute_s
            communication_s = a.communication_s - e.communication_s
            when = _when(extra_s, compute_s, communication_s, extra, plan)
            lines += wrap_lines(f"it would win {when}", WIDTH)
        return "\n".join(lines)
    return "runner-up of the whole plan: none was priced"


def _costs(step_s: float, compute_s: float, communication_s: float) -> str:
    parts = {"compute": compute_s, "communication": communication_s}
    terms = ", ".join(f"{word} {signed_seconds(s)}" for word, s in parts.items() if s)
    return f"{signed_seconds(step_s)} a step" + (f" ({terms})" if terms else "")


def _when(
    step_s: float, compute_s: float, communication_s: float, peak_bytes: int, plan: Plan
) -> str:
    """What would have to change for a runner-up to win, to first order: its differences scale with
    the speed of the links, or the plan's own memory is not there.
    """
    if step_s <= 0:
        return "if ties went the other way: the two take the same time"
    own_s = step_s - communication_s  # of compute, and of waiting
    if communication_s > 0 > own_s:
        return f"if links were {communication_s / -own_s:.3g} x faster"
    if own_s > 0 > communication_s:
        return f"if links were {own_s / -communication_s:.3g} x slower"
    if peak_bytes < 0:
        peak = format_bytes(plan.estimate.peak_memory_bytes)
        return f"if a device had less for the plan than the {peak} that this one takes"
    return "under no change of links or memory alone: it is slower and needs no less memory"


def signed_seconds(seconds: float) -> str:
    """A difference in seconds for people: "+1.2 ms", "-3 us"."""
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def signed_bytes(size: int) -> str:
    """A difference in bytes for people: "+1.00 GiB"."""
    return f"{'+' if size >= 0 else '-'}{format_bytes(abs(size))}"


def _unknown_name(plan: Plan, name: str) -> str:
    modules = {n[:i] for n in plan.parameters for i, char in enumerate(n) if char == "."}
    known = [*plan.parameters, *sorted(modules), *plan.op_strategies]
    known += [f"stage {s.index}" for s in plan.stages]
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else "`autoplan show` lists the names."
    return (
        f'the plan of {plan.model.name} has nothing named "{name}", expected a parameter, module, '
        f'op or "stage N". {hint}'
    )
