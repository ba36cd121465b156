# SPDX-License-Identifier: Apache-2.0
"""Timing: how long a call takes on this device, and how sure that is.

On a CPU device time is the seconds that the process computed, which other programs on the machine
do not lengthen; on CUDA it is what events say. Communication is timed by the wall. A timing is of
several batches: of kernels the best one stands, as in `timeit`, for what disturbs a batch only ever
adds to it; the median says how far the others were off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Clock = Callable[[], float]
BATCHES = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call.

    Attributes:
        best_s: Of the least disturbed batch.
        median_s: Of all batches.
        num_calls: In all batches.
    """

    best_s: float
    median_s: float
    num_calls: int

    @property
    def spread(self) -> float:
        """The median's excess over the best, as a share of the best."""
        return self.median_s / self.best_s - 1.0 if self.best_s > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: what was measured, at how many points, their typical seconds, and
    the median spread over the points.
    """

    what: str
    num_points: int
    least_s: float
    most_s: float
    spread: float


def summarize(what: str, timings: list[Timing]) -> Row:
    """The timings of one kind as a line of the report."""
    times = [t.best_s for t in timings]
    spread = statistics.median(t.spread for t in timings)
    return Row(what, len(timings), min(times), max(times), spread)


def time_call(call: Callable[[], object], device: torch.device, batch_s: float) -> Timing:
    """Device seconds of a call, in batches of about `batch_s`.

    Args:
        call: What is timed; it runs on `device`.
        device: CPU or CUDA.
        batch_s: Device seconds of each batch.
    """
    measured = _cuda_s if device.type == "cuda" else _process_s
    measured(call, 1)
    count, taken = 1, measured(call, 1)
    while taken < batch_s / 4:
        count *= 4
        taken = measured(call, count)
    count = max(1, round(count * batch_s / max(taken, 1e-9)))
    batches = [measured(call, count) / count for _ in range(BATCHES)]
    return Timing(min(batches), statistics.median(batches), BATCHES * count)


def _process_s(call: Callable[[], object], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - began


def _cuda_s(call: Callable[[], object], count: int) -> float:
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = make(enable_timing=True), make(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def from_walls(walls: list[float], num_calls: int) -> Timing:
    """A timing of batches whose wall seconds per call are known."""
    return Timing(min(walls), statistics.median(walls), num_calls)
