# SPDX-License-Identifier: Apache-2.0
"""A plan as a picture: `draw_plan` writes PNG, SVG or PDF, all four panels or one.

In comes a Plan and a path, out goes a file, whole or not at all. matplotlib is loaded here and in
`panels/` alone, and only for these formats. The same plan gives the same bytes.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.figure import Figure

from autoplan.errors import PlanError
from autoplan.plan import Plan
from autoplan.plan_format import save_bytes
from autoplan.render.panels import PANELS
from autoplan.units import format_bytes, format_count, format_seconds

DPI = 150
# no dates, no random ids: equal plans are equal files
METADATA: dict[str, dict[str, Any]] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


def draw_plan(plan: Plan, path: str | os.PathLike[str], panel: str | None = None) -> Path:
    """Draws a plan to a file, whose suffix says the format.

    Args:
        plan: What to draw.
        path: A .png, .svg or .pdf.
        panel: One of `panels.PANELS` ("schedule", "memory", "model", "network"), or all.

    Raises:
        PlanError: Another panel, or the file cannot be written.
    """
    kind = Path(path).suffix[1:]
    if panel is not None and panel not in PANELS:
        raise PlanError(
            f"there is no panel {panel!r}, expected one of {', '.join(PANELS)}. Name one of those."
        )
    buffer = io.BytesIO()
    style = {"axes.titlesize": 9, "svg.hashsalt": "autoplan", "svg.fonttype": "none"}
    with matplotlib.rc_context(cast(Any, style)):
        figure = _figure(plan, panel)
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=METADATA[kind])
    return save_bytes(buffer.getvalue(), path)


def _figure(plan: Plan, panel: str | None) -> Figure:
    lanes = len(plan.stages)
    tall = min(max(0.32 * lanes, 1.2), 7.0)  # inches of the schedule
    if panel is not None:
        height = tall + 1.6 if panel == "schedule" else 5.2
        figure = Figure(figsize=(11.0 if panel == "schedule" else 8.0, height))
        axes = figure.add_subplot()
        figure.subplots_adjust(
            left=0.15 if panel == "schedule" else 0.09,
            right=0.975,
            top=1.0 - 0.8 / height,
            bottom=min(0.9 / height, 0.3),
        )
        PANELS[panel](axes, plan)
    else:
        height = tall + 10.2
        figure = Figure(figsize=(14.0, height))
        grid = figure.add_gridspec(
            3,
            2,
            height_ratios=(tall, 4.0, 3.8),
            width_ratios=(1.0, 1.05),
            left=0.11,
            right=0.98,
            top=1.0 - 0.75 / height,
            bottom=0.4 / height,
            hspace=1.1 / ((tall + 7.8) / 3),
            wspace=0.10,
        )
        places = (grid[0, :], grid[1, 0], grid[1:, 1], grid[2, 0])
        for name, place in zip(("schedule", "memory", "model", "network"), places):
            PANELS[name](figure.add_subplot(place), plan)
    figure.suptitle(_title(plan), fontsize=10, y=1.0 - 0.12 / figure.get_figheight(), va="top")
    return figure


def _title(plan: Plan) -> str:
    e, layout = plan.estimate, plan.layout
    error = f" +/- {e.expected_error:.0%}" if e.expected_error is not None else ""
    return (
        f"{plan.model.name}, {format_count(plan.model.num_parameters)} parameters, on "
        f"{plan.cluster.name}: dp={layout.dp} tp={layout.tp} pp={layout.pp}, "
        f"step {format_seconds(e.step_time_s)}{error}, MFU {e.mfu:.1%}, "
        f"peak {format_bytes(e.peak_memory_bytes)}"
    )
