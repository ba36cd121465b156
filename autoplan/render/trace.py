# SPDX-License-Identifier: Apache-2.0
"""The predicted step as a trace that Perfetto and chrome://tracing open.

In comes a Plan, out goes JSON: one track a stage, one slice a box of the timeline, microseconds.
Source: "Trace Event Format", the Chromium project; complete events ("X") and metadata ("M").
"""

from __future__ import annotations

import json

from autoplan.plan import Plan
from autoplan.render.layout import number_ranges
from autoplan.render.timeline import step_timeline

SUFFIX = ".trace.json"


def trace_json(plan: Plan) -> str:
    """The step of a plan as a trace document."""
    timeline = step_timeline(plan)
    events: list[dict[str, object]] = [
        {
            "ph": "M",
            "pid": 0,
            "name": "process_name",
            "args": {"name": f"{plan.model.name} on {plan.cluster.name}, predicted"},
        }
    ]
    for lane in timeline.lanes:
        name = f"stage {lane.stage}, ranks {number_ranges(lane.ranks)}"
        track = {"ph": "M", "pid": 0, "tid": lane.stage}
        events.append({**track, "name": "thread_name", "args": {"name": name}})
        events.append({**track, "name": "thread_sort_index", "args": {"sort_index": lane.stage}})
        for box in lane.boxes:
            number = "" if box.microbatch is None else f" {box.microbatch}"
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": lane.stage,
                    "name": box.activity + number,
                    "cat": box.activity,
                    "ts": round(box.start_s * 1e6, 3),
                    "dur": round((box.end_s - box.start_s) * 1e6, 3),
                }
            )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
