# SPDX-License-Identifier: Apache-2.0
"""The four panels of a drawn plan, each on one matplotlib Axes.

In comes a Plan, on go shapes and words; every number is the plan's. What repeats is folded. Not
here: figures and files (`render/drawing.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes

from autoplan.plan import Plan
from autoplan.render.panels.memory import draw_memory
from autoplan.render.panels.model import draw_model
from autoplan.render.panels.network import draw_network
from autoplan.render.panels.schedule import draw_schedule

PANELS: dict[str, Callable[[Axes, Plan], None]] = {
    "schedule": draw_schedule,
    "memory": draw_memory,
    "model": draw_model,
    "network": draw_network,
}
