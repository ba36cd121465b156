# SPDX-License-Identifier: Apache-2.0
"""In which order a pipeline computes: schedules as data, their check, and their replay in time.

A `Schedule` lists, for each stage, its forward ("F") and backward ("B") actions over the
microbatches. The planner replays it to get a step's seconds, the drawing shows its spans, the
executor runs it: one object, so they cannot disagree. When tensors are sent and awaited follows
`torch.distributed.pipelining` (see `_program`). What an action costs is not known here: `replay`
is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from autoplan.crowded import CrowdedRun

KINDS = ("F", "B")
# A stage's program is integers: message << 1 posts a message, message << 1 | 1 waits for it, and a
# negative one computes.
_COMPUTE = {"F": -1, "B": -2}


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One stage computes one microbatch, forward or backward. Text: `2F0`, PyTorch's notation.

    Attributes:
        stage: 0-based, counted from the model's inputs.
        kind: "F" or "B".
        microbatch: 0-based.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_action(text: str) -> Action:
    """The action written as `2F0`: stage 2, forward, microbatch 0.

    Raises:
        ValueError: The text is not an action.
    """
    match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
    if match is None:
        raise ValueError(
            f"{text!r} is not an action; write stage, F or B, and microbatch, as in '2F0'"
        )
    return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The order of a pipeline's actions. Immutable; checked by `verify`.

    It keeps no slots: it caches what its stages do.

    Attributes:
        name: "gpipe", "1f1b" or "infer"; "1f1b" also fuses opposite transfers, see `_program`.
        num_stages: Stages of the pipeline.
        num_microbatches: Microbatches of one step.
        actions: One tuple per stage, in the order in which its devices run them.
    """

    name: str
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        rows = (f"{s}: {' '.join(map(str, row))}" for s, row in enumerate(self.actions))
        return "\n".join((f"{self.name}, {self.num_microbatches} microbatches", *rows))

    @property
    def trains(self) -> bool:
        """The schedule has backward actions."""
        return any(action.kind == "B" for row in self.actions for action in row)

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        if not self.trains:
            return (1,) * self.num_stages
        most = []
        for row in self.actions:
            held = highest = 0
            for action in row:
                held += 1 if action.kind == "F" else -1
                highest = max(highest, held)
            most.append(highest)
        return tuple(most)

    def in_flight(self, stage: int) -> int:
        """The most microbatches whose saved activations a stage holds at once.

        1F1B: min(m, p - s); GPipe: m; forward only: 1, since nothing is saved for a backward pass.
        """
        return self._in_flight[stage]

    @cached_property
    def _programs(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(_program(self, stage)) for stage in range(self.num_stages))

    def verify(self) -> None:
        """Checks that every stage runs every microbatch once, in one order, without a deadlock.

        Raises:
            ValueError: The schedule is incomplete, out of order or deadlocks; the message names
                the action.
        """
        if self.num_stages < 1 or self.num_microbatches < 1 or len(self.actions) != self.num_stages:
            raise ValueError(
                f"schedule {self.name!r} has {len(self.actions)} rows of actions for "
                f"{self.num_stages} stages and {self.num_microbatches} microbatches; "
                "both counts must be at least 1, with one row per stage"
            )
        kinds = KINDS if self.trains else KINDS[:1]
        for stage in range(self.num_stages):
            _verify_row(self, stage, kinds)
        for kind in kinds:
            _verify_order(self, kind)
        zeros = (0.0,) * self.num_stages
        _run(self, zeros, zeros, zeros[1:])


def _verify_row(schedule: Schedule, stage: int, kinds: tuple[str, ...]) -> None:
    """Raises ValueError unless a row has every action once, each backward after its forward."""
    seen: set[Action] = set()
    for action in schedule.actions[stage]:
        if (
            action.stage != stage
            or action.kind not in kinds
            or not 0 <= action.microbatch < schedule.num_microbatches
        ):
            raise ValueError(
                f"action {action} cannot stand in row {stage} of schedule {schedule.name!r}; it "
                f"must have that stage, kind {' or '.join(kinds)}, and a microbatch below "
                f"{schedule.num_microbatches}"
            )
        if action in seen:
            raise ValueError(
                f"action {action} stands twice in schedule {schedule.name!r}; remove one"
            )
        if action.kind == "B" and Action(stage, "F", action.microbatch) not in seen:
            raise ValueError(
                f"action {action} of schedule {schedule.name!r} comes before its forward; put "
                f"{Action(stage, 'F', action.microbatch)} earlier in row {stage}"
            )
        seen.add(action)
    for kind in kinds:
        for microbatch in range(schedule.num_microbatches):
            action = Action(stage, kind, microbatch)
            if action not in seen:
                raise ValueError(
                    f"action {action} is missing from schedule {schedule.name!r}; "
                    f"add it to row {stage}"
                )


def _verify_order(schedule: Schedule, kind: str) -> None:
    """Raises ValueError unless all stages run one kind's microbatches in the same order.

    Neighbours match sends and receives by order, so another order would swap microbatches silently.
    """
    first = [a.microbatch for a in schedule.actions[0] if a.kind == kind]
    for row in schedule.actions[1:]:
        for action, expected in zip((a for a in row if a.kind == kind), first):
            if action.microbatch != expected:
                raise ValueError(
                    f"action {action} of schedule {schedule.name!r} is out of order: stage 0 runs "
                    f"{kind}{expected} there; give every stage the same order of microbatches"
                )


def _check_counts(num_stages: int, num_microbatches: int) -> None:
    """Raises ValueError unless both counts are at least 1."""
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"there is no schedule of {num_stages} stages and {num_microbatches} microbatches; "
            "give at least 1 of each"
        )


def _rows(num_microbatches: int, warmups: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
    """Rows of a training schedule: warm-up forwards, backward and forward in turn, backwards."""
    rows = []
    for stage, warmup in enumerate(warmups):
        row = [Action(stage, "F", m) for m in range(warmup)]
        for m in range(num_microbatches):
            row.append(Action(stage, "B", m))
            if m + warmup < num_microbatches:
                row.append(Action(stage, "F", m + warmup))
        rows.append(tuple(row))
    return tuple(rows)


@lru_cache(maxsize=64)
def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, on every stage.

    A single stage runs F0 B0 F1 B1 ...: gradient accumulation, with one microbatch saved.

    Raises:
        ValueError: A count is below 1.

    Source: Huang et al., "GPipe", NeurIPS 2019; backwards in microbatch order, as PyTorch's
    ScheduleGPipe has them.
    """
    _check_counts(num_stages, num_microbatches)
    warmup = num_microbatches if num_stages > 1 else 1
    rows = _rows(num_microbatches, (warmup,) * num_stages)
    return Schedule("gpipe", num_stages, num_microbatches, rows)


@lru_cache(maxsize=64)
def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """min(m, p - s) forwards on stage s, one backward and one forward in turn, the backwards left.

    PyTorch's Schedule1F1B refuses fewer microbatches than stages; the order exists for any count.

    Raises:
        ValueError: A count is below 1.

    Source: Narayanan et al., "PipeDream-Flush", SC 2021; the warm-up of PyTorch's Schedule1F1B.
    """
    _check_counts(num_stages, num_microbatches)
    warmups = [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]
    rows = _rows(num_microbatches, warmups)
    return Schedule("1f1b", num_stages, num_microbatches, rows)


@lru_cache(maxsize=64)
def inference(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards only, in microbatch order.

    Raises:
        ValueError: A count is below 1.
    """
    _check_counts(num_stages, num_microbatches)
    rows = tuple(
        tuple(Action(s, "F", m) for m in range(num_microbatches)) for s in range(num_stages)
    )
    return Schedule("infer", num_stages, num_microbatches, rows)


_MAKERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "infer": inference}
SCHEDULES = tuple(_MAKERS)


def make_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of that name, one of SCHEDULES.

    Raises:
        ValueError: The name is unknown, or a count is below 1.
    """
    if name not in _MAKERS:
        raise ValueError(f"schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    return _MAKERS[name](num_stages, num_microbatches)


def _program(schedule: Schedule, stage: int) -> list[int]:
    """What a stage's devices post, await and compute, in order, as PyTorch's schedule classes do.

    A message carries one microbatch's boundary tensors over one boundary, forward or backward.
    Receives are posted just before the action that needs them and awaited at once, never ahead.
    Sends are posted right after the action, and:

    * "1f1b" (Schedule1F1B): where the next action is of the other kind, the send is posted together
      with that action's receive and both are awaited (`fwd_send_bwd_recv`, `bwd_send_fwd_recv`).
      Otherwise (warm-up and cool-down) the send is asynchronous, with one outstanding: it is
      awaited after the next action, before the next send.
    * all others (ScheduleGPipe, _ScheduleForwardOnly): sends are asynchronous; those of the
      forwards are awaited before the first backward, those of the backwards at the end.

    Source: torch/distributed/pipelining/schedules.py of PyTorch 2.13, `_step_microbatches` of the
    three classes.
    """
    boundaries = schedule.num_stages - 1
    fused = schedule.name == "1f1b"
    code: list[int] = []
    outstanding: list[int] = []
    carried: list[int] = []
    row = schedule.actions[stage]
    for action, following in zip(row, (*row[1:], None)):
        forward = action.kind == "F"
        number = (2 * action.microbatch + (not forward)) * boundaries
        source, target = (stage - 1, stage) if forward else (stage, stage - 1)
        batch = [*carried, *([number + source] if 0 <= source < boundaries else [])]
        code += [message << 1 for message in batch] + [message << 1 | 1 for message in batch]
        carried = []
        code.append(_COMPUTE[action.kind])
        turns = following is not None and following.kind != action.kind
        if fused:
            code += [message << 1 | 1 for message in outstanding]
            outstanding = []
        if 0 <= target < boundaries:
            if fused and turns:
                carried = [number + target]
            else:
                code.append((number + target) << 1)
                outstanding.append(number + target)
        if following is None or (turns and not fused):
            code += [message << 1 | 1 for message in outstanding]
            outstanding = []
    return code


def _run(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
) -> tuple[list[list[float]], list[float]]:
    """Start of every action and end of every program, per stage, in seconds.

    A message starts when both ends have posted it and takes `send_s` of its boundary: the
    rendezvous of NCCL's and gloo's large messages. The two directions do not slow each other.

    Raises:
        ValueError: The stages wait for each other forever.
    """
    num_stages, boundaries = schedule.num_stages, schedule.num_stages - 1
    programs = schedule._programs
    num_messages = 2 * schedule.num_microbatches * boundaries
    posted, done = [-1.0] * num_messages, [-1.0] * num_messages
    starts: list[list[float]] = [[] for _ in range(num_stages)]
    clocks, positions = [0.0] * num_stages, [0] * num_stages
    running = list(range(num_stages))
    while running:
        progress = False
        for stage in running:
            program, clock, at = programs[stage], clocks[stage], positions[stage]
            begun = starts[stage].append
            seconds = (0.0, backward_s[stage], forward_s[stage])
            end = len(program)
            while at < end:
                code = program[at]
                if code < 0:
                    begun(clock)
                    clock += seconds[code]
                elif code & 1:
                    arrival = done[code >> 1]
                    if arrival < 0.0:
                        break
                    if arrival > clock:
                        clock = arrival
                else:
                    message = code >> 1
                    other = posted[message]
                    if other < 0.0:
                        posted[message] = clock
                    else:
                        both = other if other > clock else clock
                        done[message] = both + send_s[message % boundaries]
                at += 1
            progress = progress or at > positions[stage]
            clocks[stage], positions[stage] = clock, at
        if not progress:
            stuck = schedule.actions[running[0]][len(starts[running[0]]) :]
            raise ValueError(
                f"schedule {schedule.name!r} deadlocks: stage {running[0]} waits forever "
                f"{f'before action {stuck[0]}' if stuck else 'for its last send'}; "
                "let each stage run a microbatch's action after its neighbour's can run"
            )
        running = [stage for stage in running if positions[stage] < len(programs[stage])]
    return starts, clocks


class Span(NamedTuple):
    """One action in time: its computation, without the transfers, which lie between the spans.

    A tuple rather than a dataclass, since a step has tens of thousands.
    """

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed step.

    Attributes:
        spans: Every action, by stage, then in order.
        end_s: Seconds until the last stage is done.
        finish_s: Seconds until each stage is done with its actions and its sends.
    """

    spans: tuple[Span, ...]
    end_s: float
    finish_s: tuple[float, ...]

    def busy_s(self, stage: int) -> float:
        """Seconds in which a stage computes."""
        return sum(span.end_s - span.start_s for span in self.spans if span.stage == stage)

    def bubble_s(self, stage: int) -> float:
        """Seconds of the step in which a stage does not compute: waits and transfers."""
        return self.end_s - self.busy_s(stage)


def finish_times(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    crowding: float = 1.0,
) -> tuple[float, ...]:
    """Seconds until each stage is done, as in `replay` but without spans: what a search calls.

    Args, Raises: As `replay`.
    """
    _check_times(schedule, forward_s, backward_s, send_s)
    if crowding > 1.0:
        return tuple(_crowded(schedule, forward_s, backward_s, send_s, crowding).finish)
    return tuple(_run(schedule, forward_s, backward_s, send_s)[1])


def replay(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    crowding: float = 1.0,
) -> Timeline:
    """When each action runs, communicating as `torch.distributed.pipelining` 2.13 does.

    Receives are posted only when their action is next, so a transfer is hidden neither by the
    receiver's computation nor, in 1F1B's steady state, by the sender's: there the send of one
    direction and the receive of the other are posted together and both awaited. Elsewhere sends
    are asynchronous. A transfer starts when both ends have posted it; the two directions of a
    boundary do not slow each other.

    Args:
        schedule: What runs.
        forward_s: Seconds of one microbatch's forward, per stage.
        backward_s: Seconds of one microbatch's backward, per stage; unused when only forwards run.
        send_s: Seconds to move one microbatch over each boundary, in either direction; one fewer
            than stages.
        crowding: Devices per core where stages share cores: so many times faster than given is a
            stage at most while others wait (`crowded.py`).

    Raises:
        ValueError: A length does not fit, a time is negative or not a number, or the schedule
            deadlocks.
    """
    _check_times(schedule, forward_s, backward_s, send_s)
    if crowding > 1.0:
        run = _crowded(schedule, forward_s, backward_s, send_s, crowding)
        rows = zip(range(schedule.num_stages), schedule.actions, run.spans)
        shared = [Span(s, a, *span) for s, row, at in rows for a, span in zip(row, at)]
        return Timeline(tuple(shared), max(run.finish), tuple(run.finish))
    starts, finish = _run(schedule, forward_s, backward_s, send_s)
    spans = []
    for stage, row in enumerate(schedule.actions):
        seconds = {"F": forward_s[stage], "B": backward_s[stage]}
        spans += [
            Span(stage, action, start, start + seconds[action.kind])
            for action, start in zip(row, starts[stage])
        ]
    return Timeline(tuple(spans), max(finish), tuple(finish))


def _crowded(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    crowding: float,
) -> CrowdedRun:
    num_messages = 2 * schedule.num_microbatches * (schedule.num_stages - 1)
    seconds = [(0.0, b, f) for f, b in zip(forward_s, backward_s)]
    return CrowdedRun(schedule._programs, seconds, send_s, num_messages, crowding)


def _check_times(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
) -> None:
    """Raises ValueError unless there is one non-negative number per stage and per boundary."""
    lengths = schedule.num_stages, schedule.num_stages, schedule.num_stages - 1
    for name, times, length in zip(
        ("forward_s", "backward_s", "send_s"), (forward_s, backward_s, send_s), lengths
    ):
        if len(times) != length or not all(time >= 0.0 for time in times):
            raise ValueError(
                f"{name} = {tuple(times)} does not fit {schedule.num_stages} stages; "
                f"give {length} seconds, none negative"
            )
