# SPDX-License-Identifier: Apache-2.0
"""Stages that share their hosts' cores: a replay in which whoever computes shares what there is.

CPU processes often are more than the cores they run on. While all stages compute, each is slowed
by the crowding; while some wait, the others get their turns. `schedule.py` calls this where its own
replay, in which every stage has its device to itself, does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence


class CrowdedRun:
    """One step of stages that share cores, replayed in the order of time.

    With a of p stages computing, each runs min(crowding, p / a) times as fast as with all of them.

    Args:
        programs: Per stage, as `schedule._program` writes them: a negative code computes for
            `seconds[stage][code]`, an odd one awaits message code >> 1, an even one posts it.
        seconds: Per stage (unused, backward, forward) seconds while all stages compute.
        send_s: Seconds of a message over each boundary, from when both ends have posted it.
        num_messages: That the programs know.
        crowding: Devices per core, at least 1.

    Attributes:
        spans: Per stage the start and end of everything that it computes.
        finish: Per stage the end of its program.

    Raises:
        ValueError: The stages wait for each other forever.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[int]],
        seconds: Sequence[tuple[float, float, float]],
        send_s: Sequence[float],
        num_messages: int,
        crowding: float,
    ) -> None:
        count = len(programs)
        self.programs, self.seconds, self.send_s = programs, seconds, send_s
        self.now, self.crowding = 0.0, crowding
        self.posted, self.done = [-1.0] * num_messages, [-1.0] * num_messages
        self.at = [0] * count
        self.left = [0.0] * count  # seconds of the action that a stage computes
        self.spans: list[list[tuple[float, float]]] = [[] for _ in programs]
        self.finish = [-1.0] * count
        while min(self.finish) < 0.0:
            self._start_what_can()
            if min(self.finish) < 0.0:
                self._advance()

    def _start_what_can(self) -> None:
        moved = True
        while moved:
            moved = False
            for stage in range(len(self.programs)):
                if self.left[stage] == 0.0 and self.finish[stage] < 0.0:
                    moved = self._step(stage) or moved

    def _step(self, stage: int) -> bool:
        """Runs a stage's program until it computes, waits or ends; whether it got on."""
        program, began = self.programs[stage], self.at[stage]
        while self.at[stage] < len(program):
            code = program[self.at[stage]]
            if code < 0:
                self.at[stage] += 1
                self.left[stage] = self.seconds[stage][code]
                self.spans[stage].append((self.now, self.now))
                if self.left[stage] > 0.0:
                    return True
            elif code & 1:
                if not 0.0 <= self.done[code >> 1] <= self.now:
                    return self.at[stage] > began
                self.at[stage] += 1
            else:
                self._post(code >> 1)
                self.at[stage] += 1
        self.finish[stage] = self.now
        return True

    def _post(self, message: int) -> None:
        if self.posted[message] < 0.0:
            self.posted[message] = self.now
        else:
            self.done[message] = self.now + self.send_s[message % len(self.send_s)]

    def _advance(self) -> None:
        """Lets time pass until the next action or message is done."""
        busy = [stage for stage, left in enumerate(self.left) if left > 0.0]
        speed = min(self.crowding, len(self.left) / len(busy)) if busy else 1.0
        ends = [self.now + self.left[stage] / speed for stage in busy]
        ends += [t for t in self.done if t > self.now]
        if not ends:
            raise ValueError(
                "the schedule deadlocks: every stage waits; let each stage run a microbatch's "
                "action after its neighbour's can run"
            )
        following = min(ends)
        passed = (following - self.now) * speed
        self.now = following
        for stage in busy:
            left = self.left[stage] - passed
            self.left[stage] = left if left > 1e-12 * passed else 0.0
            if self.left[stage] == 0.0:
                self.spans[stage][-1] = (self.spans[stage][-1][0], following)
