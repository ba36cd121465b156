# SPDX-License-Identifier: Apache-2.0
"""A plan as text: the page of `autoplan show` and the answer of `autoplan explain`.

In comes a Plan, out goes plain ASCII, readable at 80 columns and without colour. What repeats is
folded: names that differ only in one number are shown once, `model.layers.{0-79}.mlp.up_proj`.
Formatted by hand: importing a table library takes longer than drawing the page.
Not here: any number that the plan does not hold.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from autoplan.errors import PlanError
from autoplan.placements import parse_spec
from autoplan.plan import (
    Alternative,
    Conversion,
    MemoryEstimate,
    ParameterPlan,
    Plan,
    StagePlan,
)
from autoplan.units import DTYPE_BYTES, format_bytes, format_count, format_seconds

WIDTH = 80
MAX_CONVERSIONS = 10  # the dearest ones; `all` shows the rest
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
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
        return _page([_header(plan), *_stage_page(plan, stage, all, columns)])
    blocks = [_header(plan), _stage_table(plan, columns)]
    blocks += _parameter_blocks(plan, plan.parameters, all, columns)
    blocks += [_conversion_block(plan.conversions, all, columns)]
    blocks += [_memory_block(plan, plan.stages[plan.estimate.peak_stage])]
    blocks += [_alternatives_block(plan, columns), _notes(plan, columns)]
    if all:
        blocks += [_buffer_block(plan, columns), _op_block(plan, columns)]
    return _page(blocks)


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
        return _page([*_stage_page(plan, int(number[1]), False, WIDTH), _runner_up(plan)])
    if name in plan.parameters:
        return _page(_explain_parameter(plan, name))
    if name in plan.op_strategies:
        strategy = plan.strategies[plan.op_strategies[name]]
        text = f"{name}: {_flow(strategy.inputs, strategy.outputs)}"
        return _page([text, _runner_up(plan)])
    inside = {n: p for n, p in plan.parameters.items() if _is_inside(n, name)}
    buffers = {n for n in plan.buffers if _is_inside(n, name)}
    conversions = [c for c in plan.conversions if _touches(c, name)]
    if inside or buffers or conversions:
        return _page(_explain_module(plan, name, inside, conversions))
    raise PlanError(_unknown_name(plan, name))


# ---- folding ----


T = TypeVar("T", bound=Hashable)
Entry = tuple[tuple[str, ...], tuple[str, ...], T]  # dotted parts, names, value


@dataclass(frozen=True, slots=True)
class _Fold(Generic[T]):
    """Items whose names differ only in numbers: one pattern for all of them, in natural order."""

    pattern: str
    names: tuple[str, ...]
    first: T


def _fold(items: Iterable[tuple[str, T]]) -> list[_Fold[T]]:
    """Merges equal items whose names differ in one dotted number, one number after the other."""
    ordered = sorted(items, key=lambda item: _natural(item[0]))
    entries: list[Entry[T]] = [(tuple(n.split(".")), (n,), value) for n, value in ordered]
    for position in range(max((len(parts) for parts, _, _ in entries), default=0)):
        groups: dict[Hashable, list[Entry[T]]] = {}
        for parts, names, value in entries:
            open_part = position < len(parts) and parts[position].isdigit()
            rest = (parts[:position], parts[position + 1 :]) if open_part else (parts, position)
            groups.setdefault((open_part, rest, value), []).append((parts, names, value))
        entries = [_merge(group, position) for group in groups.values()]
    return [_Fold(".".join(parts), names, value) for parts, names, value in entries]


def _merge(group: list[Entry[T]], position: int) -> Entry[T]:
    parts, names, value = group[0]
    if len(group) == 1:
        return parts, names, value
    numbers = _ranges(int(other[position]) for other, _, _ in group)
    merged = (*parts[:position], "{" + numbers + "}", *parts[position + 1 :])
    return merged, tuple(name for _, inner, _ in group for name in inner), value


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which layers.2 comes before layers.10."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name))


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as "0-3,7"; an even stride as "0-30 step 2"."""
    ordered = sorted(set(numbers))
    strides = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 2 and len(strides) == 1 and strides != {1}:
        return f"{ordered[0]}-{ordered[-1]} step {strides.pop()}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _fold_labels(labels: Sequence[str]) -> str:
    """Layer labels in their own order, folded: "model.embed, model.layers.{0-39}"."""
    place = {label: i for i, label in enumerate(labels)}
    folds = sorted(_fold((label, None) for label in labels), key=lambda f: place[f.names[0]])
    return ", ".join(fold.pattern for fold in folds)


# ---- layout of the page ----


def _page(blocks: Iterable[str]) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(rows: Sequence[Sequence[str]], width: int, indent: str = "") -> str:
    """Columns two spaces apart; the last one wraps at `width` under itself."""
    sizes = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    start = len(indent) + sum(sizes) + 2 * len(sizes)
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, sizes)]
        wrapped = _wrap(row[-1], max(width - start, 16))
        lines.append((indent + "  ".join([*cells, wrapped[0]])).rstrip())
        lines += [" " * start + more for more in wrapped[1:]]
    return "\n".join(lines)


def _wrap(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _flow(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    return f"{', '.join(inputs) or '-'} -> {', '.join(outputs) or '-'}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _dtype(dtype: str) -> str:
    return SHORT_DTYPES.get(dtype, dtype)


def _mesh(stage: StagePlan) -> str:
    return " ".join(f"{axis}={size}" for axis, size in stage.mesh.items())


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
                _ranges(stage.ranks),
                _mesh(stage),
                f"{_busy_s(plan, stage) / step:.1%}" if step else "-",
                format_bytes(stage.estimate.memory.total),
                _recompute(stage),
                _fold_labels(stage.layers),
            )
        )
    return _table(rows, width)


def _recompute(stage: StagePlan) -> str:
    count = len(stage.recompute)
    if count in (0, len(stage.layers)):
        return "all" if count else "none"
    return f"{count} of {len(stage.layers)}"


def _parameter_key(parameter: ParameterPlan) -> tuple[str, ...]:
    flags = ([f"zero {parameter.zero}"] if parameter.zero else []) + (
        [] if parameter.trainable else ["frozen"]
    )
    shape, dtype = _shape(parameter.shape), _dtype(parameter.dtype)
    return shape, dtype, parameter.spec, parameter.used, " ".join(flags)


def _parameter_blocks(
    plan: Plan, parameters: dict[str, ParameterPlan], all: bool, width: int
) -> list[str]:
    """One block per class of equal modules, in the order of their stages."""
    if not parameters:
        return []
    keys = {name: _parameter_key(p) for name, p in parameters.items()}
    if all:
        folds = [_Fold(name, (name,), keys[name]) for name in sorted(keys, key=_natural)]
    else:
        folds = _fold(keys.items())

    def stages(fold: _Fold[tuple[str, ...]]) -> tuple[int, ...]:
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
        where = f"stage {stages[0]}" if len(stages) == 1 else f"stages {_ranges(stages)}"
        lines.append(f"  {heading or 'once'} ({where if stages else 'unused'})")
        for row in block:
            lines += line(row, "    ")
    return "\n".join(lines)


def _conversion_key(conversion: Conversion) -> tuple[object, ...]:
    c = conversion
    return c.source, c.target, c.forward, c.backward, c.size_bytes, c.time_s, c.count


def _conversion_block(conversions: Sequence[Conversion], all: bool, width: int) -> str:
    """The collectives, dearest first: where, from which layout to which, what runs in each pass."""
    if not conversions:
        return ""
    named = [(c.module_path or c.value, _conversion_key(c)) for c in conversions]
    examples = {key: c for c, (_, key) in zip(conversions, named)}
    distinct: dict[tuple[str, tuple[object, ...]], int] = {}
    for item in named:
        distinct[item] = distinct.get(item, 0) + 1
    folds = _fold((name, (key, number)) for (name, key), number in distinct.items())
    rows = []
    for fold in folds:
        key, number = fold.first
        conversion = examples[key]
        rows.append((fold.pattern, conversion, conversion.count * number * len(fold.names)))
    rows.sort(key=lambda row: (-row[1].time_s * row[2], _natural(row[0])))
    shown = rows if all else rows[:MAX_CONVERSIONS]
    lines = ["conversions (per microbatch, dearest first)"]
    for name, c, count in shown:
        price = f"{count} x {format_seconds(c.time_s)}"
        flow = f"{c.source} -> {c.target}"
        fits = len(name) + len(flow) + 5 <= width
        lines += [f"  {name}   {flow}"] if fits else [f"  {name}", f"    {flow}"]
        passes = f"forward {', '.join(c.forward) or '-'}; backward {', '.join(c.backward) or '-'}"
        lines.append(_table([(price, format_bytes(c.size_bytes), passes)], width, "    "))
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


def _alternative_name(a: Alternative) -> str:
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
        rows.append(("  " + _alternative_name(a), step, peak))
    lines = _table(rows, width).splitlines()
    body = lines[:1]
    for line, a in zip(lines[1:], plan.alternatives):
        body += [line, *(f"    {more}" for more in _wrap(a.reason, width - 4))]
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
    return "\n".join(_table([("-", note)], width).replace("-  ", "- ", 1) for note in notes)


def _buffer_block(plan: Plan, width: int) -> str:
    if not plan.buffers:
        return ""
    rows = [("buffers", "shape", "dtype", "stages")]
    for name in sorted(plan.buffers, key=_natural):
        b = plan.buffers[name]
        rows.append(("  " + name, _shape(b.shape), _dtype(b.dtype), _ranges(b.stages)))
    return _table(rows, width)


def _op_block(plan: Plan, width: int) -> str:
    if not plan.op_strategies:
        return ""
    rows = [("ops", "inputs -> outputs")]
    for name in sorted(plan.op_strategies, key=_natural):
        strategy = plan.strategies[plan.op_strategies[name]]
        rows.append(("  " + name, _flow(strategy.inputs, strategy.outputs)))
    return _table(rows, width)


# ---- one stage, one name ----


def _stage_page(plan: Plan, index: int, all: bool, width: int) -> list[str]:
    if not 0 <= index < len(plan.stages):
        last = len(plan.stages) - 1
        raise PlanError(
            f"there is no stage {index}: this plan has stages 0 to {last}. Name one of those."
        )
    stage = plan.stages[index]
    e = stage.estimate
    rows = [
        ("devices", f"{_ranges(stage.ranks)} ({_mesh(stage)})"),
        ("layers", _fold_labels(stage.layers)),
        ("ops", f"{stage.num_ops}, {stage.first_op} to {stage.last_op}"),
        ("recompute", _fold_labels(stage.recompute) or "none"),
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
            f"{t.name} {_dtype(t.dtype)} {_shape(t.shape)} {t.layout} from stage {t.from_stage}, "
            f"{format_bytes(t.size_bytes)} per microbatch and device",
        )
        for t in stage.receives
    ]
    parameters = {n: p for n, p in plan.parameters.items() if index in p.stages}
    conversions = [c for c in plan.conversions if any(_touches(c, label) for label in stage.layers)]
    blocks = [f"stage {index}\n" + _table(rows, width, "  "), _memory_block(plan, stage)]
    blocks += _parameter_blocks(plan, parameters, all, width)
    return [*blocks, _conversion_block(conversions, all, width)]


def _is_inside(name: str, prefix: str) -> bool:
    return bool(prefix) and (name == prefix or name.startswith(prefix + "."))


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
        ("tensor", f"{_dtype(p.dtype)} {_shape(p.shape)}{'' if p.trainable else ', frozen'}"),
        ("stored", stored),
        ("used", p.used),
        ("ZeRO", f"level {p.zero}"),
        ("stages", _ranges(p.stages) or "none: nothing uses it"),
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
    near = [c for c in plan.conversions if _touches(c, name) or _touches(c, module)]
    blocks = [f"{name}\n" + _table(rows, WIDTH, "  "), _here(near)]
    return [*blocks, _runner_up(plan)]


def _touches(conversion: Conversion, name: str) -> bool:
    """Whether a conversion is of this value or inside this module; one that stands for several
    equal ones does so for the same place in every block."""
    places = (conversion.value, conversion.module_path)
    if conversion.count > 1:
        return any(_is_inside(_unnumbered(place), _unnumbered(name)) for place in places)
    return any(_is_inside(place, name) for place in places)


def _unnumbered(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _pinned(plan: Plan) -> dict[str, object]:
    placements = plan.settings.pins.get("placements")
    return placements if isinstance(placements, dict) else {}


def _here(conversions: Sequence[Conversion]) -> str:
    if not conversions:
        return "conversions here: none"
    lines = _conversion_block(conversions, True, WIDTH).splitlines()[1:]
    return "\n".join(["conversions here (counts are of the whole model)", *lines])


def _explain_module(
    plan: Plan, name: str, inside: dict[str, ParameterPlan], conversions: list[Conversion]
) -> list[str]:
    where = [s for s in plan.stages if any(_is_inside(name, la) for la in s.layers)]
    where = where or [s for s in plan.stages if any(_is_inside(la, name) for la in s.layers)]
    stages = [s.index for s in where] or [s for p in inside.values() for s in p.stages]
    rows = [
        ("stages", _ranges(stages) or "none"),
        ("recompute", _fold_labels([la for s in where for la in s.recompute if _near(la, name)])),
    ]
    heading = f"{name}\n" + _table([(k, v or "none") for k, v in rows], WIDTH, "  ")
    blocks = [heading, *_parameter_blocks(plan, inside, False, WIDTH)]
    return [*blocks, _here(conversions), _runner_up(plan)]


def _near(label: str, name: str) -> bool:
    return _is_inside(label, name) or _is_inside(name, label)


def _runner_up(plan: Plan) -> str:
    """The best layout that lost, with the difference in seconds and bytes."""
    for a in plan.alternatives:
        if a.step_time_s is None:
            continue
        text = f"runner-up: {_alternative_name(a)}, {_signed(a.step_time_s, plan)} a step"
        if a.peak_memory_bytes is not None:
            extra = a.peak_memory_bytes - plan.estimate.peak_memory_bytes
            text += f", {'+' if extra >= 0 else '-'}{format_bytes(abs(extra))} at the peak"
        return "\n".join(_wrap(f"{text}; {a.reason}", WIDTH))
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
