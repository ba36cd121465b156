# SPDX-License-Identifier: Apache-2.0
"""A long step on one line: what all of its middle microbatches do alike is cut out of the time.

In comes a timeline, out go the intervals to leave out, and the place of a time on the shortened
line. An interval is cut only where every stage works on middle microbatches, so the start and the
end of the step, where the bubble is, are always whole.
"""

from __future__ import annotations

from typing import NamedTuple

from autoplan.render.timeline import StepTimeline

LEAST_SHARE = 0.08  # of the step: shorter intervals stay
GAP_SHARE = 0.04  # width of a cut, of the step without the cuts


class Cut(NamedTuple):
    """Seconds `start_s` to `end_s` are left out; the mark of the cut is `gap` wide."""

    start_s: float
    end_s: float
    gap: float


def find_cuts(timeline: StepTimeline, num_microbatches: int) -> tuple[Cut, ...]:
    """The intervals to cut, in order; none for a step of few microbatches."""
    kept = len(timeline.lanes) + 4  # at either end: the pipeline fills, and some go by
    if num_microbatches <= 2 * kept + 4:
        return ()
    events: list[tuple[float, int]] = []
    for lane in timeline.lanes:
        for box in lane.boxes:
            middle = box.microbatch is not None and kept <= box.microbatch < num_microbatches - kept
            if not middle:
                events += [(box.start_s, 1), (box.end_s, -1)]
    found: list[tuple[float, float]] = []
    open_boxes, free_from = 0, 0.0
    for time_s, change in sorted(events, key=lambda e: (e[0], -e[1])):
        if open_boxes == 0 and change > 0 and time_s - free_from > LEAST_SHARE * timeline.end_s:
            found.append((free_from, time_s))
        open_boxes += change
        free_from = time_s
    shown = timeline.end_s - sum(end - start for start, end in found)
    return tuple(Cut(start, end, GAP_SHARE * shown) for start, end in found)


def place(time_s: float, cuts: tuple[Cut, ...]) -> float:
    """Where a time stands on the line: in seconds, less what is cut before it."""
    at = time_s
    for cut in cuts:
        if time_s >= cut.end_s:
            at -= cut.end_s - cut.start_s - cut.gap
        elif time_s > cut.start_s:
            share = (time_s - cut.start_s) / (cut.end_s - cut.start_s)
            at += (cut.gap - (cut.end_s - cut.start_s)) * share
    return at
