# SPDX-License-Identifier: Apache-2.0
"""The decision: one Plan document of plain data, which a planner writes and everything else reads.

In comes what the search chose, or a JSON file; out goes the same document as JSON. How it is read
and written is in `plan_format.py`, how its parts relate in `plan_checks.py`. Specs are text,
"S(0)R", layouts "S(0)R~S(0)P" (placements.py); SI units. Not here: pages (render/), the search
(solver/), the run.
"""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

import msgspec

from autoplan.errors import PlanError
from autoplan.plan_checks import broken_relations
from autoplan.plan_estimates import (
    Alternative,
    Conversion,
    CutRunnerUp,
    Document,
    Estimate,
    OpEstimate,
    ParameterRunnerUp,
    SearchReport,
    StageEstimate,
    Traffic,
)
from autoplan.plan_format import load_text, read_document, save_text, write_document
from autoplan.units import format_seconds

SCHEMA_VERSION = 2
ACCURACY = 0.25  # a prediction further off than this share of the measured time is warned of

Scalar = None | bool | int | float | str


class Fingerprint(Document, frozen=True, kw_only=True):
    """Hex digests of what the plan was made from; `cluster` is Cluster.digest."""

    graph: str
    inputs: str
    cluster: str
    profiles: str
    settings: str


class ModelSummary(Document, frozen=True, kw_only=True):
    """The model, and one step on its global batch: `batch_size` samples, `flop_per_step` FLOP."""

    name: str
    num_parameters: int
    num_trainable_parameters: int
    num_ops: int
    flop_per_step: float
    batch_size: int


class InputTensor(Document, frozen=True, kw_only=True):
    """One tensor of the global batch.

    `path` is "input_ids", "0" for the first positional one, "a.b.0" for a nested one; `batch_dim`
    is the dim that microbatches and the dp axis cut, or None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None


class Signature(Document, frozen=True, kw_only=True):
    """How the model was called: its tensors, and the arguments that are not tensors."""

    positional: bool
    tensors: tuple[InputTensor, ...]
    constants: dict[str, Scalar]


class Settings(Document, frozen=True, kw_only=True):
    """What the user asked for.

    `memory_reserve` is the fraction of a device that no plan may use; `pins` holds the pins given,
    by name, as JSON has them (tuples become lists).
    """

    mode: str
    optimizer: str
    precision: str | None
    memory_reserve: float
    pins: dict[str, Any]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "pins", _plain(self.pins))


class ClusterSummary(Document, frozen=True, kw_only=True):
    """The cluster, so that a plan is drawn by itself; `description` is Cluster.to_json()."""

    name: str
    num_hosts: int
    devices_per_host: int
    device: str
    memory_bytes: int
    num_devices: int
    description: dict[str, Any]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "description", _plain(self.description))


class MeshLayout(Document, frozen=True, kw_only=True):
    """Degrees: each of `pp` stages has a mesh of dp x tp devices, dp the outer axis."""

    dp: int
    tp: int
    pp: int


class ScheduleSpec(Document, frozen=True, kw_only=True):
    """The pipeline schedule: one of `plan_checks.SCHEDULES`, and its number of microbatches."""

    name: str
    num_microbatches: int


class BoundaryTensor(Document, frozen=True, kw_only=True):
    """A tensor received from an earlier stage: global `shape`, bytes per microbatch and device."""

    name: str
    from_stage: int
    shape: tuple[int, ...]
    dtype: str
    layout: str
    size_bytes: int


class StagePlan(Document, frozen=True, kw_only=True):
    """A run of layers on a block of devices.

    `ranks` in row-major mesh order; `layers` labels such as "model.layers.0"; `first_op` to
    `last_op` inclusive; `recompute` the labels whose activations are made again in backward;
    `runner_up` the next best cut beside it; `mesh` axis name -> size, outermost first: the Plan
    fills it in where it is left out.
    """

    index: int
    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    first_op: str
    last_op: str
    num_ops: int
    recompute: tuple[str, ...]
    receives: tuple[BoundaryTensor, ...]
    estimate: StageEstimate
    traffic: tuple[Traffic, ...] = ()
    runner_up: CutRunnerUp | None = None
    mesh: dict[str, int] = msgspec.field(default_factory=dict)


class ParameterPlan(Document, frozen=True, kw_only=True):
    """A parameter of global `shape`: `spec` as stored, `used` the layout its users see.

    `zero` is its ZeRO level (0-3), `stages` are those that hold it; `runner_up` is None where it
    has no other layout, and for all but the largest of a model with many different parameters.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: str
    used: str
    zero: int
    trainable: bool
    stages: tuple[int, ...]
    runner_up: ParameterRunnerUp | None = None


class BufferPlan(Document, frozen=True, kw_only=True):
    """A buffer of global `shape`, held whole by every rank of `stages`."""

    shape: tuple[int, ...]
    dtype: str
    persistent: bool
    stages: tuple[int, ...]


class Strategy(Document, frozen=True, kw_only=True):
    """The layouts of one op's tensor inputs and outputs, in order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Plan(Document, frozen=True, kw_only=True):
    """A complete decision: how one model runs on one cluster, and what that is estimated to cost.

    Attributes:
        shared: Groups of parameter names that are one tensor.
        strategies, op_strategies: Distinct op strategies, and op name -> index among them.
        op_estimates: What each distinct op costs, in order.
        unruled_ops: Ops without a sharding rule, kept whole.
        alternatives: The layouts that lost, best first.
    """

    schema_version: int
    tool_version: str
    torch_version: str
    fingerprint: Fingerprint
    model: ModelSummary
    signature: Signature
    settings: Settings
    cluster: ClusterSummary
    layout: MeshLayout
    schedule: ScheduleSpec
    stages: tuple[StagePlan, ...]
    parameters: dict[str, ParameterPlan]
    buffers: dict[str, BufferPlan]
    shared: tuple[tuple[str, ...], ...]
    strategies: tuple[Strategy, ...]
    op_strategies: dict[str, int]
    op_estimates: tuple[OpEstimate, ...]
    conversions: tuple[Conversion, ...]
    unruled_ops: tuple[str, ...]
    estimate: Estimate
    alternatives: tuple[Alternative, ...]
    search: SearchReport

    def __post_init__(self) -> None:
        mesh = {"dp": self.layout.dp, "tp": self.layout.tp}
        stages = tuple(s if s.mesh else msgspec.structs.replace(s, mesh=mesh) for s in self.stages)
        msgspec.structs.force_setattr(self, "stages", stages)

    def to_json(self) -> str:
        """The document as JSON: sorted keys, no timestamps, the same bytes every time.

        Raises:
            PlanError: A field holds what JSON cannot say (NaN, an array, a tensor).
        """
        try:
            return write_document(self)
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"the plan of {self.model.name} cannot be written as JSON: {error}. Expected plain "
                "data and finite numbers; convert them where the plan is built."
            ) from error

    @classmethod
    def from_json(cls, text: str, source: str = "plan.json") -> Plan:
        """The plan in `text`; `source` is what messages call it.

        Raises:
            PlanError: Not JSON, not this schema, or parts that do not belong together.
        """
        plan = read_document(text, cls, SCHEMA_VERSION, source)
        plan.verify(source)
        return plan

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the document to `path`, whole or not at all, and returns the path.

        Raises:
            PlanError: The plan does not verify, or the file cannot be written.
        """
        self.verify()
        return save_text(self.to_json(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in the file at `path`. Needs neither torch nor the model.

        Raises:
            PlanError: No such file, a directory, not text, or as `from_json`.
        """
        return cls.from_json(load_text(path), source=str(path))

    def verify(self, source: str = "the plan") -> None:
        """Checks how the parts relate, and that the document survives a round trip.

        Raises:
            PlanError: The first relation that does not hold, with its JSON path.
        """
        for problem in broken_relations(self, SCHEMA_VERSION):
            raise PlanError(f"{source}: {problem}. Plan again, or repair the file.")

    def diff_fingerprint(self, other: Fingerprint) -> tuple[str, ...]:
        """What this plan was made from and `other` is not, in words; empty when nothing differs."""
        words = {
            "graph": "the model's graph (its layers, shapes, dtypes or code)",
            "inputs": "the example inputs (their names, shapes or dtypes)",
            "cluster": "the cluster (its devices, links or size)",
            "profiles": "the profiles (the measurements behind the costs)",
            "settings": "the settings (mode, optimizer, precision, memory reserve or pins)",
        }
        mine = self.fingerprint
        return tuple(
            f"{words[key]}: {getattr(mine, key)} in the plan, {getattr(other, key)} now"
            for key in mine.__struct_fields__
            if getattr(mine, key) != getattr(other, key)
        )

    def compare_measured(self, step_time_s: float) -> str:
        """A measured step beside the predicted one, in a line that warns where they are more than
        a quarter apart.

        Args:
            step_time_s: Seconds of one step, measured; best the median of several.
        """
        ratio = self.estimate.step_time_s / step_time_s
        far = abs(ratio - 1.0) > ACCURACY
        return (
            f"step {format_seconds(step_time_s)} measured, "
            f"{format_seconds(self.estimate.step_time_s)} predicted: "
            f"{ratio:.2f} of the measured time"
            + (
                f" (WARNING: more than {ACCURACY:.0%} off; the cluster file does not describe this "
                "machine, which `autoplan profile` measures, or it was busy)"
                if far
                else ""
            )
        )

    def summary(self) -> str:
        """The plan as a page of text, 80 columns."""
        from autoplan.render.text import render_text

        return render_text(self)

    def explain(self, name: str) -> str:
        """What was chosen for a parameter, module, op or "stage 0", and what its neighbours cost.

        Raises:
            PlanError: The plan has nothing of that name.
        """
        from autoplan.render.explain import explain_text

        return explain_text(self, name)

    def _repr_html_(self) -> str:
        """The page of the plan, as a notebook shows it: in a frame of its own."""
        from autoplan.render.page import page_html

        page = html.escape(page_html(self))
        return f'<iframe srcdoc="{page}" style="width:100%;height:900px;border:0"></iframe>'


def _plain(value: Any) -> Any:
    """Tuples as lists and mappings as dicts, all the way down: what JSON gives back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
