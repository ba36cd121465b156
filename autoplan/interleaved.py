# SPDX-License-Identifier: Apache-2.0
"""Interleaved 1F1B: each rank holds several chunks of layers, and the pipeline is shorter.

Chunk c of rank r is stage c p + r of p v stages. Here is the order in which a rank computes and its
replay in time; the executor does not run it yet, so the planner does not offer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Step = tuple[bool, int, int]  # forward, chunk, microbatch


@dataclass(frozen=True)
class Interleaved:
    """The order of every rank.

    Attributes:
        num_ranks: p.
        num_chunks: v, stages that each rank holds.
        num_microbatches: m.
    """

    num_ranks: int
    num_chunks: int
    num_microbatches: int

    @cached_property
    def orders(self) -> tuple[tuple[Step, ...], ...]:
        """Per rank its steps: warm-up forwards, one forward and one backward in turn, backwards."""
        return tuple(self._order(rank) for rank in range(self.num_ranks))

    def _order(self, rank: int) -> tuple[Step, ...]:
        p, v, m = self.num_ranks, self.num_chunks, self.num_microbatches
        total = m * v
        warmup = total if m == p else min(total, 2 * (p - rank - 1) + (v - 1) * p)
        forwards, backwards = self._sequence(True), self._sequence(False)
        steps: list[Step] = [(True, *forwards[i]) for i in range(warmup)]
        for i in range(total - warmup):
            steps.append((True, *forwards[warmup + i]))
            steps.append((False, *backwards[i]))
        steps += [(False, *backwards[i]) for i in range(total - warmup, total)]
        return tuple(steps)

    def _sequence(self, forward: bool) -> list[tuple[int, int]]:
        """(chunk, microbatch) in order: p microbatches of a chunk, then the next chunk."""
        found = []
        p, v, m = self.num_ranks, self.num_chunks, self.num_microbatches
        for start in range(0, m, p):
            for chunk in range(v):
                here = chunk if forward else v - 1 - chunk
                found += [(here, k) for k in range(start, min(start + p, m))]
        return found

    @cached_property
    def in_flight(self) -> tuple[tuple[int, ...], ...]:
        """Per rank and chunk, the microbatches held when the rank holds the most chunks in all."""
        result = []
        for steps in self.orders:
            held = [0] * self.num_chunks
            most, at_most = 0, tuple(held)
            for forward, chunk, _ in steps:
                held[chunk] += 1 if forward else -1
                if sum(held) > most:
                    most, at_most = sum(held), tuple(held)
            result.append(at_most)
        return tuple(result)

    def finish_times(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        send_s: Sequence[float],
    ) -> tuple[float, ...]:
        """Per rank the end of its last step, in seconds.

        Args:
            forward_s, backward_s: Per stage, of one microbatch.
            send_s: Per boundary between stages.

        A tensor is on its way while both ranks go on; a step waits for its input.
        """
        p, v, m = self.num_ranks, self.num_chunks, self.num_microbatches
        last = p * v - 1
        ready: dict[tuple[bool, int, int], float] = {}
        clocks, positions = [0.0] * p, [0] * p
        waiting = list(range(p))
        while waiting:
            moved = False
            for rank in waiting:
                steps, clock, at = self.orders[rank], clocks[rank], positions[rank]
                while at < len(steps):
                    forward, chunk, k = steps[at]
                    stage = chunk * p + rank
                    if forward:
                        begin = 0.0 if stage == 0 else ready.get((True, stage - 1, k), -1.0)
                    elif stage == last:
                        begin = ready.get((True, stage, k), -1.0)
                    else:
                        begin = ready.get((False, stage + 1, k), -1.0)
                    if begin < 0.0:
                        break
                    clock = max(clock, begin) + (forward_s if forward else backward_s)[stage]
                    arrives = clock
                    if forward and stage < last:
                        arrives += send_s[stage]
                    elif not forward and stage > 0:
                        arrives += send_s[stage - 1]
                    ready[forward, stage, k] = arrives
                    at += 1
                moved = moved or at > positions[rank]
                clocks[rank], positions[rank] = clock, at
            if not moved:
                raise ValueError(
                    f"interleaved schedule of {p} ranks, {v} chunks and {m} microbatches waits "
                    "forever; use a number of microbatches that the ranks divide"
                )
            waiting = [r for r in waiting if positions[r] < len(self.orders[r])]
        return tuple(clocks)


@lru_cache(maxsize=32)
def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Interleaved:
    """The interleaved schedule of these sizes.

    Raises:
        ValueError: A count is below 1, or the ranks do not divide the microbatches.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, section 2.2.2; the order of Megatron-LM's
    forward_backward_pipelining_with_interleaving.
    """
    if min(num_ranks, num_chunks, num_microbatches) < 1 or num_microbatches % num_ranks:
        raise ValueError(
            f"there is no interleaved schedule of {num_ranks} ranks, {num_chunks} chunks and "
            f"{num_microbatches} microbatches; give a multiple of the ranks as microbatches"
        )
    return Interleaved(num_ranks, num_chunks, num_microbatches)
