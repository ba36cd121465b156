# SPDX-License-Identifier: Apache-2.0
"""Blocks of text that several pages share: parameters, ops, conversions, traffic.

In come parts of a Plan, out goes plain ASCII. What repeats is folded, the dearest comes first. Not
here: which page shows what (`text.py`, `explain.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoplan.plan import ParameterPlan, Plan, StagePlan, Strategy
from autoplan.plan_estimates import Conversion, OpEstimate, Traffic
from autoplan.render.layout import (
    Fold,
    fold_names,
    format_dtype,
    format_flow,
    format_shape,
    format_table,
    natural_key,
    number_ranges,
    wrap_lines,
)
from autoplan.units import format_bytes, format_seconds

MAX_CONVERSIONS = 10  # the dearest ones; `all` shows the rest
MAX_OPS = 8


def _parameter_key(parameter: ParameterPlan) -> tuple[str, ...]:
    flags = ([f"zero {parameter.zero}"] if parameter.zero else []) + (
        [] if parameter.trainable else ["frozen"]
    )
    shape, dtype = format_shape(parameter.shape), format_dtype(parameter.dtype)
    return shape, dtype, parameter.spec, parameter.used, " ".join(flags)


def parameter_blocks(
    plan: Plan, parameters: dict[str, ParameterPlan], all: bool, width: int
) -> list[str]:
    """One block per class of equal modules, in the order of their stages."""
    if not parameters:
        return []
    keys = {name: _parameter_key(p) for name, p in parameters.items()}
    if all:
        folds = [Fold(name, (name,), keys[name]) for name in sorted(keys, key=natural_key)]
    else:
        folds = fold_names(keys.items())

    def stages(fold: Fold[tuple[str, ...]]) -> tuple[int, ...]:
        return tuple(sorted({s for name in fold.names for s in parameters[name].stages}))

    folds.sort(key=lambda fold: stages(fold)[:1])
    blocks: dict[tuple[str, tuple[int, ...]], list[tuple[str, ...]]] = {}
    for fold in folds:
        prefix = re.match(r"(.*?\{[^}]*\})\.", fold.pattern)
        heading = prefix[1] if prefix else ""
        name = fold.pattern.removeprefix(heading + ".") if heading else fold.pattern
        blocks.setdefault((heading, stages(fold)), []).append((name, *fold.first))
    title = ("parameters", "shape", "dtype", "stored", "used", "")
    return [_parameter_table(title, blocks, width)]


def _parameter_table(
    title: tuple[str, ...],
    blocks: dict[tuple[str, tuple[int, ...]], list[tuple[str, ...]]],
    width: int,
) -> str:
    """The blocks as one table; a name too long for its column stands on a line of its own."""
    rows = [title, *(row for block in blocks.values() for row in block)]
    sizes = [max(len(row[i]) for row in rows) for i in range(1, len(title))]
    room = max(width - sum(sizes) - 2 * len(sizes) - 2, 16)
    size = min(max(len(row[0]) + 4 for row in rows), room)

    def line(row: tuple[str, ...], indent: str) -> list[str]:
        cells = [cell.ljust(n) for cell, n in zip(row[1:], sizes)]
        name = indent + row[0]
        if len(name) <= size:
            return ["  ".join([name.ljust(size), *cells]).rstrip()]
        return [name, "  ".join([" " * size, *cells]).rstrip()]

    lines = line(title, "")
    for (heading, stages), block in blocks.items():
        where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {number_ranges(stages)}"
        lines.append(f"  {heading or 'once'} ({where if stages else 'unused'})")
        for row in block:
            lines += line(row, "    ")
    return "\n".join(lines)


def op_block(plan: Plan, ops: Sequence[OpEstimate], all: bool, width: int) -> str:
    """The distinct ops, dearest first: where, what each costs in a microbatch, its layouts."""
    ops = [op for op in ops if op.forward_s or op.backward_s or op.communication_s]
    if not ops:
        return ""

    def seconds(op: OpEstimate) -> float:
        return op.count * (op.forward_s + op.backward_s + op.communication_s)

    ordered = sorted(ops, key=lambda op: -seconds(op))
    shown = ordered if all else ordered[:MAX_OPS]
    rows = [("ops (per microbatch, dearest first)", "forward", "backward", "from")]
    flows = []
    for op in shown:
        name = f"  {op.module_path or op.name}"
        forward, backward = format_seconds(op.forward_s), format_seconds(op.backward_s)
        rows.append((name, forward, backward, op.source or "-"))
        kind = op.kind.removeprefix("aten.").removeprefix("autoplan.")
        index = plan.op_strategies.get(op.name)
        flow = "" if index is None else _flow(plan.strategies[index])
        own = (
            f", own collectives {format_seconds(op.communication_s)}" if op.communication_s else ""
        )
        flows.append(f"{op.count} x {kind} {flow}{own}")
    lines = format_table(rows, width).splitlines()
    body = lines[:1]
    for line, flow in zip(lines[1:], flows):
        body += [line, *(f"    {more}" for more in wrap_lines(flow, width - 4))]
    if len(ordered) > len(shown):
        rest = format_seconds(sum(map(seconds, ordered[len(shown) :])))
        body.append(f"  and {len(ordered) - len(shown)} more, {rest}: show --all")
    return "\n".join(body)


def _flow(strategy: Strategy) -> str:
    return format_flow(strategy.inputs, strategy.outputs)


def _conversion_key(conversion: Conversion) -> tuple[object, ...]:
    c = conversion
    return c.source, c.target, c.forward, c.backward, c.size_bytes, c.time_s, c.count


def conversion_block(conversions: Sequence[Conversion], all: bool, width: int) -> str:
    """The collectives, dearest first: where, from which layout to which, what runs in each pass."""
    if not conversions:
        return ""
    named = [(c.module_path or c.value, _conversion_key(c)) for c in conversions]
    examples = {key: c for c, (_, key) in zip(conversions, named)}
    distinct: dict[tuple[str, tuple[object, ...]], int] = {}
    for item in named:
        distinct[item] = distinct.get(item, 0) + 1
    folds = fold_names((name, (key, number)) for (name, key), number in distinct.items())
    rows = []
    for fold in folds:
        key, number = fold.first
        conversion = examples[key]
        rows.append((fold.pattern, conversion, conversion.count * number * len(fold.names)))
    rows.sort(key=lambda row: (-row[1].time_s * row[2], natural_key(row[0])))
    shown = rows if all else rows[:MAX_CONVERSIONS]
    lines = ["conversions (per microbatch, dearest first)"]
    for name, c, count in shown:
        price = f"{count} x {format_seconds(c.time_s)}"
        flow = f"{c.source} -> {c.target}"
        fits = len(name) + len(flow) + 5 <= width
        lines += [f"  {name}   {flow}"] if fits else [f"  {name}", f"    {flow}"]
        passes = f"forward {', '.join(c.forward) or '-'}; backward {', '.join(c.backward) or '-'}"
        lines.append(format_table([(price, format_bytes(c.size_bytes), passes)], width, "    "))
    if len(rows) > len(shown):
        rest = sum(c.time_s * count for _, c, count in rows[len(shown) :])
        lines.append(f"  and {len(rows) - len(shown)} more, {format_seconds(rest)}: show --all")
    return "\n".join(lines)


def traffic_block(stages: Sequence[StagePlan], width: int) -> str:
    """What one device sends in a step, per axis and purpose; equal stages once."""
    groups: dict[tuple[Traffic, ...], list[int]] = {}
    for stage in stages:
        sent = tuple(t for t in stage.traffic if t.sent_bytes)
        if sent:
            groups.setdefault(sent, []).append(stage.index)
    if not groups:
        return ""
    rows = [("sent by one device in a step", "axis", "for", "bytes", "time")]
    for traffic, indices in groups.items():
        name = f"  stage{'s' if len(indices) > 1 else ''} {number_ranges(indices)}"
        for t in sorted(traffic, key=lambda t: -t.time_s):
            cells = (t.axis, t.purpose, format_bytes(t.sent_bytes), format_seconds(t.time_s))
            rows.append((name, *cells))
            name = ""
    return format_table(rows, width)


def runs_in(op: OpEstimate, stage: StagePlan) -> bool:
    """Whether an op, or an equal one that it stands for, is of one of a stage's layers."""
    if op.count > 1:
        return any(is_inside(unnumbered(op.module_path), unnumbered(la)) for la in stage.layers)
    return any(is_inside(op.module_path, label) for label in stage.layers)


def is_inside(name: str, prefix: str) -> bool:
    """Whether a dotted name is the prefix or below it."""
    return bool(prefix) and (name == prefix or name.startswith(prefix + "."))


def touches(conversion: Conversion, name: str) -> bool:
    """Whether a conversion is of this value or inside this module; one that stands for several
    equal ones does so for the same place in every block."""
    places = (conversion.value, conversion.module_path)
    if conversion.count > 1:
        return any(is_inside(unnumbered(place), unnumbered(name)) for place in places)
    return any(is_inside(place, name) for place in places)


def unnumbered(name: str) -> str:
    """A dotted name with its numbers as stars: the same for the same place in every block."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
