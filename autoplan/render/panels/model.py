# SPDX-License-Identifier: Apache-2.0
"""The model: its layers by stage, and where each axis splits each distinct parameter."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from autoplan.placements import parse_layout, parse_spec
from autoplan.plan import Plan
from autoplan.render import colours
from autoplan.render.layout import fold_names
from autoplan.render.panels.common import TINY

MOST_ROWS = 22  # of the placement table


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
    folds.sort(key=lambda f: -math.prod(f.first[3]) * len(f.names))
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


def _shortened(name: str, most: int) -> str:
    """A name of at most so many characters: its end, which says more than its start."""
    return name if len(name) <= most else "..." + name[3 - most :]
