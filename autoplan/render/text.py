# SPDX-License-Identifier: Apache-2.0
"""A plan as text: the page of `autoplan show`.

In comes a Plan, out goes plain ASCII, readable at 80 columns and without colour. Its blocks are
public where `explain.py` shows them too. Not here: any number that the plan does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoplan.errors import PlanError
from autoplan.plan import ParameterPlan, Plan, StagePlan
from autoplan.plan_estimates import Alternative, Conversion, MemoryEstimate
from autoplan.render.layout import (
    WIDTH,
    Fold,
    fold_labels,
    fold_names,
    format_dtype,
    format_flow,
    format_mesh,
    format_shape,
    format_table,
    join_blocks,
    natural_key,
    number_ranges,
    wrap_lines,
)
from autoplan.units import format_bytes, format_count, format_seconds

MAX_CONVERSIONS = 10  # the dearest ones; `all` shows the rest
MEMORY_TERMS = ("parameters", "gradients", "optimizer_state", "activations", "transient")


def render_text(
    plan: Plan, *, stage: int | None = None, all: bool = False, width: int | None = None
) -> str:
    """The plan as a page.

    Args:
        plan: The plan to draw.
        stage: Only what concerns this stage, in more detail.
        all: Nothing folded, nothing left out; the layouts of every op too.
        width: Columns, 80 unless told; names are never cut, so a long one may stand out.

    Raises:
        PlanError: There is no such stage.
    """
    columns = width or WIDTH
    if stage is not None:
        return join_blocks([_header(plan), *stage_blocks(plan, stage, all, columns)])
    blocks = [_header(plan), _stage_table(plan, columns)]
    blocks += parameter_blocks(plan, plan.parameters, all, columns)
    blocks += [conversion_block(plan.conversions, all, columns)]
    blocks += [_memory_block(plan, plan.stages[plan.estimate.peak_stage])]
    blocks += [_alternatives_block(plan, columns), _notes(plan, columns)]
    if all:
        blocks += [_buffer_block(plan, columns), _op_block(plan, columns)]
    return join_blocks(blocks)


# ---- blocks of the page ----


def _header(plan: Plan) -> str:
    model, cluster, estimate, schedule = plan.model, plan.cluster, plan.estimate, plan.schedule
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    microbatches = f"{schedule.num_microbatches} microbatch" + "es" * (
        schedule.num_microbatches != 1
    )
    layout = f"dp={plan.layout.dp} tp={plan.layout.tp}"
    settings = [plan.settings.mode, f"batch {model.batch_size}"]
    if plan.settings.mode == "train":
        settings.append(plan.settings.optimizer)
    settings.append(plan.settings.precision or "the model's own dtypes")
    split = (
        f"compute {_ms(estimate.compute_s)}, communication {_ms(estimate.communication_s)}, "
        f"bubble {_ms(estimate.bubble_s)}, optimizer {_ms(estimate.optimizer_s)}"
    )
    parameters = f"{format_count(model.num_parameters)} parameters"
    if model.num_trainable_parameters != model.num_parameters:
        parameters += f" ({format_count(model.num_trainable_parameters)} trainable)"
    sources = sorted(estimate.sources.items(), key=lambda item: (-item[1], item[0]))
    numbers = ", ".join(f"{share:.0%} {source}" for source, share in sources if share > 0)
    peak = f"{format_bytes(estimate.peak_memory_bytes)} of {format_bytes(cluster.memory_bytes)}"
    lines = [
        f"{model.name} on {cluster.name}: {stages}, {layout}, {schedule.name}, {microbatches}",
        f"{', '.join(settings)}; {parameters}",
        f"step {format_seconds(estimate.step_time_s)} ({split} ms)",
        f"peak {peak} on stage {estimate.peak_stage}   MFU {estimate.mfu:.1%}",
    ]
    return "\n".join([*lines, f"numbers, by share of time: {numbers}"] if numbers else lines)


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.3g}" if abs(time_s) < 1.0 else f"{time_s * 1e3:.0f}"


def _busy_s(plan: Plan, stage: StagePlan) -> float:
    estimate = stage.estimate
    passes = estimate.forward_s + estimate.backward_s
    return plan.schedule.num_microbatches * passes + estimate.step_s


def _stage_table(plan: Plan, width: int) -> str:
    rows = [("stage", "devices", "mesh", "busy", "peak", "recompute", "layers")]
    for stage in plan.stages:
        step = plan.estimate.step_time_s
        rows.append(
            (
                str(stage.index),
                number_ranges(stage.ranks),
                format_mesh(stage),
                f"{_busy_s(plan, stage) / step:.1%}" if step else "-",
                format_bytes(stage.estimate.memory.total),
                _recompute(stage),
                fold_labels(stage.layers),
            )
        )
    return format_table(rows, width)


def _recompute(stage: StagePlan) -> str:
    count = len(stage.recompute)
    if count in (0, len(stage.layers)):
        return "all" if count else "none"
    return f"{count} of {len(stage.layers)}"


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


def _memory_block(plan: Plan, stage: StagePlan) -> str:
    memory: MemoryEstimate = stage.estimate.memory
    capacity = plan.cluster.memory_bytes
    terms = [(term.replace("_", " "), getattr(memory, term)) for term in MEMORY_TERMS]
    terms += [("total", memory.total), ("reserve", memory.reserve)]
    terms += [("free", capacity - memory.total - memory.reserve), ("device", capacity)]
    values = [format_bytes(value) for _, value in terms]
    size = max(map(len, values))
    lines = [f"memory per device of stage {stage.index}"]
    if stage.index == plan.estimate.peak_stage and len(plan.stages) > 1:
        lines[0] += ", the fullest"
    lines += [f"  {term:<17}{value:>{size}}" for (term, _), value in zip(terms, values)]
    return "\n".join(lines)


def alternative_name(a: Alternative) -> str:
    """A layout in one line: "dp=2 tp=4 pp=1 1f1b:8 recompute"."""
    parts = [f"dp={a.dp} tp={a.tp} pp={a.pp}"]
    parts += [f"zero={a.zero}"] if a.zero else []
    parts += [f"{a.schedule}:{a.num_microbatches}"] + (["recompute"] if a.recompute else [])
    return " ".join(parts)


def _alternatives_block(plan: Plan, width: int) -> str:
    search = plan.search
    proof = "proven best" if search.optimal else f"proven within {search.gap:.1%} of the best"
    tried = f"{search.num_candidates} layouts tried, {search.num_rejected} refused, {proof}"
    if not plan.alternatives:
        return f"alternatives: none; {tried}"
    rows = [("alternatives", "step", "peak")]
    for a in plan.alternatives:
        step = "-" if a.step_time_s is None else format_seconds(a.step_time_s)
        peak = "-" if a.peak_memory_bytes is None else format_bytes(a.peak_memory_bytes)
        rows.append(("  " + alternative_name(a), step, peak))
    lines = format_table(rows, width).splitlines()
    body = lines[:1]
    for line, a in zip(lines[1:], plan.alternatives):
        body += [line, *(f"    {more}" for more in wrap_lines(a.reason, width - 4))]
    return "\n".join([*body, f"  {tried}"])


def _notes(plan: Plan, width: int) -> str:
    """What a reader must know beside the numbers: shared tensors, idle devices, whole ops."""
    notes = [f"one tensor: {', '.join(group)}" for group in plan.shared]
    if plan.search.idle_devices:
        notes.append(f"{plan.search.idle_devices} devices idle: {plan.search.idle_reason}")
    if plan.unruled_ops:
        names = ", ".join(plan.unruled_ops)
        notes.append(f"kept whole on every device, having no sharding rule: {names}")
    if plan.settings.pins:
        pins = ", ".join(f"{name}={value}" for name, value in sorted(plan.settings.pins.items()))
        notes.append(f"pinned: {pins}")
    return "\n".join(format_table([("-", note)], width).replace("-  ", "- ", 1) for note in notes)


def _buffer_block(plan: Plan, width: int) -> str:
    if not plan.buffers:
        return ""
    rows = [("buffers", "shape", "dtype", "stages")]
    for name in sorted(plan.buffers, key=natural_key):
        b = plan.buffers[name]
        rows.append(
            ("  " + name, format_shape(b.shape), format_dtype(b.dtype), number_ranges(b.stages))
        )
    return format_table(rows, width)


def _op_block(plan: Plan, width: int) -> str:
    if not plan.op_strategies:
        return ""
    rows = [("ops", "inputs -> outputs")]
    for name in sorted(plan.op_strategies, key=natural_key):
        strategy = plan.strategies[plan.op_strategies[name]]
        rows.append(("  " + name, format_flow(strategy.inputs, strategy.outputs)))
    return format_table(rows, width)


# ---- one stage ----


def stage_blocks(plan: Plan, index: int, all: bool, width: int) -> list[str]:
    """What concerns one stage, in more detail than the page.

    Raises:
        PlanError: There is no such stage.
    """
    if not 0 <= index < len(plan.stages):
        last = len(plan.stages) - 1
        raise PlanError(
            f"there is no stage {index}: this plan has stages 0 to {last}. Name one of those."
        )
    stage = plan.stages[index]
    e = stage.estimate
    rows = [
        ("devices", f"{number_ranges(stage.ranks)} ({format_mesh(stage)})"),
        ("layers", fold_labels(stage.layers)),
        ("ops", f"{stage.num_ops}, {stage.first_op} to {stage.last_op}"),
        ("recompute", fold_labels(stage.recompute) or "none"),
        (
            "time",
            f"forward {format_seconds(e.forward_s)}, backward {format_seconds(e.backward_s)}, "
            f"of which communication {format_seconds(e.communication_s)}, "
            f"send {format_seconds(e.send_s)}: per microbatch; "
            f"{format_seconds(e.step_s)} once a step",
        ),
    ]
    rows += [
        (
            "receives",
            f"{t.name} {format_dtype(t.dtype)} {format_shape(t.shape)} {t.layout} "
            f"from stage {t.from_stage}, {format_bytes(t.size_bytes)} per microbatch and device",
        )
        for t in stage.receives
    ]
    parameters = {n: p for n, p in plan.parameters.items() if index in p.stages}
    conversions = [c for c in plan.conversions if any(touches(c, label) for label in stage.layers)]
    blocks = [f"stage {index}\n" + format_table(rows, width, "  "), _memory_block(plan, stage)]
    blocks += parameter_blocks(plan, parameters, all, width)
    return [*blocks, conversion_block(conversions, all, width)]


def is_inside(name: str, prefix: str) -> bool:
    """Whether a dotted name is the prefix or below it."""
    return bool(prefix) and (name == prefix or name.startswith(prefix + "."))


def touches(conversion: Conversion, name: str) -> bool:
    """Whether a conversion is of this value or inside this module; one that stands for several
    equal ones does so for the same place in every block."""
    places = (conversion.value, conversion.module_path)
    if conversion.count > 1:
        return any(is_inside(_unnumbered(place), _unnumbered(name)) for place in places)
    return any(is_inside(place, name) for place in places)


def _unnumbered(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
