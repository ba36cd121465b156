# SPDX-License-Identifier: Apache-2.0
"""The colours of every drawing, one meaning each; they differ for colour-blind readers too.

Source of the palette: Okabe and Ito, "Color Universal Design", 2008.
"""

from __future__ import annotations

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
IDLE, INK, FAINT = "#E8E8E8", "#222222", "#999999"

# what a device does -> colour, in the order of the legend
ACTIVITY = {
    "forward": SKY,
    "recompute": GREEN,
    "backward": BLUE,
    "communication": ORANGE,
    "reduction": VERMILLION,
    "optimizer": PURPLE,
    "bubble": IDLE,
}
# what memory holds -> colour, from the bottom of the stack
MEMORY = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer_state": PURPLE,
    "activations": GREEN,
    "transient": YELLOW,
}
# a placement on one axis, by its letter
PLACEMENT = {"R": IDLE, "S": SKY, "P": ORANGE}
# stages, in turn
STAGES = (SKY, ORANGE, GREEN, PURPLE, YELLOW, VERMILLION)
# mesh axes and the pipeline, on links: SKY, PURPLE and GREEN, light enough to write on
AXES = {"tp": "#A5D5F2", "dp": "#E3B6CF", "pp": "#7FCDB6"}
