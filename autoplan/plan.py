# SPDX-License-Identifier: Apache-2.0
"""The decision: one Plan document of plain data, which a planner writes and everything else reads.

In comes what the search chose, or a JSON file; out go the same document as JSON and its checks.
Reading is strict: an unknown key, a wrong type or another schema version is refused with its JSON
path, and nothing named in a plan is imported or executed. Specs are text, "S(0)R", layouts
"S(0)R~S(0)P" (placements.py); SI units. Not here: pages (render/), the search (solver/), the run.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from autoplan.errors import PlanError
from autoplan.placements import parse_layout, parse_spec

SCHEMA_VERSION = 1
MODES = ("train", "infer")
SCHEDULES = ("gpipe", "1f1b", "infer")
LINE_WIDTH = 160  # of the JSON file, so that a parameter is one line: diffs then read by parameter

Scalar = None | bool | int | float | str


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every part of the plan: immutable, keyword-only, closed to unknown keys."""


class Fingerprint(_Document, frozen=True, kw_only=True):
    """Hex digests of what the plan was made from; `cluster` is Cluster.digest."""

    graph: str
    inputs: str
    cluster: str
    profiles: str
    settings: str


class ModelSummary(_Document, frozen=True, kw_only=True):
    """The model, and one step on its global batch: `batch_size` samples, `flop_per_step` FLOP."""

    name: str
    num_parameters: int
    num_trainable_parameters: int
    num_ops: int
    flop_per_step: float
    batch_size: int


class InputTensor(_Document, frozen=True, kw_only=True):
    """One tensor of the global batch.

    `path` is "input_ids", "0" for the first positional one, "a.b.0" for a nested one; `batch_dim`
    is the dim that microbatches and the dp axis cut, or None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None


class Signature(_Document, frozen=True, kw_only=True):
    """How the model was called: its tensors, and the arguments that are not tensors."""

    positional: bool
    tensors: tuple[InputTensor, ...]
    constants: dict[str, Scalar]


class Settings(_Document, frozen=True, kw_only=True):
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


class ClusterSummary(_Document, frozen=True, kw_only=True):
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


class MeshLayout(_Document, frozen=True, kw_only=True):
    """Degrees: each of `pp` stages has a mesh of dp x tp devices, dp the outer axis."""

    dp: int
    tp: int
    pp: int


class ScheduleSpec(_Document, frozen=True, kw_only=True):
    """The pipeline schedule by name (one of SCHEDULES) and its number of microbatches."""

    name: str
    num_microbatches: int


class BoundaryTensor(_Document, frozen=True, kw_only=True):
    """A tensor received from an earlier stage: global `shape`, bytes per microbatch and device."""

    name: str
    from_stage: int
    shape: tuple[int, ...]
    dtype: str
    layout: str
    size_bytes: int


class MemoryEstimate(_Document, frozen=True, kw_only=True):
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


class StageEstimate(_Document, frozen=True, kw_only=True):
    """Seconds of one stage.

    Per microbatch: `forward_s` and `backward_s` (conversions and recomputation included),
    `communication_s` (the conversions' part of both), `send_s` (the boundary to the next stage).
    Once per step: `step_s` (gradient reduction and optimizer).
    """

    forward_s: float
    backward_s: float
    communication_s: float
    send_s: float
    step_s: float
    memory: MemoryEstimate


class StagePlan(_Document, frozen=True, kw_only=True):
    """A run of layers on a block of devices.

    `ranks` in row-major mesh order; `layers` labels such as "model.layers.0"; `first_op` to
    `last_op` inclusive; `recompute` the labels whose activations are made again in backward; `mesh`
    axis name -> size, outermost first: the Plan fills it in where it is left out.
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
    mesh: dict[str, int] = {}


class ParameterPlan(_Document, frozen=True, kw_only=True):
    """A parameter of global `shape`: `spec` as stored, `used` the layout its users see.

    `zero` is its ZeRO level (0-3), `stages` are those that hold it.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: str
    used: str
    zero: int
    trainable: bool
    stages: tuple[int, ...]


class BufferPlan(_Document, frozen=True, kw_only=True):
    """A buffer of global `shape`, held whole by every rank of `stages`."""

    shape: tuple[int, ...]
    dtype: str
    persistent: bool
    stages: tuple[int, ...]


class Strategy(_Document, frozen=True, kw_only=True):
    """The layouts of one op's tensor inputs and outputs, in order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Conversion(_Document, frozen=True, kw_only=True):
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


class Estimate(_Document, frozen=True, kw_only=True):
    """The step, as the cost model sees it.

    `peak_memory_bytes` is the total of stage `peak_stage`, the fullest; `mfu` the share of the used
    devices' peak; `sources` the share of the time from each kind of number ("measured").
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


class Alternative(_Document, frozen=True, kw_only=True):
    """A layout that lost, and why; seconds and bytes are None where it was refused unpriced."""

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


class SearchReport(_Document, frozen=True, kw_only=True):
    """What the search did: layouts tried and refused, the proven relative gap, idle devices."""

    num_candidates: int
    num_rejected: int
    gap: float
    optimal: bool
    idle_devices: int
    idle_reason: str


class Plan(_Document, frozen=True, kw_only=True):
    """A complete decision: how one model runs on one cluster, and what that is estimated to cost.

    Attributes:
        shared: Groups of parameter names that are one tensor.
        strategies, op_strategies: Distinct op strategies, and op name -> index among them.
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
            return _layout_json(msgspec.to_builtins(self), "") + "\n"
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
        raw = _parse_json(text, source)
        _check_version(raw, source)
        try:
            plan = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            problem = _find_problem(raw, inspect.type_info(cls), "$") or str(error)
            raise PlanError(f"{source}: {problem}") from error
        plan.verify(source)
        return plan

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the document to `path`, whole or not at all, and returns the path.

        Raises:
            PlanError: The plan does not verify, or the file cannot be written.
        """
        self.verify()
        target, text = Path(path), self.to_json()
        partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, target)
        except OSError as error:
            if partial.is_file():
                partial.unlink()
            raise PlanError(
                f"cannot write the plan to {target}: {error.strerror}. Name a file in a "
                "folder that exists."
            ) from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in the file at `path`. Needs neither torch nor the model.

        Raises:
            PlanError: No such file, a directory, not text, or as `from_json`.
        """
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except FileNotFoundError as error:
            raise PlanError(
                f"no plan file at {path}, expected JSON that Plan.save wrote. Make it with: "
                f"autoplan plan FILE.py:FUNCTION --cluster NAME -o {path}"
            ) from error
        except UnicodeDecodeError as error:
            raise PlanError(
                f"{path} is not UTF-8 text (byte {error.start}), expected JSON. Save it again."
            ) from error
        except OSError as error:  # a directory, no permission
            raise PlanError(
                f"cannot read {path}: {error.strerror}, expected a plan file. Name the JSON file."
            ) from error
        return cls.from_json(text, source=str(path))

    def verify(self, source: str = "the plan") -> None:
        """Checks how the parts relate, and that the document survives a round trip.

        Raises:
            PlanError: The first relation that does not hold, with its JSON path.
        """
        for problem in _relations(self):
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

    def summary(self) -> str:
        """The plan as a page of text, 80 columns."""
        from autoplan.render.text import render_text

        return render_text(self)

    def explain(self, name: str) -> str:
        """What was chosen for a parameter, module, op or "stage 0", and what its neighbours cost.

        Raises:
            PlanError: The plan has nothing of that name.
        """
        from autoplan.render.text import explain_text

        return explain_text(self, name)


def _plain(value: Any) -> Any:
    """Tuples as lists and mappings as dicts, all the way down: what JSON gives back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _layout_json(value: Any, indent: str) -> str:
    """`value` as JSON with sorted keys; what is short stays on one line, else one line an item."""
    flat = json.dumps(value, sort_keys=True, allow_nan=False)
    if not isinstance(value, (dict, list, tuple)) or (indent and len(flat) <= LINE_WIDTH):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {_layout_json(value[k], inner)}" for k in sorted(value)]
        return "{\n" + ",\n".join(inner + item for item in items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _layout_json(item, inner) for item in value) + f"\n{indent}]"


def _parse_json(text: str, source: str) -> dict[str, Any]:
    """The JSON object in `text`; repeated keys and numbers that JSON does not have are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
            raise PlanError(
                f'{source}: the key "{twice}" occurs twice in an object, expected once. Remove one.'
            )
        return keys

    def refuse(number: str) -> float:
        raise PlanError(f"{source}: {number} is not a JSON number. Write a finite number, or null.")

    try:
        raw = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        cut = " The file looks truncated." if ended else ""
        raise PlanError(
            f"{source}: not JSON at line {error.lineno} column {error.colno}: {error.msg}.{cut} "
            "Save the plan again, or repair that line."
        ) from error
    except RecursionError as error:
        raise PlanError(
            f"{source}: nested too deeply to be a plan. Save the plan again."
        ) from error
    if not isinstance(raw, dict):
        raise PlanError(
            f"{source}: $ is {_kind(raw)}, expected an object. Give a file that Plan.save wrote."
        )
    return raw


def _check_version(raw: dict[str, Any], source: str) -> None:
    version = raw.get("schema_version")
    reads = f"this autoplan reads schema_version {SCHEMA_VERSION}"
    if "schema_version" not in raw:
        raise PlanError(
            f"{source}: $.schema_version is missing; {reads}. Give a file that Plan.save wrote."
        )
    if type(version) is not int:
        raise PlanError(
            f"{source}: $.schema_version is {_kind(version)}, expected an integer; {reads}. Repair."
        )
    if version > SCHEMA_VERSION:
        raise PlanError(
            f"{source}: schema_version {version} is newer; {reads}. Upgrade autoplan or plan again."
        )
    if version < SCHEMA_VERSION:
        raise PlanError(
            f"{source}: schema_version {version} is older; {reads}. Plan again with this version."
        )


_LEAVES: dict[type, tuple[str, tuple[type, ...]]] = {
    inspect.IntType: ("an integer", (int,)),
    inspect.FloatType: ("a number", (int, float)),
    inspect.StrType: ("a string", (str,)),
    inspect.BoolType: ("true or false", (bool,)),
    inspect.NoneType: ("null", (type(None),)),
}


def _kind(raw: Any) -> str:
    """What a JSON value is, in words."""
    if isinstance(raw, (dict, list)):
        return "an object" if isinstance(raw, dict) else "an array"
    text = json.dumps(raw)
    return text if len(text) <= 40 else text[:37] + "..."


def _find_problem(raw: Any, kind: inspect.Type, path: str) -> str | None:
    """The first place where `raw` is not of `kind`; msgspec's messages leave out keys of dicts."""
    if isinstance(kind, inspect.StructType):
        return _find_in_object(raw, kind, path)
    if isinstance(kind, (inspect.DictType, inspect.VarTupleType)):
        expected, word = (dict, "object") if isinstance(kind, inspect.DictType) else (list, "array")
        if not isinstance(raw, expected):
            return f"{path} is {_kind(raw)}, expected an {word}. Repair it."
        item_type = kind.value_type if isinstance(kind, inspect.DictType) else kind.item_type
        for key, item in raw.items() if isinstance(raw, dict) else enumerate(raw):
            problem = _find_problem(item, item_type, _child(path, key))
            if problem:
                return problem
        return None
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    leaves = [_LEAVES[type(k)] for k in kinds if type(k) in _LEAVES]
    if not leaves or any(type(raw) in types for _, types in leaves):
        return None
    return f"{path} is {_kind(raw)}, expected {' or '.join(word for word, _ in leaves)}. Repair it."


def _find_in_object(raw: Any, kind: inspect.StructType, path: str) -> str | None:
    if not isinstance(raw, dict):
        return f"{path} is {_kind(raw)}, expected an object. Repair it."
    fields = {field.encode_name: field for field in kind.fields}
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(fields)}."
            return f"unknown key {_child(path, key)}; {hint} Rename or remove it."
    for name, field in fields.items():
        if name in raw:
            problem = _find_problem(raw[name], field.type, _child(path, name))
            if problem:
                return problem
        elif field.required:
            return f"{_child(path, name)} is missing, expected in every plan. Plan again."
    return None


def _child(path: str, key: str | int) -> str:
    """JSON path of a member: `$.stages[0]`, `$.parameters["lm_head.weight"]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if re.fullmatch(r"\w+", key) else f"{path}[{json.dumps(key)}]"


def _relations(plan: Plan) -> Iterator[str]:
    """Every relation that does not hold, lazily, as "path says this, expected that"."""
    yield from _check_round_trip(plan)
    yield from _check_choices(plan)
    yield from _check_stages(plan)
    yield from _check_tensors(plan)
    yield from _check_layouts(plan)


def _check_round_trip(plan: Plan) -> Iterator[str]:
    try:
        same = msgspec.convert(msgspec.to_builtins(plan), Plan) == plan
    except (TypeError, ValueError) as error:
        yield f"a field is not plain data of its type ({error})"
        return
    if not same:
        yield "a field changes when written and read (a list for a tuple, NaN), expected plain data"
    numbers = msgspec.structs.astuple(plan.estimate)
    if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
        yield "$.estimate holds a number that is not finite"


def _check_choices(plan: Plan) -> Iterator[str]:
    if plan.schema_version != SCHEMA_VERSION:
        yield f"$.schema_version is {plan.schema_version}, expected {SCHEMA_VERSION}"
    if plan.settings.mode not in MODES:
        yield f'$.settings.mode is "{plan.settings.mode}", expected one of {", ".join(MODES)}'
    if plan.schedule.name not in SCHEDULES:
        yield f'$.schedule.name is "{plan.schedule.name}", expected one of {", ".join(SCHEDULES)}'
    if min(plan.layout.dp, plan.layout.tp, plan.layout.pp, plan.schedule.num_microbatches) < 1:
        yield "$.layout and $.schedule.num_microbatches hold a number below 1, expected 1 or more"
    for i, tensor in enumerate(plan.signature.tensors):
        if tensor.batch_dim is not None and not 0 <= tensor.batch_dim < len(tensor.shape):
            path = f"$.signature.tensors[{i}].batch_dim"
            yield f"{path} is {tensor.batch_dim}, expected a dim of {tensor.shape}, or null"


def _check_stages(plan: Plan) -> Iterator[str]:
    layout, devices = plan.layout, plan.cluster.num_devices
    if len(plan.stages) != layout.pp:
        yield f"$.stages has {len(plan.stages)} stages, expected pp = {layout.pp}"
    used: dict[int, int] = {}
    owner: dict[str, int] = {}
    for i, stage in enumerate(plan.stages):
        path = f"$.stages[{i}]"
        if stage.index != i:
            yield f"{path}.index is {stage.index}, expected {i}: stages are listed in order"
        if len(stage.ranks) != layout.dp * layout.tp:
            yield f"{path}.ranks has {len(stage.ranks)}, expected dp * tp = {layout.dp * layout.tp}"
        if math.prod(stage.mesh.values()) != len(stage.ranks):
            yield f"{path}.mesh is {stage.mesh}, expected sizes whose product is {len(stage.ranks)}"
        for rank in stage.ranks:
            if rank in used or not 0 <= rank < devices:
                where = f"is also in stage {used[rank]}" if rank in used else "does not exist"
                yield f"{path}.ranks: rank {rank} {where}, expected distinct ranks below {devices}"
            used[rank] = i
        for label in stage.layers:
            if label in owner:
                yield f'{path}.layers: "{label}" is also in stage {owner[label]}, expected it once'
            owner[label] = i
        for label in set(stage.recompute) - set(stage.layers):
            yield f'{path}.recompute: "{label}" is not among its layers'
        for k, tensor in enumerate(stage.receives):
            if not 0 <= tensor.from_stage < i:
                at = f"{path}.receives[{k}].from_stage"
                yield f"{at} is {tensor.from_stage}, expected an earlier stage"
    idle = devices - len(used)
    if plan.search.idle_devices != idle:
        yield f"$.search.idle_devices is {plan.search.idle_devices}, expected {idle} of {devices}"
    totals = [stage.estimate.memory.total for stage in plan.stages]
    peak = plan.estimate.peak_stage
    if not 0 <= peak < len(totals):
        yield f"$.estimate.peak_stage is {peak}, expected a stage below {len(totals)}"
    elif not plan.estimate.peak_memory_bytes == totals[peak] == max(totals):
        yield (
            f"$.estimate.peak_memory_bytes is {plan.estimate.peak_memory_bytes} on stage {peak}, "
            f"expected {max(totals)}, the largest total of a stage"
        )


def _check_tensors(plan: Plan) -> Iterator[str]:
    num_stages = len(plan.stages)
    for kind, tensors in (("parameters", plan.parameters), ("buffers", plan.buffers)):
        for name, tensor in tensors.items():
            for stage in tensor.stages:
                if not 0 <= stage < num_stages:
                    path = _child(f"$.{kind}", name)
                    yield f"{path}.stages has {stage}, expected stages below {num_stages}"
    for name, parameter in plan.parameters.items():
        if not 0 <= parameter.zero <= 3:
            yield f"{_child('$.parameters', name)}.zero is {parameter.zero}, expected 0 to 3"
    seen: set[str] = set()
    for i, group in enumerate(plan.shared):
        if len(group) < 2 or len({*group} - seen) < len(group):
            yield f"$.shared[{i}] is {list(group)}, expected two or more names, each in one group"
        seen.update(group)
        for name in group:
            if name not in plan.parameters:
                near = difflib.get_close_matches(name, plan.parameters, n=1)
                hint = f', did you mean "{near[0]}"?' if near else ", expected a parameter's name"
                yield f'$.shared[{i}]: "{name}" is not in $.parameters{hint}'
        if len({plan.parameters[n].shape for n in group if n in plan.parameters}) > 1:
            yield f"$.shared[{i}]: {list(group)} have different shapes, expected one tensor"
    for name, index in plan.op_strategies.items():
        if not 0 <= index < len(plan.strategies):
            path = _child("$.op_strategies", name)
            yield f"{path} is {index}, expected an index below {len(plan.strategies)}"


def _check_layouts(plan: Plan) -> Iterator[str]:
    texts: list[tuple[str, str, Callable[[str], object]]] = []
    for name, parameter in plan.parameters.items():
        path = _child("$.parameters", name)
        texts += [
            (f"{path}.spec", parameter.spec, parse_spec),
            (f"{path}.used", parameter.used, parse_layout),
        ]
    for i, strategy in enumerate(plan.strategies):
        for side in ("inputs", "outputs"):
            layouts = enumerate(getattr(strategy, side))
            texts += [(f"$.strategies[{i}].{side}[{k}]", t, parse_layout) for k, t in layouts]
    for i, conversion in enumerate(plan.conversions):
        for end in ("source", "target"):
            texts.append((f"$.conversions[{i}].{end}", getattr(conversion, end), parse_layout))
    for i, stage in enumerate(plan.stages):
        for k, tensor in enumerate(stage.receives):
            texts.append((f"$.stages[{i}].receives[{k}].layout", tensor.layout, parse_layout))
    for path, text, parse in texts:
        try:
            parse(text)
        except ValueError as error:
            yield f"{path}: {error}"
