# SPDX-License-Identifier: Apache-2.0
"""The drawings of a plan by the suffix of the file: picture, page or trace.

What a format needs is imported when it is asked for, so a page needs no matplotlib. Files are
written whole or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path

from autoplan.errors import PlanError
from autoplan.plan import Plan
from autoplan.plan_format import save_text
from autoplan.render.trace import SUFFIX as TRACE
from autoplan.render.trace import trace_json

PICTURES = (".png", ".svg", ".pdf")


def draw_file(plan: Plan, path: str | os.PathLike[str], *, panel: str | None = None) -> Path:
    """Draws a plan to a file, and returns its path.

    Args:
        plan: What to draw.
        path: Ends in .png, .svg, .pdf, .html or .trace.json.
        panel: Of a picture, one of "schedule", "memory", "model", "network"; None: all.

    Raises:
        PlanError: Another suffix, a panel of something else, or the file cannot be written.
    """
    name = str(path)
    if name.endswith(PICTURES):
        from autoplan.render.drawing import draw_plan

        return draw_plan(plan, path, panel)
    if not name.endswith((".html", TRACE)):
        known = ", ".join((*PICTURES, ".html", TRACE))
        raise PlanError(f"cannot draw to {name}, expected one of {known}. Name the file so.")
    if panel is not None:
        raise PlanError(
            f"--panel {panel} is of a picture, {name} has no panels. Draw one of "
            f"{', '.join(PICTURES)}, or leave the panel out."
        )
    if name.endswith(TRACE):
        return save_text(trace_json(plan), path)
    from autoplan.render.page import page_html

    return save_text(page_html(plan), path)
