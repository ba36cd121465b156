# SPDX-License-Identifier: Apache-2.0
"""The memory: what fills a device of each stage, against what it has."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from autoplan.plan import Plan
from autoplan.render import colours
from autoplan.render.panels.common import MOST_LABELS, SMALL, TINY, add_legend
from autoplan.units import format_bytes

SMALL_SHARE = 0.25  # of the device: a smaller peak gets a scale of its own


def draw_memory(axes: Axes, plan: Plan) -> None:
    """Bytes per device of each stage, stacked, against the device and what is held back."""
    peak, whole = plan.estimate.peak_memory_bytes, plan.cluster.memory_bytes
    small = peak < SMALL_SHARE * whole  # then the device is off the scale
    unit, word = _unit(peak if small else whole)
    capacity = whole / unit
    base = [0.0] * len(plan.stages)
    for term, colour in colours.MEMORY.items():
        sizes = [getattr(s.estimate.memory, term) / unit for s in plan.stages]
        axes.bar(range(len(base)), sizes, 0.8, base, color=colour)
        base = [a + b for a, b in zip(base, sizes)]
    if small:
        told = f"the device's {format_bytes(whole)} lie far above"
        axes.text(0.02, 0.97, told, transform=axes.transAxes, va="top", fontsize=TINY)
    else:
        _draw_capacity(axes, plan, capacity, plan.stages[0].estimate.memory.reserve / unit)
    if len(base) <= 16:
        for i, total in enumerate(base):
            axes.text(i, total, f"{total:.3g}", ha="center", va="bottom", fontsize=TINY)
    every = -(-len(base) // MOST_LABELS)
    shown = range(0, len(base), every)
    axes.set_xticks(list(shown), [str(i) for i in shown], fontsize=SMALL)
    axes.set_xlim(-0.6, len(base) - 0.4)
    axes.set_ylim(0.0, max(base) * 1.2 if small else capacity * 1.03)
    axes.set_xlabel("stage", fontsize=SMALL)
    axes.set_ylabel(f"{word} on each device", fontsize=SMALL)
    axes.tick_params(axis="y", labelsize=SMALL)
    axes.set_title(
        f"Memory: peak {format_bytes(plan.estimate.peak_memory_bytes)} "
        f"on stage {plan.estimate.peak_stage}"
    )
    handles = [Patch(color=c, label=t.replace("_", " ")) for t, c in colours.MEMORY.items()]
    add_legend(axes, handles)


def _unit(size: int) -> tuple[int, str]:
    """The unit of bytes in which a size is at least 1."""
    for power, word in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return 2**power, word
    return 1, "bytes"


def _draw_capacity(axes: Axes, plan: Plan, capacity: float, reserve: float) -> None:
    usable = capacity - reserve
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
