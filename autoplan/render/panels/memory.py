# SPDX-License-Identifier: Apache-2.0
"""The memory: what fills a device of each stage, against what it has."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from autoplan.plan import Plan
from autoplan.render import colours
from autoplan.render.panels.common import MOST_LABELS, SMALL, TINY, add_legend
from autoplan.units import format_bytes


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
    add_legend(axes, handles)
