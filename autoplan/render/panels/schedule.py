# SPDX-License-Identifier: Apache-2.0
"""The schedule: stages over time, the middle of a long step cut out."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from autoplan.plan import Plan, StagePlan
from autoplan.render import colours
from autoplan.render.layout import number_ranges
from autoplan.render.panels.common import MOST_LABELS, SMALL, TINY, add_legend
from autoplan.render.steady import Cut, find_cuts, place
from autoplan.render.timeline import Box, Lane, StepTimeline, step_timeline
from autoplan.units import format_seconds

MOST_EDGED = 240  # boxes of a lane: beyond, edges would cover them
NUMBERED = {"forward", "backward"}


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
    add_legend(axes, handles)


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
