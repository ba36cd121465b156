# SPDX-License-Identifier: Apache-2.0
"""The network: the cluster as a tree, with the bytes that each kind of link carries in a step."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from autoplan.plan import Plan
from autoplan.render import colours
from autoplan.render.layout import number_ranges
from autoplan.render.network import HostTraffic, host_traffic
from autoplan.render.panels.common import SMALL, TINY, add_legend
from autoplan.units import format_bytes

MOST_HOSTS = 6  # kinds of hosts in the tree


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
    add_legend(axes, handles, -0.1)


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
