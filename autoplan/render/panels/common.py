# SPDX-License-Identifier: Apache-2.0
"""What the panels share: sizes of letters, and the legend under a panel."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

SMALL, TINY = 7.5, 6.0  # points
MOST_LABELS = 32  # of lanes and bars


def add_legend(axes: Axes, handles: Sequence[Patch], inches: float = 0.42) -> None:
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
