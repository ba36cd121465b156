# SPDX-License-Identifier: Apache-2.0
"""A plan as text: the page of `autoplan show`.

In comes a Plan, out goes plain ASCII, readable at 80 columns and without colour. Its blocks are
public where `explain.py` shows them too. Not here: any number that the plan does not hold.
"""

from __future__ import annotations

from autoplan.errors import PlanError
from autoplan.plan import Plan, StagePlan
from autoplan.plan_estimates import (
    Alternative,
    MemoryEstimate,
)
from autoplan.render.blocks import (
    conversion_block,
    op_block,
    parameter_blocks,
    runs_in,
    touches,
    traffic_block,
)
from autoplan.render.compare import price_per_step
from autoplan.render.layout import (
    WIDTH,
    fold_labels,
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
        return join_blocks([_header(plan, columns), *stage_blocks(plan, stage, all, columns)])
    blocks = [_header(plan, columns), _stage_table(plan, columns)]
    blocks += parameter_blocks(plan, plan.parameters, all, columns)
    blocks += [op_block(plan, plan.op_estimates, all, columns)]
    blocks += [conversion_block(plan.conversions, all, columns)]
    blocks += [traffic_block(plan.stages, columns)]
    blocks += [_memory_block(plan, plan.stages[plan.estimate.peak_stage])]
    blocks += [_alternatives_block(plan, columns), _notes(plan, columns)]
    if all:
        blocks += [_buffer_block(plan, columns), _strategy_block(plan, columns)]
    return join_blocks(blocks)


# ---- blocks of the page ----


def _header(plan: Plan, width: int) -> str:
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
    error = "not known for this device"
    if estimate.expected_error is not None:
        error = f"{estimate.expected_error:.1%} ({estimate.expected_error_source})"
    lines = [
        f"{model.name} on {cluster.name}: {stages}, {layout}, {schedule.name}, {microbatches}",
        f"{', '.join(settings)}; {parameters}",
        f"step {format_seconds(estimate.step_time_s)} ({split} ms)",
        f"peak {peak} on stage {estimate.peak_stage}   MFU {estimate.mfu:.1%}   {_bubble(plan)}",
        f"expected error of the step {error}",
    ]
    lines += [f"numbers, by share of time: {numbers}"] if numbers else []
    return "\n".join(line for text in lines for line in wrap_lines(text, width))


def _bubble(plan: Plan) -> str:
    """The share of the step in which an average device waits, and what that costs."""
    e = plan.estimate
    share = e.bubble_s / e.step_time_s if e.step_time_s else 0.0
    text = f"bubble {share:.1%}"
    price = price_per_step(plan)
    return text if price is None else f"{text} = ${share * price:.3g} of ${price:.3g} a step"


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
    tried = f"{search.num_candidates} layouts tried, {search.num_rejected} refused, {proof(plan)}"
    if not plan.alternatives:
        return "\n".join(wrap_lines(f"alternatives: none; {tried}", width))
    rows = [("alternatives", "step", "peak")]
    for a in plan.alternatives:
        step = "-" if a.step_time_s is None else format_seconds(a.step_time_s)
        peak = "-" if a.peak_memory_bytes is None else format_bytes(a.peak_memory_bytes)
        rows.append(("  " + alternative_name(a), step, peak))
    lines = format_table(rows, width).splitlines()
    body = lines[:1]
    for line, a in zip(lines[1:], plan.alternatives):
        body += [line, *(f"    {more}" for more in wrap_lines(a.reason, width - 4))]
    return "\n".join([*body, *(f"  {line}" for line in wrap_lines(tried, width - 2))])


def proof(plan: Plan) -> str:
    """What the search proved of the plan, in words."""
    if plan.search.optimal:
        return "proven best"
    gap = f"{plan.search.gap:.1%}"
    return f"the best of those priced, its program solved within {gap} of its bound"


def plan_notes(plan: Plan) -> list[str]:
    """What a reader must know beside the numbers: shared tensors, idle devices, whole ops, pins."""
    notes = [f"one tensor: {', '.join(group)}" for group in plan.shared]
    if plan.search.idle_devices:
        notes.append(f"{plan.search.idle_devices} devices idle: {plan.search.idle_reason}")
    if plan.unruled_ops:
        names = ", ".join(plan.unruled_ops)
        notes.append(f"kept whole on every device, having no sharding rule: {names}")
    if plan.settings.pins:
        pins = ", ".join(f"{name}={value}" for name, value in sorted(plan.settings.pins.items()))
        notes.append(f"pinned: {pins}")
    return notes


def _notes(plan: Plan, width: int) -> str:
    rows = (format_table([("-", note)], width) for note in plan_notes(plan))
    return "\n".join(row.replace("-  ", "- ", 1) for row in rows)


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


def _strategy_block(plan: Plan, width: int) -> str:
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
    ops = [op for op in plan.op_estimates if runs_in(op, stage)]
    blocks += [op_block(plan, ops, all, width), conversion_block(conversions, all, width)]
    return [*blocks, traffic_block((stage,), width)]
