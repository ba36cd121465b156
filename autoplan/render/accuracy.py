# SPDX-License-Identifier: Apache-2.0
"""Predicted over measured, drawn: one point per run, a colour per source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw_accuracy(points: Sequence[tuple[str, float, float]], path: str | Path) -> None:
    """Writes a drawing of seconds predicted over seconds measured, both axes logarithmic.

    Args:
        points: (source, measured seconds, predicted seconds).
        path: A .png, .svg or .pdf file.
    """
    figure = Figure(figsize=(8.0, 7.0))
    axes = figure.add_subplot()
    for number, source in enumerate(dict.fromkeys(s for s, _, _ in points)):
        mine = [(x, y) for s, x, y in points if s == source]
        marker = "os^Dv<>Pph"[number % 10]
        xs, ys = zip(*mine)
        axes.scatter(xs, ys, s=14, marker=marker, label=source, alpha=0.7)
    ends = [min(min(p[1:]) for p in points), max(max(p[1:]) for p in points)]
    for share, style in ((1.0, "-"), (1.15, ":"), (1 / 1.15, ":")):
        axes.plot(ends, [e * share for e in ends], style, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured step time (s)")
    axes.set_ylabel("predicted step time (s)")
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
