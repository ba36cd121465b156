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
from autoplan.render.layout import (
    WIDTH,
    fold_labels,
    format_dtype,
    format_flow,
    format_shape,
    format_table,
    join_blocks,
    number_ranges,
    wrap_lines,
)
from autoplan.render.text import (
    alternative_name,
    conversion_block,
    is_inside,
    parameter_blocks,
    stage_blocks,
    touches,
)
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
        return join_blocks([*stage_blocks(plan, int(number[1]), False, WIDTH), _runner_up(plan)])
    if name in plan.parameters:
        return join_blocks(_explain_parameter(plan, name))
    if name in plan.op_strategies:
        strategy = plan.strategies[plan.op_strategies[name]]
        text = f"{name}: {format_flow(strategy.inputs, strategy.outputs)}"
        return join_blocks([text, _runner_up(plan)])
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
    return [*blocks, _runner_up(plan)]


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
    return [*blocks, _here(conversions), _runner_up(plan)]


def _near(label: str, name: str) -> bool:
    return is_inside(label, name) or is_inside(name, label)


def _runner_up(plan: Plan) -> str:
    """The best layout that lost, with the difference in seconds and bytes."""
    for a in plan.alternatives:
        if a.step_time_s is None:
            continue
        text = f"runner-up: {alternative_name(a)}, {_signed(a.step_time_s, plan)} a step"
        if a.peak_memory_bytes is not None:
            extra = a.peak_memory_bytes - plan.estimate.peak_memory_bytes
            text += f", {'+' if extra >= 0 else '-'}{format_bytes(abs(extra))} at the peak"
        return "\n".join(wrap_lines(f"{text}; {a.reason}", WIDTH))
    return "runner-up: none was priced"


def _signed(step_time_s: float, plan: Plan) -> str:
    extra = step_time_s - plan.estimate.step_time_s
    return f"{'+' if extra >= 0 else '-'}{format_seconds(abs(extra))}"


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
