# SPDX-License-Identifier: Apache-2.0
"""What a plan is estimated to cost, as parts of its document: seconds, bytes, traffic, and what the
runners-up would have cost.

Plain data that the planner writes and every page reads; SI units. A difference is the runner-up
less the plan: positive seconds are slower, positive bytes are more. Not here: the decision itself
(`plan.py`).
"""

from __future__ import annotations

import msgspec


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every part of the plan: immutable, keyword-only, closed to unknown keys."""


class MemoryEstimate(Document, frozen=True, kw_only=True):
    """Bytes on one device, by what they hold.

    `activations` counts every microbatch in flight, `transient` is the largest that lives only
    while one op runs, `reserve` is held back and part of no total.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    transient: int
    reserve: int

    @property
    def total(self) -> int:
        """Bytes the plan needs on one device, the reserve not counted."""
        states = self.parameters + self.gradients + self.optimizer_state
        return states + self.activations + self.transient


class Traffic(Document, frozen=True, kw_only=True):
    """What one device of a stage sends along one mesh axis in a step, and the seconds that takes.

    `axis` is "dp", "tp", or "pp" for the boundary to the next stage; `purpose` is "activations",
    "parameters" (gradients reduced, parameters gathered) or "boundary". `sent_bytes` follows the
    ring: (n - 1) / n of the tensor for a gather, a reduce-scatter or an all-to-all over n devices,
    twice that for an all-reduce.
    """

    axis: str
    purpose: str
    sent_bytes: int
    time_s: float


class OpEstimate(Document, frozen=True, kw_only=True):
    """One op on one device and microbatch, standing for `count` equal ones.

    `forward_s` and `backward_s` are its kernels, `communication_s` the collectives of its own local
    form, both passes; `saved_bytes` what autograd keeps of it; `source` the kind of number that
    most of its seconds rest on.
    """

    name: str
    module_path: str
    kind: str
    forward_s: float
    backward_s: float
    communication_s: float
    saved_bytes: int
    source: str
    count: int


class ParameterRunnerUp(Document, frozen=True, kw_only=True):
    """The best plan of the same degrees in which a parameter is stored or used otherwise.

    Everything else is chosen anew around it. The seconds and bytes are differences of the step and
    of the peak.
    """

    spec: str
    used: str
    zero: int
    step_time_s: float
    compute_s: float
    communication_s: float
    peak_memory_bytes: int


class CutRunnerUp(Document, frozen=True, kw_only=True):
    """The best plan in which one layer changes sides at a boundary of a stage.

    The seconds and bytes are differences; both are None where it does not fit, for `reason`.
    """

    stage_layers: tuple[int, ...]
    step_time_s: float | None
    peak_memory_bytes: int | None
    reason: str


class StageEstimate(Document, frozen=True, kw_only=True):
    """Seconds of one stage.

    Per microbatch: `forward_s` and `backward_s` (conversions and recomputation included), the
    conversions' part of each, `recompute_s` (the forward that backward runs again), `send_s` (the
    boundary to the next stage). Once per step: `reduction_s` (gradients reduced, parameters
    gathered) and `optimizer_s`.
    """

    forward_s: float
    backward_s: float
    forward_communication_s: float
    backward_communication_s: float
    recompute_s: float
    send_s: float
    reduction_s: float
    optimizer_s: float
    memory: MemoryEstimate

    @property
    def communication_s(self) -> float:
        """Seconds of one microbatch's conversions, both passes."""
        return self.forward_communication_s + self.backward_communication_s

    @property
    def step_s(self) -> float:
        """Seconds once per step, after the last backward."""
        return self.reduction_s + self.optimizer_s


class Conversion(Document, frozen=True, kw_only=True):
    """A value moved from one layout to another, with the collectives of each pass.

    `size_bytes` and `time_s` (both passes) are of one conversion of one microbatch; `count` says
    how many equal ones the model has.
    """

    value: str
    module_path: str
    source: str
    target: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    size_bytes: int
    time_s: float
    count: int


class Estimate(Document, frozen=True, kw_only=True):
    """The step, as the cost model sees it.

    `peak_memory_bytes` is the total of stage `peak_stage`, the fullest; `mfu` the share of the used
    devices' stated peak; `sources` the share of the time from each kind of number ("measured").
    `expected_error` is the mean relative error of the step time where the cost model was checked
    against measured runs, and `expected_error_source` which ones; None where nothing comparable
    was measured. `crowding` is how many devices share a core: so many times faster than its
    estimate is a stage at most while others wait.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    bubble_s: float
    optimizer_s: float
    peak_memory_bytes: int
    peak_stage: int
    mfu: float
    sources: dict[str, float]
    expected_error: float | None = None
    expected_error_source: str = ""
    crowding: float = 1.0


class Alternative(Document, frozen=True, kw_only=True):
    """A layout that lost, and why.

    Seconds and bytes are None where it was refused unpriced; `compute_s` to `bubble_s` are a
    device's average share of the step.
    """

    dp: int
    tp: int
    pp: int
    zero: int
    schedule: str
    num_microbatches: int
    recompute: bool
    step_time_s: float | None
    peak_memory_bytes: int | None
    reason: str
    compute_s: float | None = None
    communication_s: float | None = None
    bubble_s: float | None = None
    optimizer_s: float | None = None


class SearchReport(Document, frozen=True, kw_only=True):
    """What the search did: layouts tried and refused, the proven relative gap, idle devices."""

    num_candidates: int
    num_rejected: int
    gap: float
    optimal: bool
    idle_devices: int
    idle_reason: str
