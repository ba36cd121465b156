# SPDX-License-Identifier: Apache-2.0
"""The four panels of a drawn plan, each on one matplotlib Axes: schedule, memory, model, network.

In comes a Plan, on go shapes and words; every number is the plan's. What repeats is folded: ranks
of a stage are one lane, the microbatches in the middle of a long step are cut out (and counted),
equal blocks and equal hosts are shown once. Not here: pages and files (`drawing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from autoplan.placements import parse_layout, parse_spec
from autoplan.plan import Plan, StagePlan
from autoplan.render import colours
from autoplan.render.layout import fold_names, number_ranges
from autoplan.render.network import HostTraffic, host_traffic
from autoplan.render.steady import Cut, find_cuts, place
from autoplan.render.timeline import Box, Lane, StepTimeline, step_timeline
from autoplan.units import format_bytes, format_seconds

SMALL, TINY = 7.5, 6.0  # points
MOST_LABELS = 32  # of lanes and bars
MOST_EDGED = 240  # boxes of a lane: beyond, edges would cover them
MOST_ROWS = 22  # of the placement table
MOST_HOSTS = 6  # kinds of hosts in the tree
NUMBERED = {"forward", "backward"}


# ---- schedule ----


def draw_schedule(axes: Axes, plan: Plan) -> None:
    """Stages over time. The middle of a long step is cut out."""
    timeline = step_timeline(plan)
    cuts = find_cuts(timeline, plan.schedule.num_microbatches)
    width = place(timeline.end_s, cuts)
    for lane in timeline.lanes:
        axes.broken_barh([(0.0, width)], _row(lane.stage), color=colours.IDLE, linewidth=0)
        _draw_boxes(axes, lane, cuts)
    _number_boxes(axes, timeline, cuts, width)
    for cut in cuts:
        _draw_cut(axes, cut, cuts, len(timeline.lanes))
    _label_lanes(axes, plan.stages)
    _time_ticks(axes, timeline.end_s, cuts)
    axes.set_xlim(0.0, width)
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)
    axes.set_title(
        f"Schedule: {plan.schedule.name}, {plan.schedule.num_microbatches} microbatches, "
        f"step {format_seconds(timeline.end_s)}"
    )
    present = [a for a in colours.ACTIVITY if a in timeline.activities]
    handles = [Patch(color=colours.ACTIVITY[a], label=a) for a in [*present, "bubble"]]
    _add_legend(axes, handles)


def _row(stage: int) -> tuple[float, float]:
    return stage - 0.42, 0.84


def _draw_boxes(axes: Axes, lane: Lane, cuts: tuple[Cut, ...]) -> None:
    spans: dict[str, list[tuple[float, float]]] = {}
    for box in lane.boxes:
        if not any(cut.start_s <= box.start_s and box.end_s <= cut.end_s for cut in cuts):
            start, end = place(box.start_s, cuts), place(box.end_s, cuts)
            spans.setdefault(box.activity, []).append((start, end - start))
    edge = 0.3 if len(lane.boxes) < MOST_EDGED else 0.0
    for activity, found in spans.items():
        axes.broken_barh(
            found,
            _row(lane.stage),
            facecolor=colours.ACTIVITY[activity],
            edgecolor="w",
            linewidth=edge,
        )


def _number_boxes(axes: Axes, timeline: StepTimeline, cuts: tuple[Cut, ...], width: float) -> None:
    """Microbatch numbers, where the narrowest box leaves room for one."""
    size = axes.get_window_extent()
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes of a figure"
    inches = size.width / figure.dpi
    height = size.height / figure.dpi / len(timeline.lanes)
    for lane in timeline.lanes:
        for box in lane.boxes:
            middle = _numbered_at(box, cuts, room=TINY / 72 * width / inches)
            if middle is not None and height > TINY / 72 * 1.2:
                light = box.activity == "backward"
                axes.text(
                    middle,
                    lane.stage,
                    str(box.microbatch),
                    ha="center",
                    va="center",
                    fontsize=TINY,
                    color="w" if light else colours.INK,
                )


def _numbered_at(box: Box, cuts: tuple[Cut, ...], room: float) -> float | None:
    """Where a box's number stands, if it has one and the room for it."""
    if box.end_s - box.start_s < room or box.microbatch is None or box.activity not in NUMBERED:
        return None
    if any(cut.start_s < box.end_s and box.start_s < cut.end_s for cut in cuts):
        return None
    start, end = place(box.start_s, cuts), place(box.end_s, cuts)
    digits = len(str(box.microbatch))
    return (start + end) / 2 if end - start > room * (0.5 + 0.55 * digits) else None


def _draw_cut(axes: Axes, cut: Cut, cuts: tuple[Cut, ...], num_lanes: int) -> None:
    start, end = place(cut.start_s, cuts), place(cut.end_s, cuts)
    box = Rectangle(
        (start, -0.6), end - start, num_lanes + 0.2, facecolor="w", edgecolor="none", zorder=3
    )
    axes.add_patch(box)
    axes.text(
        (start + end) / 2,
        (num_lanes - 1) / 2,
        f"{format_seconds(cut.end_s - cut.start_s)} like this",
        rotation=90,
        ha="center",
        va="center",
        fontsize=TINY,
        color=colours.INK,
        zorder=4,
    )


def _label_lanes(axes: Axes, stages: tuple[StagePlan, ...]) -> None:
    every = -(-len(stages) // MOST_LABELS)
    shown = stages[::every]
    axes.set_yticks(
        [s.index for s in shown],
        [f"stage {s.index} (ranks {number_ranges(s.ranks)})" for s in shown],
        fontsize=SMALL if len(shown) <= 16 else TINY,
    )
    axes.tick_params(axis="y", length=0)


def _time_ticks(axes: Axes, end_s: float, cuts: tuple[Cut, ...]) -> None:
    """Ticks at the ends of what is shown, and round times between them."""
    edges = [0.0, *(t for cut in cuts for t in (cut.start_s, cut.end_s)), end_s]
    shown = place(end_s, cuts)
    times: list[float] = []
    for start, end in zip(edges[::2], edges[1::2]):
        count = max(1, round(8 * (place(end, cuts) - place(start, cuts)) / shown))
        times += [start + (end - start) * i / count for i in range(count)]
    times.append(end_s)
    axes.set_xticks(
        [place(t, cuts) for t in times], [format_seconds(t) for t in times], fontsize=TINY
    )
    axes.set_xlabel("time in the step", fontsize=SMALL)


def _add_legend(axes: Axes, handles: Sequence[Patch], inches: float = 0.42) -> None:
    """One row so far under the panel."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes of a figure"
    below = -inches * figure.dpi / axes.get_window_extent().height
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, below),
        fontsize=TINY + 0.5,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.0,
    )


# ---- memory ----


def draw_memory(axes: Axes, plan: Plan) -> None:
    """Bytes per device of each stage, stacked, against the device and what is held back."""
    unit = 2**30 if plan.cluster.memory_bytes >= 2**30 else 2**20
    capacity = plan.cluster.memory_bytes / unit
    base = [0.0] * len(plan.stages)
    for term, colour in colours.MEMORY.items():
        sizes = [getattr(s.estimate.memory, term) / unit for s in plan.stages]
        axes.bar(range(len(base)), sizes, 0.8, base, color=colour)
        base = [a + b for a, b in zip(base, sizes)]
    usable = capacity - plan.stages[0].estimate.memory.reserve / unit
    axes.axhspan(usable, capacity, color=colours.IDLE, hatch="///", ec=colours.FAINT, lw=0)
    axes.axhline(capacity, color=colours.INK, linewidth=1.0)
    axes.text(
        -0.55,
        (usable + capacity) / 2,
        f"reserve, of {format_bytes(plan.cluster.memory_bytes)} on a {plan.cluster.device}",
        ha="left",
        va="center",
        fontsize=TINY,
    )
    if len(base) <= 16:
        for i, total in enumerate(base):
            axes.text(i, total, f"{total:.3g}", ha="center", va="bottom", fontsize=TINY)
    every = -(-len(base) // MOST_LABELS)
    shown = range(0, len(base), every)
    axes.set_xticks(list(shown), [str(i) for i in shown], fontsize=SMALL)
    axes.set_xlim(-0.6, len(base) - 0.4)
    axes.set_ylim(0.0, capacity * 1.03)
    axes.set_xlabel("stage", fontsize=SMALL)
    axes.set_ylabel("GiB on each device" if unit == 2**30 else "MiB on each device", fontsize=SMALL)
    axes.tick_params(axis="y", labelsize=SMALL)
    axes.set_title(
        f"Memory: peak {format_bytes(plan.estimate.peak_memory_bytes)} "
        f"on stage {plan.estimate.peak_stage}"
    )
    handles = [Patch(color=c, label=t.replace("_", " ")) for t, c in colours.MEMORY.items()]
    _add_legend(axes, handles)


# ---- model ----


def draw_model(axes: Axes, plan: Plan) -> None:
    """The layers as a strip coloured by stage, and how each distinct parameter is placed."""
    layers = [(label, stage) for stage in plan.stages for label in stage.layers]
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    axes.set_axis_off()
    width = 1.0 / len(layers)
    for i, (label, stage) in enumerate(layers):
        axes.add_patch(
            Rectangle(
                (i * width, 0.89),
                width,
                0.06,
                facecolor=colours.STAGES[stage.index % len(colours.STAGES)],
                edgecolor="w",
                linewidth=0.4 if len(layers) < 200 else 0.0,
                hatch="..." if label in stage.recompute else None,
            )
        )
    _label_stages(axes, plan, len(layers))
    recomputed = any(stage.recompute for stage in plan.stages)
    axes.set_title(
        "Model: layers by stage"
        + (" (dotted: recomputed)" if recomputed else "")
        + ", parameters by placement"
    )
    _placement_table(axes, plan)


def _label_stages(axes: Axes, plan: Plan, num_layers: int) -> None:
    every, first = -(-len(plan.stages) // 16), 0
    for stage in plan.stages:
        middle = (first + len(stage.layers) / 2) / num_layers
        first += len(stage.layers)
        if stage.index % every == 0:
            axes.text(middle, 0.96, f"{stage.index}", ha="center", va="bottom", fontsize=TINY)
    ends = (plan.stages[0].layers[0], plan.stages[-1].layers[-1])
    for x, label, side in ((0.0, ends[0], "left"), (1.0, ends[1], "right")):
        axes.text(x, 0.88, _shortened(label, 40), ha=side, va="top", fontsize=TINY)
    axes.text(0.5, 0.88, f"{num_layers} layers", ha="center", va="top", fontsize=TINY)


def _placement_table(axes: Axes, plan: Plan) -> None:
    """Rows: distinct parameters; columns: where each axis splits what is stored and used."""
    keyed = ((n, (p.spec, p.used, p.zero, p.shape)) for n, p in plan.parameters.items())
    folds = fold_names(keyed)
    folds.sort(key=lambda f: -_elements(f.first[3]) * len(f.names))
    shown = folds[:MOST_ROWS]
    lines = len(shown) + 2 + (len(folds) > len(shown))
    top, step = 0.83, min(0.8 / lines, 0.06)
    columns = (0.60, 0.71, 0.82, 0.93)
    for x, head in zip(columns, ("stored dp", "stored tp", "used dp", "used tp")):
        axes.text(x, top - step / 2, head, ha="center", va="center", fontsize=TINY)
    axes.text(0.0, top - step / 2, "parameter (largest first)", va="center", fontsize=TINY)
    for row, fold in enumerate(shown):
        y = top - (row + 1.5) * step
        spec, used, zero, _ = fold.first
        suffix = f"  (ZeRO-{zero})" if zero else ""
        axes.text(0.0, y, _shortened(fold.pattern, 48) + suffix, va="center", fontsize=TINY)
        letters = [*map(str, parse_spec(spec)), *map(str, parse_layout(used).value)]
        for x, letter in zip(columns, letters):
            axes.add_patch(
                Rectangle(
                    (x - 0.05, y - step * 0.42),
                    0.1,
                    step * 0.84,
                    facecolor=colours.PLACEMENT[letter[0]],
                )
            )
            axes.text(x, y, letter, ha="center", va="center", fontsize=TINY)
    if len(folds) > len(shown):
        y = top - (len(shown) + 1.5) * step
        axes.text(0.0, y, f"and {len(folds) - len(shown)} more", va="center", fontsize=TINY)


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _shortened(name: str, most: int) -> str:
    """A name of at most so many characters: its end, which says more than its start."""
    return name if len(name) <= most else "..." + name[3 - most :]


# ---- network ----


def draw_network(axes: Axes, plan: Plan) -> None:
    """The cluster as a tree, with the bytes that each kind of link carries in a step."""
    kinds = host_traffic(plan)
    shown = kinds[:MOST_HOSTS]
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    axes.set_axis_off()
    title = "Network: bytes sent per step, all devices of a host together"
    axes.set_title(title)
    links = plan.cluster.description
    outer, inner = links.get("inter_host"), links.get("intra_host")
    root = f"network: {_link_name(outer)}" if outer else "one host"
    axes.text(0.5, 0.93, root, ha="center", va="center", fontsize=SMALL, bbox=_node("w"))
    width = 1.0 / len(shown)
    for i, kind in enumerate(shown):
        x = (i + 0.5) * width
        loaded = any(kind.outside.values())
        axes.plot(
            [0.5, x], [0.89, 0.72], zorder=0, color=colours.INK if loaded else colours.FAINT, lw=1.2
        )
        _draw_host(axes, plan, kind, x, width, _link_name(inner))
    more = sum(len(k.hosts) for k in kinds[MOST_HOSTS:])
    if more:
        axes.text(1.0, 0.97, f"and {more} more hosts", ha="right", va="center", fontsize=TINY)
    handles = [
        Patch(color=colours.AXES[a], label=f"{a}: {w}")
        for a, w in (("dp", "data parallel"), ("tp", "tensor parallel"), ("pp", "pipeline"))
    ]
    _add_legend(axes, handles, -0.1)


def _draw_host(
    axes: Axes, plan: Plan, kind: HostTraffic, x: float, width: float, link: str
) -> None:
    many = len(kind.hosts) > 1
    name = f"host{'s' if many else ''} {number_ranges(kind.hosts)}"
    _sums(axes, kind.outside, x, 0.80, "leaves: ")
    axes.text(x, 0.68, name, ha="center", va="center", fontsize=SMALL, bbox=_node("w"))
    _sums(axes, kind.inside, x, 0.55, "inside: ")
    axes.text(x, 0.455, link, ha="center", va="center", fontsize=TINY)
    across = 4 if len(kind.stages) > 4 else len(kind.stages)
    rows = -(-len(kind.stages) // across)
    cell, tall = min(width * 0.8 / across, 0.08), min(0.24 / rows, 0.09)
    alike = len({s for s in kind.stages if s is not None}) == len(kind.stage_numbers)
    for i, stage in enumerate(kind.stages):
        row, column = divmod(i, across)
        corner = (x + (column - across / 2) * cell, 0.42 - (row + 1) * tall)
        colour = colours.STAGES[stage % len(colours.STAGES)] if stage is not None and alike else "w"
        axes.add_patch(
            Rectangle(
                corner, cell * 0.92, tall * 0.9, facecolor=colour, edgecolor=colours.INK, lw=0.4
            )
        )
        text = "idle" if stage is None else str(stage) if alike else ""
        middle = (corner[0] + cell * 0.46, corner[1] + tall * 0.43)
        axes.text(*middle, text, ha="center", va="center", fontsize=TINY)
    below = 0.40 - rows * tall
    told = "stage of each device" if alike else f"stages {number_ranges(kind.stage_numbers)}"
    axes.text(x, below, told, ha="center", va="top", fontsize=TINY)


def _sums(axes: Axes, sums: dict[str, float], x: float, y: float, word: str) -> None:
    parts = [(a, s) for a, s in sorted(sums.items(), key=lambda p: -p[1]) if s >= 1]
    text = "\n".join(f"{a} {format_bytes(s)}" for a, s in parts) or "nothing"
    colour = colours.AXES[parts[0][0]] if parts else "w"
    axes.text(
        x,
        y,
        word + text if len(parts) < 2 else word + "\n" + text,
        ha="center",
        va="center",
        fontsize=TINY,
        bbox={
            "boxstyle": "round,pad=0.25",
            "facecolor": colour,
            "edgecolor": "none",
            "alpha": 0.55,
        },
    )


def _node(colour: str) -> dict[str, Any]:
    return {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": colours.INK, "lw": 0.8}


def _link_name(link: object) -> str:
    """A link's name and bandwidth, from the plan's description of the cluster."""
    if not isinstance(link, dict):
        return "links not described"
    rate = link.get("bandwidth_GBps")
    speed = f"{rate:g} GB/s" if isinstance(rate, (int, float)) else "unlimited"
    return f"{link.get('name') or 'link'}, {speed}"


PANELS: dict[str, Callable[[Axes, Plan], None]] = {
    "schedule": draw_schedule,
    "memory": draw_memory,
    "model": draw_model,
    "network": draw_network,
}
