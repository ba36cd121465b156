# SPDX-License-Identifier: Apache-2.0
"""The doors in Python: `optimize` makes a plan, `parallelize` runs one. Arguments are checked and
the rooms called in order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from autoplan.api_pins import Pins, pinned, pinned_placements
from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, PlanError
from autoplan.plan import ClusterSummary, InputTensor, Plan, Scalar, Settings, Signature

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoplan.capture import Captured
    from autoplan.executor.module import ParallelModule
    from autoplan.solver.assemble import Setting
    from autoplan.solver.space import Space

OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
MODES = ("train", "infer")


def optimize(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: Mapping[str, object] | tuple[object, ...],
    *,
    loss_fn: Callable[[object, object], torch.Tensor] | None = None,
    mode: str = "train",
    optimizer: str = "adamw",
    precision: str | None = None,
    pins: Pins | None = None,
    memory_reserve: float = 0.08,
    time_limit_s: float = 60.0,
    top: int = 3,
    progress: Callable[[str, float], None] | None = None,
) -> Plan:
    """The fastest plan that the cost model knows for a model on a cluster.

    Args:
        model: Any nn.Module, on meta too; never modified, nor the caller's random state.
        cluster: `Cluster.load("dgx-h100-2x8")`, a path, or `Cluster(...)`.
        example_inputs: One global batch: a dict of keyword inputs, or a tuple of positional ones.
        loss_fn: loss_fn(outputs, batch) -> scalar; default: the model's own loss.
        mode: "train", or "infer" for forward only.
        optimizer: Whose state is held: "adamw", "adam", "sgd", "sgd-momentum".
        precision: None keeps the model's dtypes; "bf16-mixed": parameters, gradients and states
            float32, cast to bfloat16 for use.
        pins: What is already decided.
        memory_reserve: Share of a device's memory that is left free.
        time_limit_s: For the search.
        top: How many other layouts to keep with the reason they lost.
        progress: Called with (what, share done).

    Raises:
        CaptureError: The model cannot be captured, or an op that is not cheap has no rule
            (UnsupportedOpError).
        InfeasibleError: No plan fits memory, sizes and pins.
        ValueError: An argument is not one of those named here.
    """
    ((_, result),) = optimize_each(
        model,
        (cluster,),
        example_inputs,
        loss_fn=loss_fn,
        mode=mode,
        optimizer=optimizer,
        precision=precision,
        pins=pins,
        memory_reserve=memory_reserve,
        time_limit_s=time_limit_s,
        top=top,
        progress=progress,
    )
    if isinstance(result, InfeasibleError):
        raise result
    return result


def optimize_each(
    model: nn.Module,
    clusters: Iterable[Cluster],
    example_inputs: Mapping[str, object] | tuple[object, ...],
    *,
    loss_fn: Callable[[object, object], torch.Tensor] | None = None,
    mode: str = "train",
    optimizer: str = "adamw",
    precision: str | None = None,
    pins: Pins | None = None,
    memory_reserve: float = 0.08,
    time_limit_s: float = 60.0,
    top: int = 3,
    progress: Callable[[str, float], None] | None = None,
) -> Iterator[tuple[Cluster, Plan | InfeasibleError]]:
    """`optimize` for one cluster after the other; the model is captured once.

    Args:
        model, example_inputs: As of `optimize`, and so all the rest.
        clusters: Read as the plans are asked for.

    Yields:
        Each cluster with its plan, or with the reason that there is none.

    Raises:
        CaptureError, ValueError: As `optimize`.
    """
    from autoplan.capture import capture
    from autoplan.costs.profile import Profiles
    from autoplan.solver.account import alternatives
    from autoplan.solver.assemble import assemble
    from autoplan.solver.decision import decide
    from autoplan.solver.search import Search
    from autoplan.solver.space import Space

    pins = pins or Pins()
    _check(mode, optimizer, memory_reserve, pins)
    if progress is not None:
        progress("capture", 0.0)
    captured = capture(model, example_inputs, loss_fn=loss_fn, mode=mode, precision=precision)
    settings = Settings(
        mode=mode,
        optimizer=optimizer,
        precision=precision,
        memory_reserve=memory_reserve,
        pins=pins.to_json(),
    )
    spaces: dict[tuple[tuple[str, str], ...], Space] = {}
    for cluster in clusters:
        limit = cluster.device.memory_bytes * (1.0 - memory_reserve)
        try:
            placements = pinned_placements(captured.graph, pins, cluster.num_devices)
            if placements not in spaces:
                spaces[placements] = Space.of(captured.graph, placements)
                spaces[placements].check_rules()
            space = spaces[placements]
            search = Search(
                space,
                cluster,
                pinned(pins, placements),
                mode == "train",
                optimizer,
                limit,
                time_limit_s,
                progress,
            )
            search.run()
        except InfeasibleError as refused:
            yield cluster, refused
            continue
        decision, figures = decide(search)
        figures = replace(figures, alternatives=alternatives(search, top))
        setting = _setting(model, captured, space, cluster, settings, Profiles.of(cluster).digest)
        yield cluster, assemble(setting, decision, figures)


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    loss_fn: Callable[[object, object], torch.Tensor] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> ParallelModule:
    """This rank's part of a planned model; called by every process of a torchrun launch with the
    same plan file.

    Args:
        model: The planned model; with real weights each rank takes its shards of them, on meta they
            are loaded or initialised afterwards.
        plan: The plan.
        loss_fn: The one it was planned with, if any.
        buffers: Values of buffers that a meta model lacks and no checkpoint has.

    Raises:
        PlanError: Another world size, another model, or other inputs than the plan's; before
            anything is loaded.

    Warns:
        UserWarning: The plan was made with another release of torch that gives the same graph.
    """
    from autoplan.capture import capture
    from autoplan.executor.module import ParallelModule, check_world

    check_world(plan)
    if type(model).__name__ != plan.model.name:
        raise PlanError(
            f"the plan was made for another model: it is a {plan.model.name}, "
            f"this is a {type(model).__name__}. Plan again, or load the planned model."
        )
    inputs = _example_inputs(model, plan)
    captured = capture(
        model, inputs, loss_fn=loss_fn, mode=plan.settings.mode, precision=plan.settings.precision
    )
    versions = _versions(plan)
    if captured.graph.digest != plan.fingerprint.graph:
        raise PlanError(
            f"the plan was made for another model: {_first_difference(plan, captured)}"
            f"{f' ({versions})' if versions else ''}. Plan again, or load the planned model."
        )
    if versions:
        warnings.warn(
            f"{versions}: the plan runs the same ops, but its figures may be out of date. "
            "Plan again to have them anew.",
            stacklevel=2,
        )
    return ParallelModule(model, captured, plan, buffers or {})


def register_rule(op: str, rule: str, *, example: tuple[object, ...] | None = None) -> None:
    """Says how a custom op may be split: autoplan.register_rule("mylib::op", "b* k, k n -> b* n").

    The rule names the dims of the op's tensors in letters, as einsum does; dims of one letter
    belong together (`b*`: any number of leading dims; `k^`: never split; `n?`: an operand that may
    be absent; "pointwise" where all dims do; marks after a semicolon, such as `additive(2)` for a
    bias, as in the table of sharding/rules.py). A letter that the result lacks is summed over. The
    op is tried at once in numbers: on the parts of two and of four pretend ranks, values and
    gradients.

    A rule holds for this process. Register it in every process that plans or runs the model: a
    plan whose rules are not all there is refused.

    Args:
        op: "namespace::name", callable on the CPU.
        rule: The letters of its operands and results.
        example: Small arguments to try it with, on the CPU; by default random float64 tensors.

    Raises:
        ValueError: The op has a rule, cannot be called so, or the parts do not make up the whole:
            the message shows the first number that differs.
    """
    from autoplan.executor.rule_trial import try_rule
    from autoplan.sharding.rules import register, unregister

    if op.count("::") != 1:
        raise ValueError(f"op {op!r} is not written 'namespace::name'.")
    target = op.replace("::", ".")
    register(target, rule)
    try:
        try_rule(target, rule, example)
    except ValueError:
        unregister(target)
        raise


def _check(mode: str, optimizer: str, memory_reserve: float, pins: Pins) -> None:
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not known. Use one of {', '.join(MODES)}.")
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {optimizer!r} is not known. Use one of {', '.join(OPTIMIZERS)}."
        )
    if not 0.0 <= memory_reserve < 1.0:
        raise ValueError(
            f"memory_reserve {memory_reserve} is not a share. Give a number from 0 to below 1."
        )
    for name in ("tp", "pp", "dp", "num_microbatches"):
        value = getattr(pins, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InfeasibleError(f"{name}={value} is not a degree. Give a whole number from 1 on.")
    if pins.zero not in (None, 0, 1, 2, 3):
        raise InfeasibleError(f"zero={pins.zero} is not a ZeRO stage. Give 0, 1, 2 or 3.")
    if pins.schedule not in (None, "gpipe", "1f1b"):
        raise InfeasibleError(f"schedule {pins.schedule!r} is not known. Use 'gpipe' or '1f1b'.")
    stages, parts = pins.pp or 1, pins.num_microbatches
    if pins.schedule == "1f1b" and parts is not None and parts < stages:
        raise InfeasibleError(
            f"schedule 1f1b cannot run num_microbatches={parts} on pp={stages} stages: "
            f"it starts with a microbatch on every stage. "
            f"Use at least {stages} microbatches, or schedule='gpipe'."
        )


def _setting(
    model: nn.Module,
    captured: Captured,
    space: Space,
    cluster: Cluster,
    settings: Settings,
    profiles_digest: str,
) -> Setting:
    """What the plan is for, as `assemble` writes it down."""
    import torch

    from autoplan.solver.assemble import Setting

    tensors = tuple(
        InputTensor(
            path=x.path,
            shape=x.shape,
            dtype=x.dtype,
            batch_dim=0 if x.value in space.batch.positions else None,
        )
        for x in captured.leaves
        if x.value
    )
    # capture takes no other constants
    constants = cast(
        "dict[str, Scalar]", {x.path: x.constant for x in captured.leaves if not x.value}
    )
    persistent = set(model.state_dict(keep_vars=True))
    return Setting(
        graph=captured.graph,
        batch=space.batch,
        signature=Signature(
            positional=captured.positional,
            tensors=tensors,
            constants=constants,
        ),
        settings=settings,
        cluster=ClusterSummary(
            name=cluster.name,
            num_hosts=cluster.num_hosts,
            devices_per_host=cluster.devices_per_host,
            device=cluster.device.name,
            memory_bytes=int(cluster.device.memory_bytes),
            num_devices=cluster.num_devices,
            description=cluster.to_json(),
        ),
        cluster_digest=cluster.digest,
        profiles_digest=profiles_digest,
        torch_version=str(torch.__version__),
        unruled_ops=space.unruled_ops,
        non_persistent=frozenset(
            n for n, _ in model.named_buffers(remove_duplicate=False) if n not in persistent
        ),
    )


def _example_inputs(model: nn.Module, plan: Plan) -> Mapping[str, object] | tuple[object, ...]:
    """Inputs with the planned structure, shapes and constants, on the model's device."""
    import torch

    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    leaves: dict[str, object] = {
        t.path: torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=device)
        for t in plan.signature.tensors
    }
    leaves.update(plan.signature.constants)
    nested: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = path.split(".")
        place = nested
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    structure = _as_containers(nested)
    if plan.signature.positional:
        return tuple(structure[str(i)] for i in range(len(structure)))
    return structure


def _as_containers(nested: dict[str, Any]) -> dict[str, Any]:
    return {k: _as_list(v) if isinstance(v, dict) else v for k, v in nested.items()}


def _as_list(nested: dict[str, Any]) -> Any:
    inner = _as_containers(nested)
    if all(k.isdigit() for k in inner):
        return [inner[str(i)] for i in range(len(inner))]
    return inner


def _versions(plan: Plan) -> str:
    """What the plan's torch and this one are, if they differ; builds for other devices do not."""
    import torch

    planned, here = plan.torch_version.partition("+")[0], str(torch.__version__).partition("+")[0]
    return f"planned with torch {planned}, this is torch {here}" if planned != here else ""


def _first_difference(plan: Plan, captured: Captured) -> str:
    """In words, what differs first between the planned graph and this one."""
    graph = captured.graph
    for value in graph.of_kind("parameter"):
        entry = plan.parameters.get(value.name)
        if entry is None:
            return f"it has no parameter {value.name!r}"
        if tuple(entry.shape) != value.meta.shape:
            return f"{value.name!r} has shape {tuple(entry.shape)} in it, here {value.meta.shape}"
        if entry.dtype != (value.stored_dtype or value.meta.dtype):
            here = value.stored_dtype or value.meta.dtype
            return f"{value.name!r} is {entry.dtype} in it, here {here}"
    missing = [
        n
        for n in plan.parameters
        if n not in graph.values and not any(n in g for g in graph.shared)
    ]
    if missing:
        return f"it has a parameter {missing[0]!r} that this model lacks"
    if plan.model.num_ops != len(graph.ops):
        return (
            f"it has {plan.model.num_ops} ops, this model {len(graph.ops)} "
            f"(another mode, loss or library version)"
        )
    return (
        f"its graph is {plan.fingerprint.graph}, this one's {graph.digest} "
        f"(ops or arguments differ)"
    )
