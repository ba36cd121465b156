# SPDX-License-Identifier: Apache-2.0
"""An op's rule and local form, tried on pretend ranks: do the parts' results make up the result?

One op is run whole, and then on every rank's parts by its local form, under every strategy of its
rule. Values and gradients must be the parts of the whole's. Sums are put together here, so what
needs collectives of its own (`NeedsGroupError`) is left to the distributed tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from pretend import Place, Sizes, parts_of, places_of, wrong_part

from autoplan.canonical import canonicalize
from autoplan.executor.local_op import LocalOp
from autoplan.executor.local_ops import local_call
from autoplan.executor.special_ops import Moment
from autoplan.graph import Graph, Op, Ref, TensorMeta, Value
from autoplan.placements import Layout, Partial
from autoplan.sharding.factors import OpRule
from autoplan.sharding.rules import find_rule
from autoplan.sharding.strategies import Strategy, axis_choices, enumerate_strategies

Tensor = torch.Tensor
Blocks = Mapping[str, tuple[int, ...]]  # letter -> numbers of blocks to split it in, besides 1
MOMENT = Moment(0, 1, 7)
LEFT_OUT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}


class NeedsGroupError(Exception):
    """The local form calls a collective of its own."""


@dataclass(frozen=True)
class PretendRank:
    """What a local form asks of `executor.meshes.Ranks`."""

    coordinates: Place
    axis_sizes: Sizes
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def group(self, axis: int) -> object:
        raise NeedsGroupError(f"a group along axis {axis}")


# -- one call as a graph ---------------------------------------------------------------------------


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def can_carry(tensor: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def meta_of(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), name_of(tensor.dtype))


def tensors_in(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def graph_of(
    func: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    frozen: frozenset[str] = frozenset(),
    num_used: int | None = None,
) -> tuple[Graph, dict[str, Tensor]]:
    """The canonical graph of one ATen call, and the values of its inputs.

    Floating tensors are trainable, except for the arguments named in `frozen` ("*": all). Only the
    first `num_used` outputs are used; None: all.
    """
    held: dict[str, Tensor] = {}
    fixed: set[str] = set()

    def encode(argument: object, name: str) -> object:
        if isinstance(argument, Tensor):
            if {name, "*"} & frozen:
                fixed.add(f"x{len(held)}")
            held[f"x{len(held)}"] = argument
            return Ref(len(held) - 1)
        if isinstance(argument, list | tuple):
            return tuple(encode(a, name) for a in argument)
        return name_of(argument) if isinstance(argument, torch.dtype) else argument

    schema = func._schema.arguments
    given = {**dict(zip([a.name for a in schema], args)), **kwargs}
    arguments = {
        a.name: encode(given.get(a.name, a.default_value), a.name)
        for a in schema
        if a.name not in LEFT_OUT
    }
    results = tensors_in(func(*args, **kwargs))
    values = {}
    for name, tensor in held.items():
        trainable = can_carry(tensor) and name not in fixed
        values[name] = Value(
            name, meta_of(tensor), "parameter" if trainable else "input", trainable
        )
    outputs = tuple(f"y{i}" for i in range(len(results)))
    grad = any(v.requires_grad for v in values.values())
    for name, tensor in zip(outputs, results):
        carries = grad and can_carry(tensor)
        values[name] = Value(name, meta_of(tensor), "activation", carries)
    op = Op("op", str(func), tuple(held), outputs, MappingProxyType(arguments))
    inputs = tuple(n for n in held if values[n].kind == "input")
    return canonicalize(Graph("Call", values, (op,), inputs, outputs[:num_used])), held


# -- an op on whole tensors ------------------------------------------------------------------------


def fill(argument: object, inputs: list[Tensor]) -> Any:
    if isinstance(argument, Ref):
        return inputs[argument.index]
    return [fill(a, inputs) for a in argument] if isinstance(argument, list | tuple) else argument


def run_whole(op: Op, inputs: list[Tensor]) -> list[Tensor | None]:
    """The op's outputs on one device, by torch's own functions."""
    given = {key: fill(value, inputs) for key, value in op.arguments.items()}
    if op.target.startswith("autoplan."):
        return _OWN[op.target](given)
    if isinstance(given.get("dtype"), str):
        given["dtype"] = getattr(torch, given["dtype"])
    namespace, name, overload = op.target.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return list(tensors_in(func(**given)))


def _loss(given: dict[str, Any], reduction: str) -> list[Tensor | None]:
    weight, ignored = given["weight"], given["ignore_index"]
    if given["log_probs"]:
        return [
            F.nll_loss(
                given["input"], given["target"], weight, ignore_index=ignored, reduction=reduction
            )
        ]
    smoothing = given["label_smoothing"]
    return [
        F.cross_entropy(
            given["input"],
            given["target"],
            weight,
            ignore_index=ignored,
            reduction=reduction,
            label_smoothing=smoothing,
        )
    ]


def _count(given: dict[str, Any]) -> list[Tensor | None]:
    """What torch divides a mean by: the sum of all rows' losses over their mean."""
    target = given["target"]
    dtype = getattr(torch, given["dtype"])
    if target.is_floating_point():
        return [torch.tensor(target.numel() // given["num_classes"], dtype=dtype)]
    rows = target.flatten()
    logits = torch.zeros(len(rows), given["num_classes"], dtype=torch.float64)
    weight, ignored = given["weight"], given["ignore_index"]
    total = F.cross_entropy(logits, rows, weight, ignore_index=ignored, reduction="sum")
    mean = F.cross_entropy(logits, rows, weight, ignore_index=ignored, reduction="mean")
    return [(total / mean).to(dtype)]


def _batch_norm(given: dict[str, Any]) -> list[Tensor | None]:
    mean, var = given["running_mean"], given["running_var"]
    new_mean, new_var = (None if x is None else x.detach().clone() for x in (mean, var))
    out = F.batch_norm(
        given["input"],
        new_mean,
        new_var,
        given["weight"],
        given["bias"],
        given["training"],
        given["momentum"],
        given["eps"],
    )
    return [out, new_mean, new_var]


def _index(given: dict[str, Any]) -> list[Tensor | None]:
    return [torch.ops.aten.index.Tensor(given["self"], given["indices"])]


def _grouped_mm(given: dict[str, Any]) -> list[Tensor | None]:
    matrices = given["weight"][given["group"]]
    return [torch.einsum("rk,rkn->rn", given["input"], matrices)]


_OWN: dict[str, Callable[[dict[str, Any]], list[Tensor | None]]] = {
    "autoplan.cross_entropy": lambda given: _loss(given, "none"),
    "autoplan.cross_entropy_sum": lambda given: _loss(given, "sum"),
    "autoplan.cross_entropy_count": _count,
    "autoplan.batch_norm": _batch_norm,
    "autoplan.index": _index,
    "autoplan.grouped_mm": _grouped_mm,
}


# -- the same on parts -----------------------------------------------------------------------------


def near(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype and, up to rounding, in value."""
    if a.dtype != b.dtype or not can_carry(a):
        return torch.equal(a, b)
    tolerance = 1e-5 if a.dtype == torch.float32 else 1e-9
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def roughly(a: Tensor, b: Tensor) -> bool:
    """As `near`, where an op goes through float32."""
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def summand(x: Tensor) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype) if can_carry(x) else torch.zeros_like(x)


@dataclass(frozen=True)
class Whole:
    """One op run on one device: inputs, outputs, the outputs' gradients and the inputs'."""

    op: Op
    graph: Graph
    inputs: list[Tensor]
    outputs: list[Tensor | None]
    output_grads: list[Tensor | None]
    input_grads: list[Tensor | None]

    def carries(self, name: str) -> bool:
        return bool(name) and self.graph.values[name].requires_grad


def differentiate(
    outputs: list[Tensor | None], grads: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of the inputs; zeros where one has no influence, None where it needs none."""
    wanted = [x for x in inputs if x.requires_grad]
    pairs = [(o, g) for o, g in zip(outputs, grads) if o is not None and g is not None]
    pairs = [(o, g) for o, g in pairs if o.requires_grad]
    if not wanted or not pairs:
        return [torch.zeros_like(x) if x.requires_grad else None for x in inputs]
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    )
    grads_of = [next(found) if x.requires_grad else None for x in inputs]
    return [
        torch.zeros_like(x) if x.requires_grad and g is None else g
        for x, g in zip(inputs, grads_of)
    ]


def run_op(op: Op, graph: Graph, values: Mapping[str, Tensor]) -> Whole:
    """The op on one device, with random gradients from above where its outputs carry any."""
    inputs = [values[n].detach().clone() for n in op.inputs]
    for name, tensor in zip(op.inputs, inputs):
        tensor.requires_grad_(graph.values[name].requires_grad)
    outputs = run_whole(op, inputs)
    grads: list[Tensor | None] = []
    for name, output in zip(op.outputs, outputs):
        carries = bool(name) and graph.values[name].requires_grad
        grads.append(summand(output) if output is not None and carries else None)
    found = differentiate(outputs, grads, inputs)
    kept = [o.detach() if o is not None and name else None for name, o in zip(op.outputs, outputs)]
    return Whole(op, graph, inputs, kept, grads, found)


def local_meta(meta: TensorMeta, layout: Layout, sizes: Sizes) -> TensorMeta:
    return TensorMeta(layout.value.local_shape(meta.shape, sizes), meta.dtype)


def local_op(whole: Whole, strategy: Strategy, sizes: Sizes) -> LocalOp:
    op, values = whole.op, whole.graph.values
    inputs = tuple(values[n].meta for n in op.inputs)
    outputs = tuple(values[n].meta if n else None for n in op.outputs)
    return LocalOp(
        op=op,
        inputs=strategy.inputs,
        outputs=strategy.outputs,
        global_inputs=inputs,
        global_outputs=outputs,
        local_inputs=tuple(local_meta(m, at, sizes) for m, at in zip(inputs, strategy.inputs)),
        local_outputs=tuple(
            local_meta(m, at, sizes) if m else None for m, at in zip(outputs, strategy.outputs)
        ),
        index=0,
        over_time=False,
    )


def run_rank(local: LocalOp, sizes: Sizes, place: Place, inputs: list[Tensor]) -> list[Any]:
    """What one rank's local form gives for its parts."""
    call = local_call(local, PretendRank(place, sizes))  # type: ignore[arg-type]
    args = [fill(a, inputs) for a in call.args]
    kwargs = {key: fill(value, inputs) for key, value in call.kwargs.items()}
    return list(
        tensors_in(call.function(*([MOMENT] if call.needs_moment else []), *args, **kwargs))
    )


def check_strategy(whole: Whole, strategy: Strategy, sizes: Sizes) -> str:
    """What is wrong with one strategy, "" when its parts make up the whole.

    Raises:
        NeedsGroupError: Its local form calls collectives.
    """
    op, places = whole.op, places_of(sizes)
    local = local_op(whole, strategy, sizes)
    ins = [
        parts_of(x.detach(), layout.value, sizes, summand)
        for x, layout in zip(whole.inputs, strategy.inputs)
    ]
    ups = [
        None if g is None else parts_of(g, layout.grad, sizes, summand)
        for g, layout in zip(whole.output_grads, strategy.outputs)
    ]
    outs: list[dict[Place, Tensor]] = [{} for _ in op.outputs]
    grads: list[dict[Place, Tensor]] = [{} for _ in op.inputs]
    for place in places:
        given = [part[place].detach().clone() for part in ins]
        for x, own in zip(given, whole.inputs):
            x.requires_grad_(own.requires_grad)
        results = run_rank(local, sizes, place, given)
        for i, (name, result) in enumerate(zip(op.outputs, results)):
            if name:
                outs[i][place] = result.detach()
        back = differentiate(results, [None if u is None else u[place] for u in ups], given)
        for i, grad in enumerate(back):
            if grad is not None:
                grads[i][place] = grad
    mixed = "float32" in op.signature()
    for i, (parts, layout) in enumerate(zip(outs, strategy.outputs)):
        if parts:
            wrong = wrong_part(parts, whole.outputs[i], layout.value, sizes, near)
            if wrong:
                return f"output {i}: {wrong}"
    for i, (parts, layout) in enumerate(zip(grads, strategy.inputs)):
        if parts:
            equal = roughly if mixed else near
            wrong = wrong_part(parts, whole.input_grads[i], layout.grad, sizes, equal)
            if wrong:
                return f"gradient of input {i}: {wrong}"
    return ""


def describe(strategy: Strategy) -> str:
    inputs, outputs = ", ".join(map(str, strategy.inputs)), ", ".join(map(str, strategy.outputs))
    return f"[{strategy}] {inputs} -> {outputs}"


def _sums_truth(whole: Whole, strategy: Strategy) -> bool:
    """Whether a truth value would be a sum not yet taken, which nothing makes."""
    return any(
        x.dtype == torch.bool and any(isinstance(p, Partial) for p in layout.value)
        for x, layout in zip(whole.inputs, strategy.inputs)
    )


@dataclass(frozen=True)
class Report:
    """What came of all strategies of an op on a mesh."""

    tried: int
    needs_group: int
    wrong: tuple[str, ...]


def check_op(whole: Whole, sizes: Sizes, blocks: Blocks) -> Report:
    """Every strategy of the op's rule on one mesh.

    Args:
        whole: The op, run on one device.
        sizes: The mesh.
        blocks: Per letter of the rule, numbers of blocks to split it in, besides 1.
    """
    op, graph = whole.op, whole.graph
    rule = find_rule(op, graph)
    assert rule is not None, f"{op.target} has no rule"
    grads = any(graph.values[n].requires_grad for n in op.inputs)
    choices = axis_choices(rule, blocks, sums=True, grads=grads)
    tried = needs_group = 0
    wrong = []
    for strategy in enumerate_strategies(op, rule, graph, sizes, (choices,) * len(sizes)):
        if _sums_truth(whole, strategy):
            continue
        tried += 1
        try:
            problem = check_strategy(whole, strategy, sizes)
        except NeedsGroupError:
            needs_group += 1
            continue
        except (RuntimeError, IndexError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            wrong.append(f"{op.signature()} on {sizes}, {describe(strategy)}: {problem}")
    return Report(tried, needs_group, tuple(wrong))


# -- a graph -------------------------------------------------------------------------------------

MESHES: tuple[Sizes, ...] = ((2,), (2, 2))
# Their local forms call collectives where classes, or what statistics run over, are split.
GROUPED = {"autoplan.cross_entropy", "autoplan.cross_entropy_sum", "autoplan.batch_norm"}


def values_of(graph: Graph, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every value of a graph, op by op on one device."""
    values = dict(held)
    for op in graph.ops:
        outputs = run_whole(op, [values[n] for n in op.inputs])
        values.update((n, t) for n, t in zip(op.outputs, outputs) if n and t is not None)
    return values


def problems_of(
    graph: Graph, values: dict[str, Tensor], blocks: Callable[[Op, OpRule], Blocks]
) -> list[str]:
    """What is wrong with any strategy of any op of a graph."""
    wrong: list[str] = []
    for op in graph.ops:
        rule = find_rule(op, graph)
        assert rule is not None, f"{op.target} has no rule"
        whole = run_op(op, graph, values)
        for sizes in MESHES:
            # with many letters, pairs of blocks are too many: they are tried on one axis alone
            few = len(rule.letters) <= 3 or len(sizes) == 1
            report = check_op(whole, sizes, blocks(op, rule) if few else {})
            assert report.tried > report.needs_group or op.target in GROUPED
            wrong += report.wrong
    return wrong
