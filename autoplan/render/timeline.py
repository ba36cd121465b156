# SPDX-License-Identifier: Apache-2.0
"""One step in time: what each stage's devices do, from the plan's own schedule and seconds.

In comes a Plan, out go lanes of boxes: the schedule replayed (`schedule.py`, as the planner did it)
with the parts of each pass inside its span. Inside a pass the conversions lie between the ops; here
they stand together behind them. What is in no box is the bubble: waits and transfers between
stages. All devices of a stage do the same, so a stage is one lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autoplan.plan import Plan
from autoplan.plan_estimates import StageEstimate
from autoplan.schedule import KINDS, make_schedule, replay

SHORTEST_SHARE = 1e-12  # of a pass: shorter parts are rounding


class Box(NamedTuple):
    """Something that a stage does from `start_s` to `end_s`; `activity` is a key of
    `colours.ACTIVITY`, `microbatch` None for what happens once a step.

    A tuple rather than a dataclass, since a step has tens of thousands.
    """

    activity: str
    start_s: float
    end_s: float
    microbatch: int | None


@dataclass(frozen=True, slots=True)
class Lane:
    """One stage: its ranks, and its boxes in the order of time."""

    stage: int
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    def busy_s(self, activity: str) -> float:
        """Seconds of one activity in the step."""
        return sum(b.end_s - b.start_s for b in self.boxes if b.activity == activity)


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """All stages of one step, which takes `end_s`."""

    lanes: tuple[Lane, ...]
    end_s: float

    @property
    def activities(self) -> tuple[str, ...]:
        """The activities that occur, in the order of their first boxes' lanes."""
        return tuple(dict.fromkeys(b.activity for lane in self.lanes for b in lane.boxes))


def step_timeline(plan: Plan) -> StepTimeline:
    """The predicted step of a plan."""
    estimates = [stage.estimate for stage in plan.stages]
    schedule = make_schedule(plan.schedule.name, len(plan.stages), plan.schedule.num_microbatches)
    replayed = replay(
        schedule,
        [e.forward_s for e in estimates],
        [e.backward_s for e in estimates],
        [e.send_s for e in estimates[:-1]],
        plan.estimate.crowding,
    )
    boxes: list[list[Box]] = [[] for _ in plan.stages]
    passes = {
        (stage.index, kind): _in_turn(_pass_parts(stage.estimate, kind))
        for stage in plan.stages
        for kind in KINDS
    }
    for stage, action, start, end in replayed.spans:
        row, microbatch = boxes[stage], action.microbatch
        parts = passes[stage, action.kind]
        pace = (end - start) / parts[-1][2] if parts and plan.estimate.crowding > 1.0 else 1.0
        for activity, began, ended in parts:
            row.append(Box(activity, start + pace * began, start + pace * ended, microbatch))
    if schedule.trains:
        for stage, finish in enumerate(replayed.finish_s):
            e = estimates[stage]
            once = (("reduction", e.reduction_s), ("optimizer", e.optimizer_s))
            boxes[stage] += [Box(a, finish + b, finish + c, None) for a, b, c in _in_turn(once)]
    lanes = tuple(
        Lane(stage.index, stage.ranks, tuple(row)) for stage, row in zip(plan.stages, boxes)
    )
    ends = [lane.boxes[-1].end_s for lane in lanes if lane.boxes]
    return StepTimeline(lanes, max([replayed.end_s, *ends]))


def _pass_parts(e: StageEstimate, kind: str) -> tuple[tuple[str, float], ...]:
    """The parts of one pass of one microbatch, whose seconds sum up to the pass."""
    if kind == "F":
        own_s = e.forward_s - e.forward_communication_s
        return ("forward", own_s), ("communication", e.forward_communication_s)
    own_s = e.backward_s - e.backward_communication_s
    recompute_s = min(e.recompute_s, own_s)
    return (
        ("recompute", recompute_s),
        ("backward", own_s - recompute_s),
        ("communication", e.backward_communication_s),
    )


def _in_turn(parts: tuple[tuple[str, float], ...]) -> list[tuple[str, float, float]]:
    """(activity, start, end) of parts one after the other from 0."""
    least_s = SHORTEST_SHARE * sum(seconds for _, seconds in parts)
    found, at = [], 0.0
    for activity, seconds in parts:
        if seconds > least_s:
            found.append((activity, at, at + seconds))
            at += seconds
    return found
