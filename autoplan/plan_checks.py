# SPDX-License-Identifier: Apache-2.0
"""How the parts of a plan relate: what holds in every plan that can run, checked one by one.

In comes a Plan, out go the relations that do not hold, each with its JSON path. The types have been
checked when the document was read (`plan_format.py`). Not here: whether a plan fits a model, which
needs the model (`executor/`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from autoplan.placements import parse_layout, parse_spec
from autoplan.plan_format import json_path

if TYPE_CHECKING:
    from autoplan.plan import Plan

MODES = ("train", "infer")
SCHEDULES = ("gpipe", "1f1b", "infer")


def broken_relations(plan: Plan, version: int) -> Iterator[str]:
    """Every relation that does not hold, lazily, as "path says this, expected that".

    Args:
        plan: The plan to check.
        version: The schema version that it must have.
    """
    yield from _check_round_trip(plan)
    yield from _check_choices(plan, version)
    yield from _check_stages(plan)
    yield from _check_tensors(plan)
    yield from _check_layouts(plan)


def _check_round_trip(plan: Plan) -> Iterator[str]:
    try:
        same = msgspec.convert(msgspec.to_builtins(plan), type(plan)) == plan
    except (TypeError, ValueError) as error:
        yield f"a field is not plain data of its type ({error})"
        return
    if not same:
        yield "a field changes when written and read (a list for a tuple, NaN), expected plain data"
    numbers = msgspec.structs.astuple(plan.estimate)
    if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
        yield "$.estimate holds a number that is not finite"


def _check_choices(plan: Plan, version: int) -> Iterator[str]:
    if plan.schema_version != version:
        yield f"$.schema_version is {plan.schema_version}, expected {version}"
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
                    path = json_path(f"$.{kind}", name)
                    yield f"{path}.stages has {stage}, expected stages below {num_stages}"
    for name, parameter in plan.parameters.items():
        if not 0 <= parameter.zero <= 3:
            yield f"{json_path('$.parameters', name)}.zero is {parameter.zero}, expected 0 to 3"
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
            path = json_path("$.op_strategies", name)
            yield f"{path} is {index}, expected an index below {len(plan.strategies)}"


def _check_layouts(plan: Plan) -> Iterator[str]:
    texts: list[tuple[str, str, Callable[[str], object]]] = []
    for name, parameter in plan.parameters.items():
        path = json_path("$.parameters", name)
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
